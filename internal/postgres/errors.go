package postgres

import (
	"errors"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"
)

// IsUniqueViolation reports whether err says that the named unique index refused a row.
func IsUniqueViolation(err error, index string) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == pgerrcode.UniqueViolation && pgErr.ConstraintName == index
}

// IsNotNullViolation reports whether err says that the named column was given no value.
func IsNotNullViolation(err error, table, column string) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == pgerrcode.NotNullViolation && pgErr.TableName == table && pgErr.ColumnName == column
}

// IsForeignKeyViolation reports whether err says that a row refers to one that there is not.
func IsForeignKeyViolation(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == pgerrcode.ForeignKeyViolation
}

// IsDeadlock reports whether PostgreSQL rolled the statement back to end a deadlock. Repeating it is safe.
func IsDeadlock(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == pgerrcode.DeadlockDetected
}

// IsFault reports whether PostgreSQL refused the statement itself: its data, its syntax, or a constraint. Repeating it is of no use. A
// table or column that is missing is no fault: the database is older than this build, and is about to be migrated.
func IsFault(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || pgErr.Code == pgerrcode.UndefinedTable || pgErr.Code == pgerrcode.UndefinedColumn {
		return false
	}
	return pgerrcode.IsDataException(pgErr.Code) ||
		pgerrcode.IsIntegrityConstraintViolation(pgErr.Code) ||
		pgerrcode.IsSyntaxErrororAccessRuleViolation(pgErr.Code)
}

// IsAmbiguous reports whether the statement that ended with err may have been carried out nevertheless. Only an ERROR is
// PostgreSQL's word that it was rolled back; a FATAL ends the connection and says nothing of a commit that was under way.
func IsAmbiguous(err error) bool {
	if err == nil || errors.Is(err, ErrNoConnection) || pgconn.SafeToRetry(err) {
		return false
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return !ok || pgErr.SeverityUnlocalized != "ERROR"
}
