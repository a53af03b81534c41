package postgres

import "strings"

// StatementName is the name that sqlc has written at the head of a statement; of any other, such as BEGIN, the statement itself.
func StatementName(sql string) string {
	if rest, ok := strings.CutPrefix(sql, "-- name: "); ok {
		name, _, _ := strings.Cut(rest, " ")
		return name
	}
	return sql
}
