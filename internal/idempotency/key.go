package idempotency

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"github.com/dunglas/httpsfv"
)

// What can be wrong with the Idempotency-Key of a request. Both are the client's to mend, and both are found before anything is
// looked up, so neither ever spends a key.
var (
	// ErrKeyMissing: the request has no Idempotency-Key at all.
	ErrKeyMissing = errors.New("idempotency key is missing")
	// ErrKeyInvalid: there is one, but it is no key. The error that wraps it is an [*InvalidKeyError].
	ErrKeyInvalid = errors.New("idempotency key is invalid")
)

// maxKeyLength leaves room for a UUID with a name before it several times over, and keeps the unique index on (merchant, key)
// far from the size at which PostgreSQL refuses an index entry.
const maxKeyLength = 255

// KeyPattern is what ParseKey accepts, as a regular expression for the API's description: the bare form, or the String of RFC
// 9651 with its parameters. It is a little wider than ParseKey, which also reads the parameters. It must keep to the syntax that
// Go and ECMA-262 share.
const KeyPattern = `^(?:[!#-+\--\[\]-~]{1,255}|"(?:[!#-\[\]-~]|\\["\\]){1,255}"(?:;.*)?)$`

// Key is a client's name for one intent: 1 to 255 visible ASCII characters, case-sensitive, unescaped. ParseKey makes one of what a
// client has sent; a key from the database is converted.
//
// A key is the client's secret handle on its answer, so it must not end up in a log by accident. Formatting it with fmt, or handing
// it to slog, writes its [Key.Hash]; string(key) is the key itself, for the database and the gateway key.
type Key string

// InvalidKeyError tells why a header is no key, in a sentence for the client that repeats nothing of what was sent.
type InvalidKeyError struct {
	Reason string
}

func (e *InvalidKeyError) Error() string { return ErrKeyInvalid.Error() + ": " + e.Reason }
func (e *InvalidKeyError) Unwrap() error { return ErrKeyInvalid }

// ParseKey reads the key from all field lines of Idempotency-Key, as http.Header.Values gives them. It returns ErrKeyMissing or
// an error that wraps ErrKeyInvalid.
//
// A value that begins with a quote is the form of the draft, a String of RFC 9651, whose parameters are dropped. Clients in the
// field mostly send the key as it is, so any other value is the key, whole. There a quote, a backslash or a comma is refused: the
// first two would be somebody's broken attempt at the quoted form, and a comma may be where a proxy has joined two field lines.
func ParseKey(lines []string) (Key, error) {
	switch len(lines) {
	case 0:
		return "", ErrKeyMissing
	case 1:
	default:
		// Which of them to believe is not for us to guess, even when they are equal: the next hop may guess otherwise.
		return "", invalidKey("The header must be sent exactly once.")
	}

	// White space around a field value is no part of it (RFC 9110, section 5.5). HTTP/1 has already removed it.
	value := strings.Trim(lines[0], " \t")
	if strings.HasPrefix(value, `"`) {
		item, err := httpsfv.UnmarshalItem([]string{value})
		if err != nil {
			return "", invalidKey("A value that begins with a quote must be a String as in RFC 9651.")
		}
		value = item.Value.(string) // An item that begins with a quote is a String, or no item.
	} else if strings.ContainsAny(value, `"\,`) {
		return "", invalidKey(`Without quotes around it, a key must not contain a quote, a backslash or a comma.`)
	}

	switch {
	case value == "":
		return "", invalidKey("The key must not be empty.")
	case len(value) > maxKeyLength:
		return "", invalidKey(fmt.Sprintf("The key must have at most %d characters.", maxKeyLength))
	case strings.ContainsFunc(value, func(r rune) bool { return r < 0x21 || r > 0x7E }):
		return "", invalidKey("The key must consist of visible ASCII characters without spaces.")
	}
	return Key(value), nil
}

func invalidKey(reason string) error {
	return &InvalidKeyError{Reason: reason}
}

// Header is the key as the draft writes it, for the echo in an answer: in quotes, whichever form the client used.
func (k Key) Header() string {
	s, err := httpsfv.Marshal(httpsfv.NewItem(string(k)))
	if err != nil {
		// Only a Key that did not come from ParseKey has characters that cannot be quoted. No echo is better than a broken header.
		return `""`
	}
	return s
}

// Hash stands for the key in logs: the first 12 hex digits of its SHA-256. Enough to find the lines of one key among millions,
// and to recognise them when a client tells its key; too little to send a request with.
func (k Key) Hash() string {
	sum := sha256.Sum256([]byte(k))
	return hex.EncodeToString(sum[:6])
}

// Format implements [fmt.Formatter] with the key's hash, whatever the verb.
func (k Key) Format(s fmt.State, _ rune) { _, _ = io.WriteString(s, k.Hash()) }

// LogValue implements [slog.LogValuer] with the key's hash.
func (k Key) LogValue() slog.Value { return slog.StringValue(k.Hash()) }
