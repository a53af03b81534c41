package api

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/google/uuid"

	"example.com/payments/internal/payments"
)

// The codes of a fieldFault. A client's program may act on them, so they are part of the contract; the details are for people.
const (
	faultRequired     = "required"      // the field is not there
	faultInvalidType  = "invalid_type"  // it has another JSON type, null included
	faultInvalid      = "invalid"       // the type is right and the form is not
	faultTooSmall     = "too_small"     // an amount below its range
	faultTooLarge     = "too_large"     // an amount above its range, or too many names
	faultTooLong      = "too_long"      // too many characters
	faultUnknownValue = "unknown_value" // well formed, but no such thing
)

// fieldFault is one thing wrong with one field. The pointer (RFC 6901) says where. It is the only place in which something that was
// sent comes back: a metadata name. The detail never repeats anything.
type fieldFault struct {
	Pointer string `json:"pointer"`
	Code    string `json:"code"`
	Detail  string `json:"detail"`
}

// validationError has every fault of a request, in the order of its fields, so that a client can mend all of them at once.
type validationError struct {
	faults []fieldFault
}

// Error leaves the pointers out: metadata names are the client's and have no place in a log.
func (e *validationError) Error() string {
	return fmt.Sprintf("request is invalid in %d places", len(e.faults))
}

// fields reads the typed fields of a request out of its JSON object. Ask for each field of the request once, in the order of its
// type, then ask err whether there was anything wrong. Until err has returned nil, what the readers returned means nothing.
//
// Rules of form are only ever loosened. A repeat of a request that was once accepted, perhaps by an older build, must find its
// stored answer, not a 400.
type fields struct {
	object jsonObject
	asked  []string
	faults []fieldFault
}

func newFields(object jsonObject) *fields {
	return &fields{object: object}
}

// err returns a *malformedError if the object has a name that was not asked for, else a *validationError if a field had a fault,
// else nil. An unknown name is worse than a bad value: whoever sends it, maybe as Amount or currency_code, means something that would
// be neither carried out nor fingerprinted.
func (f *fields) err() error {
	for _, member := range f.object {
		if !slices.Contains(f.asked, member.name) {
			if len(f.asked) == 0 {
				return malformed("The object has a field that this request does not take. It takes none.")
			}
			return malformed("The object has a field that this request does not take. It takes " + strings.Join(f.asked, ", ") +
				", and case matters.")
		}
	}
	if len(f.faults) > 0 {
		return &validationError{faults: f.faults}
	}
	return nil
}

// amount reads a required amount in the currency's minor unit, 1 to payments.MaxAmount.
func (f *fields) amount(name string) int64 {
	value, ok := f.required(name)
	if !ok {
		return 0
	}
	return f.amountOf(name, value)
}

// optionalAmount is amount for a field that may be absent, and nil then.
func (f *fields) optionalAmount(name string) *int64 {
	value, ok := f.optional(name)
	if !ok {
		return nil
	}
	amount := f.amountOf(name, value)
	return &amount
}

func (f *fields) amountOf(name string, value jsonValue) int64 {
	if value.kind != jsontext.KindNumber {
		// "1000" in quotes is among these. To accept it would give one amount two spellings.
		f.wrongType(name, value, "an integer in the currency's minor unit")
		return 0
	}
	// The strict reader lets only integers through, so the one error that is left is the range, and then ParseInt returns the limit
	// that was passed: too small or too large all the same.
	amount, _ := strconv.ParseInt(value.text, 10, 64)
	switch {
	case amount < 1:
		f.fault(name, faultTooSmall, "This must be at least 1.")
	case amount > payments.MaxAmount:
		f.fault(name, faultTooLarge, fmt.Sprintf("This must be at most %d.", payments.MaxAmount))
	}
	return amount
}

var currencyForm = regexp.MustCompile(`^[A-Z]{3}$`)

// currency reads a required ISO 4217 code of a currency in use.
func (f *fields) currency(name string) string {
	code, ok := f.requiredString(name)
	switch {
	case !ok:
	case !currencyForm.MatchString(code):
		f.fault(name, faultInvalid, "This must be an ISO 4217 code: three upper-case letters.")
	case !payments.CurrencyActive(code):
		f.fault(name, faultUnknownValue, "This is not the ISO 4217 code of a currency that is in use.")
	}
	return code
}

// uuid reads a required UUID in the form of 36 characters. Letters may be of either case, as RFC 9562 demands; uuid.UUID has only
// one spelling, so the fingerprint knows no difference.
func (f *fields) uuid(name string) uuid.UUID {
	text, ok := f.requiredString(name)
	if !ok {
		return uuid.Nil
	}
	id, ok := parseID(text)
	if !ok {
		f.fault(name, faultInvalid, "This must be a UUID of 36 characters, hyphens included.")
	}
	return id
}

var paymentMethodForm = regexp.MustCompile(`^pm_[a-z0-9_]{1,64}$`)

// paymentMethod reads a required token of a payment method.
func (f *fields) paymentMethod(name string) string {
	token, ok := f.requiredString(name)
	// The underscore is the only separator that the form allows, so in a token it counts as one.
	digits := strings.ReplaceAll(strings.TrimPrefix(token, "pm_"), "_", "")
	switch {
	case !ok:
	case isCardNumber(digits):
		f.cardNumber(pointerTo("", name))
	case !paymentMethodForm.MatchString(token):
		f.fault(name, faultInvalid, "This must be pm_ and 1 to 64 lower-case letters, digits or underscores.")
	}
	return token
}

// text reads an optional text of 1 to limit characters, nil if absent. Characters are Unicode code points, as in PostgreSQL, and
// are kept as they were sent: no normalisation, no trimming.
func (f *fields) text(name string, limit int) *string {
	value, ok := f.optional(name)
	if !ok {
		return nil
	}
	switch {
	case value.kind != jsontext.KindString:
		f.wrongType(name, value, "a string")
	case value.text == "":
		f.fault(name, faultInvalid, "This must not be empty. Leave it out instead.")
	case utf8.RuneCountInString(value.text) > limit:
		f.fault(name, faultTooLong, fmt.Sprintf("This must have at most %d characters.", limit))
	case isCardNumber(value.text):
		f.cardNumber(pointerTo("", name))
	}
	return &value.text
}

// Metadata is for the merchant's own references, not for documents.
const (
	maxMetadataNames = 50
	maxMetadataName  = 40
	maxMetadataValue = 500
)

// metadata reads an optional object from names to strings. Absent, it is the empty map, not nil.
func (f *fields) metadata(name string) map[string]string {
	metadata := map[string]string{}
	value, ok := f.optional(name)
	switch {
	case !ok:
		return metadata
	case value.kind != jsontext.KindBeginObject:
		f.wrongType(name, value, "an object of strings")
		return metadata
	case len(value.object) > maxMetadataNames:
		// Nothing more is said about them. A body of thousands of bad names would get an answer many times its size.
		f.fault(name, faultTooLarge, fmt.Sprintf("This must have at most %d names.", maxMetadataNames))
		return metadata
	}

	pointer := pointerTo("", name)
	for _, member := range value.object {
		f.metadataMember(pointer, member)
		metadata[member.name] = member.value.text
	}
	return metadata
}

func (f *fields) metadataMember(parent string, member jsonMember) {
	pointer := pointerTo(parent, member.name)
	switch {
	case isCardNumber(member.name):
		// The pointer would repeat it, so it stops one level above, and so does everything else about this member.
		f.cardNumber(parent)
		return
	case member.name == "":
		f.faultAt(pointer, faultInvalid, "The name must not be empty.")
	case utf8.RuneCountInString(member.name) > maxMetadataName:
		f.faultAt(pointer, faultTooLong, fmt.Sprintf("The name must have at most %d characters.", maxMetadataName))
	}

	switch {
	case member.value.kind != jsontext.KindString:
		f.wrongTypeAt(pointer, member.value, "a string")
	case utf8.RuneCountInString(member.value.text) > maxMetadataValue:
		f.faultAt(pointer, faultTooLong, fmt.Sprintf("This must have at most %d characters.", maxMetadataValue))
	case isCardNumber(member.value.text):
		f.cardNumber(pointer)
	}
}

func (f *fields) optional(name string) (jsonValue, bool) {
	f.asked = append(f.asked, name)
	return f.object.lookUp(name)
}

func (f *fields) required(name string) (jsonValue, bool) {
	value, ok := f.optional(name)
	if !ok {
		f.fault(name, faultRequired, "This field is required.")
	}
	return value, ok
}

func (f *fields) requiredString(name string) (string, bool) {
	value, ok := f.required(name)
	if ok && value.kind != jsontext.KindString {
		f.wrongType(name, value, "a string")
		return "", false
	}
	return value.text, ok
}

func (f *fields) fault(name, code, detail string) {
	f.faultAt(pointerTo("", name), code, detail)
}

func (f *fields) faultAt(pointer, code, detail string) {
	f.faults = append(f.faults, fieldFault{Pointer: pointer, Code: code, Detail: detail})
}

func (f *fields) wrongType(name string, value jsonValue, want string) {
	f.wrongTypeAt(pointerTo("", name), value, want)
}

func (f *fields) wrongTypeAt(pointer string, value jsonValue, want string) {
	detail := "This must be " + want + "."
	if value.kind == jsontext.KindNull {
		detail = "This must be " + want + ", and null is not one."
	}
	f.faultAt(pointer, faultInvalidType, detail)
}

func (f *fields) cardNumber(pointer string) {
	f.faultAt(pointer, faultInvalid, "Card numbers are not accepted.")
}

var pointerEscaper = strings.NewReplacer("~", "~0", "/", "~1")

// pointerTo is the JSON pointer to a member of what parent points to; the whole body is "" (RFC 6901, sections 3 and 5).
func pointerTo(parent, name string) string {
	return parent + "/" + pointerEscaper.Replace(name)
}

// isCardNumber reports whether a text is a card number with nothing else around it: 12 to 19 digits that pass the Luhn test, however
// they are grouped. A card number that we stored or logged would bring the whole system, backups included, under PCI DSS. One
// text of digits in ten passes the test by chance, so it is made of whole values only, not of every run of digits in a sentence.
func isCardNumber(s string) bool {
	var digits []int
	for _, r := range s {
		if isBlankOrDash(r) {
			continue
		}
		digit, ok := digitValue(r)
		if !ok || len(digits) == 19 {
			return false
		}
		digits = append(digits, digit)
	}
	if len(digits) < 12 {
		return false
	}

	// Luhn: from the right, every second digit is doubled and its digits added up; the sum of all is a multiple of ten.
	sum := 0
	for i, digit := range slices.Backward(digits) {
		if (len(digits)-i)%2 == 0 {
			digit *= 2
			if digit > 9 {
				digit -= 9
			}
		}
		sum += digit
	}
	return sum%10 == 0
}

// isBlankOrDash reports whether people, or the programs they paste from, put the character between groups of digits: all of
// Unicode's spaces, its dashes, the minus sign, and the characters that are not seen at all, such as a soft hyphen or a zero-width
// space.
func isBlankOrDash(r rune) bool {
	const minus = '\u2212'
	return r == minus || unicode.IsSpace(r) || unicode.In(r, unicode.Pd, unicode.Cf)
}

// digitValue is the value of a decimal digit of any script: an Arabic keyboard writes card numbers too. Unicode keeps the digits of
// each script together, from zero to nine, so the value is the distance to the beginning of their range.
func digitValue(r rune) (value int, ok bool) {
	if r <= unicode.MaxASCII {
		return int(r - '0'), '0' <= r && r <= '9'
	}
	for _, digits := range unicode.Nd.R16 {
		if rune(digits.Lo) <= r && r <= rune(digits.Hi) {
			return int(r-rune(digits.Lo)) % 10, true
		}
	}
	for _, digits := range unicode.Nd.R32 {
		if rune(digits.Lo) <= r && r <= rune(digits.Hi) {
			return int(r-rune(digits.Lo)) % 10, true
		}
	}
	return 0, false
}
