package api

import (
	"strconv"
	"strings"
	"time"
)

// MaxWait is what a client's wait=N is cut to. Twenty seconds outlast the attempt that is waited for (GATEWAY_TIMEOUT is 10s), and
// stay below the thirty after which many clients and proxies hang up on their own.
const MaxWait = 20 * time.Second

// preferences are those of RFC 7240 that this service knows.
type preferences struct {
	respondAsync bool
	wait         time.Duration // whole seconds, at most MaxWait; meaningless unless waitSet
	waitSet      bool          // wait=0 is a preference too
}

// parsePrefer reads all field lines of Prefer. A preference is a wish, so nothing in it is ever an error: what is unknown or
// malformed is as if it had not been sent. Parameters are ignored. Of a preference that is named twice, the first counts (RFC 7240,
// section 2), even if that one is malformed.
func parsePrefer(lines []string) preferences {
	var p preferences
	seen := map[string]bool{}
	for _, line := range lines {
		// Each line by itself, so that an open quote swallows no other line.
		for _, element := range splitUnquoted(line, ',') {
			name, value, ok := parsePreference(element)
			if seen[name] {
				continue
			}
			seen[name] = true
			if !ok {
				continue
			}
			switch name {
			case "respond-async":
				// An empty value is no value, says the RFC. Any other makes it something that is not the RFC's respond-async, and
				// the safe way to misunderstand a client is to give it the final answer.
				p.respondAsync = value == ""
			case "wait":
				p.wait, p.waitSet = parseWait(value)
			}
		}
	}
	return p
}

// parsePreference reads one preference: name, or name=value with a token or a quoted string, and parameters that are dropped. ok is
// false if the value is malformed; the name, in lower case, is there all the same.
func parsePreference(element string) (name, value string, ok bool) {
	preference := splitUnquoted(element, ';')[0]
	name, value, _ = strings.Cut(preference, "=")
	name = strings.ToLower(strings.Trim(name, " \t"))
	value, ok = unquote(strings.Trim(value, " \t"))
	return name, value, ok
}

// parseWait reads whole seconds, one digit or more. Any number of digits is a number, so what does not fit an int is only too long
// a wait, and is cut like any other.
func parseWait(value string) (wait time.Duration, ok bool) {
	if value == "" || strings.Trim(value, "0123456789") != "" {
		return 0, false
	}
	seconds, err := strconv.Atoi(value)
	if err != nil || seconds > int(MaxWait/time.Second) {
		return MaxWait, true
	}
	return time.Duration(seconds) * time.Second, true
}

// splitUnquoted splits at every separator that is not inside a quoted string.
func splitUnquoted(s string, separator byte) []string {
	var parts []string
	quoted, start := false, 0
	for i := 0; i < len(s); i++ {
		switch {
		case quoted && s[i] == '\\':
			i++ // The next character is escaped, even if it is a quote.
		case s[i] == '"':
			quoted = !quoted
		case s[i] == separator && !quoted:
			parts = append(parts, s[start:i])
			start = i + 1
		}
	}
	return append(parts, s[start:])
}

// unquote returns what a quoted string stands for, and anything else as it is. ok is false for a quoted string that does not end
// where the text ends.
func unquote(s string) (text string, ok bool) {
	if !strings.HasPrefix(s, `"`) {
		return s, true
	}
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch s[i] {
		case '"':
			return b.String(), i == len(s)-1
		case '\\':
			i++
			if i == len(s) {
				return "", false
			}
		}
		b.WriteByte(s[i])
	}
	return "", false
}
