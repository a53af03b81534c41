package idempotency

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
)

// CurrentRecipe is the recipe by which new keys are fingerprinted. Its number is stored beside the fingerprint.
const CurrentRecipe int16 = 1

// ErrRecipeUnknown: the key's row was written by a build that is newer than this one. Whether the request is the same cannot be
// said here, so the caller answers that it is unable to, never that the key was used for another request.
var ErrRecipeUnknown = errors.New("fingerprint recipe is unknown to this build")

// Request is what a fingerprint is taken of: the meaning of a request, after validation, not its bytes. So the order of names,
// white space and escapes in the body make no difference, and every value does. Headers are no part of it.
type Request struct {
	Method string
	Route  string   // the template, as in "/v1/payments/{id}/refunds"
	Params []string // the values of the template's parameters, in their order
	Fields []Field  // the fields that are present, in the fixed order of the request's type
}

// Field is one field of a request. Value is the one canonical spelling of the typed value, such as strconv.FormatInt's of an
// amount or a UUID in lower case. It need not be unique among types: the name already says which type it has.
//
// An optional field that is absent is not in the list; it is not an empty value. Two spellings of the same meaning must become one
// here: metadata that is absent and metadata that is {} mean the same, so empty metadata is left out.
type Field struct {
	Name  string
	Value string
}

// A recipe writes a request down so that two different requests never become the same bytes. The fingerprint is the SHA-256 of
// that.
type recipe func(Request) []byte

// recipes has every recipe that a row may still carry. A recipe is never changed, since rows of it live for ever: a repeat would
// no longer look like the request it repeats and get 422. To write requests down in another way, add a recipe and make it the
// current one; older rows go on being compared by their own.
//
// A new optional field needs no new recipe. The list of fields grows by it when a client sends it, so against a row that was
// written before the field existed it counts as a difference, which it is: the first request cannot have meant it. A request
// without it has the fingerprint it always had.
var recipes = map[int16]recipe{
	1: recipe1,
}

// Fingerprint returns what the key was first used for, as 32 bytes. For a new key, version is CurrentRecipe; to compare a repeat,
// it is the version that the key's row carries. It returns ErrRecipeUnknown for a version that this build does not have.
func Fingerprint(version int16, r Request) ([]byte, error) {
	return fingerprintFrom(recipes, version, r)
}

func fingerprintFrom(table map[int16]recipe, version int16, r Request) ([]byte, error) {
	write, ok := table[version]
	if !ok {
		return nil, fmt.Errorf("%w: version %d", ErrRecipeUnknown, version)
	}
	sum := sha256.Sum256(write(r))
	return sum[:], nil
}

// recipe1 writes version, method, route, the number of parameters and each of them, then the number of fields and the name and
// value of each, every one as a netstring: its length, a colon, its bytes. No value can pretend to be the end of itself or the
// beginning of the next, so there is one way at most to read what is written. Plain concatenation would give order_id "1" with
// amount 23 and order_id "12" with amount 3 the same fingerprint.
func recipe1(r Request) []byte {
	b := appendNetstring(nil, "1")
	b = appendNetstring(b, r.Method)
	b = appendNetstring(b, r.Route)
	b = appendNetstring(b, strconv.Itoa(len(r.Params)))
	for _, param := range r.Params {
		b = appendNetstring(b, param)
	}
	b = appendNetstring(b, strconv.Itoa(len(r.Fields)))
	for _, field := range r.Fields {
		b = appendNetstring(b, field.Name)
		b = appendNetstring(b, field.Value)
	}
	return b
}

// MapValue is the canonical spelling of a map such as metadata, for [Field.Value]: names and values as netstrings, sorted by name,
// because a JSON object has no order. It belongs to recipe 1 and changes as little as that does.
func MapValue(m map[string]string) string {
	var b []byte
	for _, name := range slices.Sorted(maps.Keys(m)) {
		b = appendNetstring(b, name)
		b = appendNetstring(b, m[name])
	}
	return string(b)
}

func appendNetstring(b []byte, s string) []byte {
	b = strconv.AppendInt(b, int64(len(s)), 10)
	b = append(b, ':')
	return append(b, s...)
}
