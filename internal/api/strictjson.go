package api

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
)

// The strict reader is here so that the fingerprint and the meaning of a body cannot part. Where JSON leaves open what a text
// means (which of two equal names counts, what 1.0 or half a surrogate pair is), two readers of the same body may differ, and
// then the money that moves is not the money that was fingerprinted. It refuses whatever could be read in two ways.

// maxJSONDepth is far more than any request needs (metadata has two levels) and little enough that reading may recurse.
const maxJSONDepth = 16

// malformedError: the body is not what strict JSON allows, or has a name that the route does not know. It is found before any
// field is judged. The reason is a sentence for the client and repeats nothing of what was sent.
type malformedError struct {
	reason string
}

func (e *malformedError) Error() string { return "request is malformed: " + e.reason }

// jsonObject is a JSON object as it was sent: its members in their order, no name twice.
type jsonObject []jsonMember

type jsonMember struct {
	name  string
	value jsonValue
}

// jsonValue is one JSON value. What is set besides the kind depends on it.
type jsonValue struct {
	kind   jsontext.Kind
	text   string      // of a string, unescaped; of a number, its digits
	object jsonObject  // of an object
	array  []jsonValue // of an array
}

func (o jsonObject) lookUp(name string) (jsonValue, bool) {
	for _, member := range o {
		if member.name == name {
			return member.value, true
		}
	}
	return jsonValue{}, false
}

// readStrictJSON reads a body that is exactly one JSON object in UTF-8. It refuses names that occur twice (after unescaping),
// U+0000 and lone surrogates in names and strings, a byte order mark, nesting deeper than maxJSONDepth, numbers that are not an
// integer in its one spelling, and anything but white space after the object. Every error is a *malformedError.
//
// It puts no limit on the size, which is the caller's; its time and memory grow with the body's length, whatever is in it. An
// empty body is refused too: whether an absent one stands for {} is the route's to say.
func readStrictJSON(body []byte) (jsonObject, error) {
	switch {
	case len(body) == 0:
		return nil, malformed("The body is empty, where a JSON object is expected.")
	case bytes.HasPrefix(body, []byte("\uFEFF")):
		return nil, malformed("The body begins with a byte order mark.")
	case !utf8.Valid(body):
		return nil, malformed("The body is not valid UTF-8.")
	}

	// The decoder refuses duplicate names and lone surrogates by its defaults. Reading from a bytes.Buffer it uses the body in
	// place, and does not change it.
	r := strictReader{body: body, decoder: jsontext.NewDecoder(bytes.NewBuffer(body))}
	value, err := r.value(1)
	switch {
	case err != nil:
		return nil, err
	case value.kind != jsontext.KindBeginObject:
		return nil, malformed("The body must be a JSON object.")
	}
	if _, err := r.decoder.ReadToken(); !errors.Is(err, io.EOF) {
		return nil, malformed("There is something after the JSON object.")
	}
	return value.object, nil
}

type strictReader struct {
	body    []byte
	decoder *jsontext.Decoder
}

// value reads one value whole. The depth is the one that it has if it is an object or an array; the body itself has 1.
func (r *strictReader) value(depth int) (jsonValue, error) {
	token, err := r.decoder.ReadToken()
	if err != nil {
		return jsonValue{}, r.explain(err)
	}

	value := jsonValue{kind: token.Kind()}
	switch value.kind {
	case jsontext.KindString:
		value.text, err = unescaped(token)
		return value, err

	case jsontext.KindNumber:
		value.text = token.String()
		if !plainInteger(value.text) {
			return jsonValue{}, malformed("A number is not an integer in plain digits, such as 1000.")
		}
		return value, nil

	case jsontext.KindBeginObject, jsontext.KindBeginArray:
		// Stopping on the way down is what keeps a body of nothing but brackets cheap.
		if depth > maxJSONDepth {
			return jsonValue{}, malformed(fmt.Sprintf("The body is nested more than %d levels deep.", maxJSONDepth))
		}
		if value.kind == jsontext.KindBeginObject {
			value.object, err = r.members(depth)
		} else {
			value.array, err = r.elements(depth)
		}
		return value, err

	default: // null, true, false
		return value, nil
	}
}

// members reads the rest of an object whose brace has been read.
func (r *strictReader) members(depth int) (jsonObject, error) {
	members := jsonObject{}
	for {
		token, err := r.decoder.ReadToken()
		if err != nil {
			return nil, r.explain(err)
		}
		if token.Kind() == jsontext.KindEndObject {
			return members, nil
		}
		name, err := unescaped(token)
		if err != nil {
			return nil, err
		}
		value, err := r.value(depth + 1)
		if err != nil {
			return nil, err
		}
		members = append(members, jsonMember{name, value})
	}
}

// elements reads the rest of an array whose bracket has been read.
func (r *strictReader) elements(depth int) ([]jsonValue, error) {
	elements := []jsonValue{}
	for {
		if r.decoder.PeekKind() == jsontext.KindEndArray {
			_, err := r.decoder.ReadToken()
			return elements, r.explain(err)
		}
		value, err := r.value(depth + 1)
		if err != nil {
			return nil, err
		}
		elements = append(elements, value)
	}
}

// unescaped is a name's or a string's text. PostgreSQL's text cannot hold U+0000, and C programs behind us would end there.
func unescaped(token jsontext.Token) (string, error) {
	text := token.String()
	if strings.ContainsRune(text, 0) {
		return "", malformed("A name or a string has the character U+0000.")
	}
	return text, nil
}

// plainInteger reports whether a JSON number is an integer in the one spelling that each integer has: no fraction, no exponent, no
// minus before zero. A leading zero or plus is no JSON number at all.
func plainInteger(number string) bool {
	digits := strings.TrimPrefix(number, "-")
	return number != "-0" && strings.Trim(digits, "0123456789") == ""
}

// explain turns the decoder's error into a sentence. The decoder's own sentence quotes the body.
func (r *strictReader) explain(err error) error {
	var syntax *jsontext.SyntacticError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, jsontext.ErrDuplicateName):
		return malformed("An object has the same name twice.")
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return malformed("The body ends before the JSON object does.")
	case errors.As(err, &syntax):
		if isSurrogateEscape(r.body, syntax.ByteOffset) {
			return malformed("A name or a string has half of a surrogate pair.")
		}
		return malformed(fmt.Sprintf("The body is not valid JSON, at or after byte %d.", syntax.ByteOffset))
	default:
		return malformed("The body is not valid JSON.")
	}
}

// isSurrogateEscape reports whether an escape of the range U+D800 to U+DFFF begins at the offset. When the decoder stops at one,
// it has no partner.
func isSurrogateEscape(body []byte, offset int64) bool {
	if offset < 0 || offset+4 > int64(len(body)) {
		return false
	}
	escape := strings.ToLower(string(body[offset : offset+4]))
	return strings.HasPrefix(escape, `\ud`) && escape[3] >= '8' && escape[3] <= 'f'
}

func malformed(reason string) error {
	return &malformedError{reason: reason}
}
