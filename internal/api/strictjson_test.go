package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/go-json-experiment/json/jsontext"
	"github.com/stretchr/testify/require"
)

func TestReadStrictJSON(t *testing.T) {
	t.Parallel()

	nested := func(levels int) string {
		return strings.Repeat(`{"a":`, levels-1) + "{}" + strings.Repeat("}", levels-1)
	}

	for _, tt := range []struct {
		fact string
		body string
	}{
		{"AnEmptyObjectIsAccepted", `{}`},
		{"WhiteSpaceIsAccepted", " \t\r\n{ \"a\" : 1 } \n"},
		{"EveryKindOfValueIsAccepted", `{"a":null,"b":true,"c":false,"d":"x","e":1,"f":{},"g":[]}`},
		{"ZeroIsAccepted", `{"a":0}`},
		{"ANegativeIntegerIsAccepted", `{"a":-10}`},
		{"AnIntegerOfAnyLengthIsAccepted", `{"a":` + strings.Repeat("9", 1000) + `}`},
		{"ASurrogatePairIsAccepted", `{"a":"\ud83d\ude00"}`},
		{"EscapesAreAccepted", `{"a":"\"\\\/\b\f\n\r\t\u20ac"}`},
		{"AByteOrderMarkInsideAStringIsAccepted", "{\"a\":\"\uFEFF\"}"},
		{"NamesThatDifferInCaseAreTwoNames", `{"a":1,"A":2}`},
		{"TheSameNameInTwoObjectsIsAccepted", `{"a":{"x":1},"b":{"x":1}}`},
		{"SixteenLevelsAreAccepted", nested(16)},
		{"SixteenLevelsOfArraysAreAccepted", `{"a":` + strings.Repeat("[", 15) + strings.Repeat("]", 15) + `}`},
	} {
		t.Run(tt.fact, func(t *testing.T) {
			t.Parallel()
			_, err := readStrictJSON([]byte(tt.body))
			require.NoError(t, err)
		})
	}

	const (
		notJSON   = "not valid JSON"
		notUTF8   = "not valid UTF-8"
		twice     = "the same name twice"
		notObject = "must be a JSON object"
		trailing  = "something after"
		nul       = "U+0000"
		surrogate = "half of a surrogate pair"
		number    = "not an integer in plain digits"
		mark      = "byte order mark"
		depth     = "more than 16 levels"
		cutShort  = "ends before"
		empty     = "empty"
	)
	for _, tt := range []struct {
		fact string
		body string
		want string
	}{
		{"AnEmptyBodyIsRefused", ``, empty},
		{"WhiteSpaceAloneIsRefused", " \n", cutShort},
		{"AnUnfinishedObjectIsRefused", `{"a":1`, cutShort},
		{"AnUnfinishedStringIsRefused", `{"a":"x`, cutShort},
		{"AnUnfinishedEscapeIsRefused", `{"a":"\u00`, cutShort},

		{"AnArrayAtTheTopIsRefused", `[]`, notObject},
		{"ANullAtTheTopIsRefused", `null`, notObject},
		{"AStringAtTheTopIsRefused", `"a"`, notObject},
		{"ANumberAtTheTopIsRefused", `1`, notObject},

		{"ADuplicateNameIsRefused", `{"a":1,"a":1}`, twice},
		{"ADuplicateNameInAnotherSpellingIsRefused", `{"a":1,"\u0061":1}`, twice},
		{"ADuplicateNameFurtherInIsRefused", `{"a":{"x":1,"x":1}}`, twice},
		{"ADuplicateNameInAnArrayIsRefused", `{"a":[{"x":1,"x":1}]}`, twice},
		{"ADuplicateOfTheEmptyNameIsRefused", `{"":1,"":1}`, twice},

		{"ASecondObjectIsRefused", `{}{}`, trailing},
		{"ASecondObjectOnItsOwnLineIsRefused", "{}\n{}", trailing},
		{"TrailingTextIsRefused", `{}x`, trailing},
		{"ATrailingBraceIsRefused", `{}}`, trailing},
		{"ATrailingCommaAfterTheObjectIsRefused", `{},`, trailing},
		{"ATrailingNULIsRefused", "{}\x00", trailing},

		{"InvalidUTF8IsRefused", "{\"a\":\"\xff\"}", notUTF8},
		{"InvalidUTF8InANameIsRefused", "{\"\xc3\":1}", notUTF8},
		{"AnOverlongEncodingIsRefused", "{\"a\":\"\xc0\x80\"}", notUTF8},
		{"ASurrogateInUTF8IsRefused", "{\"a\":\"\xed\xa0\x80\"}", notUTF8},
		{"AByteOrderMarkIsRefused", "\uFEFF{}", mark},
		{"UTF16IsRefused", "{\x00}\x00", notJSON},
		{"UTF16WithAMarkIsRefused", "\xff\xfe{\x00}\x00", notUTF8},

		{"AnEscapedNULIsRefused", `{"a":"x\u0000y"}`, nul},
		{"AnEscapedNULInANameIsRefused", `{"a\u0000":1}`, nul},
		{"AnEscapedNULFurtherInIsRefused", `{"a":[{"b":"\u0000"}]}`, nul},
		{"ARawNULIsRefused", "{\"a\":\"x\x00y\"}", notJSON},
		{"ARawControlCharacterIsRefused", "{\"a\":\"x\ny\"}", notJSON},

		{"ALoneHighSurrogateIsRefused", `{"a":"\ud83d"}`, surrogate},
		{"ALoneLowSurrogateIsRefused", `{"a":"\uDE00"}`, surrogate},
		{"SurrogatesInTheWrongOrderAreRefused", `{"a":"\ude00\ud83d"}`, surrogate},
		{"AHighSurrogateBeforeAnotherEscapeIsRefused", `{"a":"\ud83d\u0041"}`, surrogate},
		{"ALoneSurrogateInANameIsRefused", `{"\ud83d":1}`, surrogate},

		{"AnExponentIsRefused", `{"a":1e3}`, number},
		{"AnExponentInUpperCaseIsRefused", `{"a":1E3}`, number},
		{"AFractionOfZeroIsRefused", `{"a":1000.0}`, number},
		{"AFractionIsRefused", `{"a":10.5}`, number},
		{"MinusZeroIsRefused", `{"a":-0}`, number},
		{"MinusZeroWithAFractionIsRefused", `{"a":-0.0}`, number},
		{"AFractionFurtherInIsRefused", `{"a":[{"b":1.5}]}`, number},
		{"ALeadingZeroIsRefused", `{"a":01000}`, notJSON},
		{"ANegativeLeadingZeroIsRefused", `{"a":-01}`, number},
		{"APlusIsRefused", `{"a":+1}`, notJSON},
		{"AHexadecimalNumberIsRefused", `{"a":0x10}`, notJSON},
		{"NaNIsRefused", `{"a":NaN}`, notJSON},
		{"ALoneMinusIsRefused", `{"a":-}`, notJSON},

		{"ACommaAfterTheLastMemberIsRefused", `{"a":1,}`, notJSON},
		{"ACommaAfterTheLastElementIsRefused", `{"a":[1,]}`, notJSON},
		{"AMissingCommaIsRefused", `{"a":1 "b":2}`, notJSON},
		{"AMissingColonIsRefused", `{"a" 1}`, notJSON},
		{"ANameWithoutQuotesIsRefused", `{a:1}`, notJSON},
		{"ANameThatIsANumberIsRefused", `{1:1}`, notJSON},
		{"SingleQuotesAreRefused", `{'a':1}`, notJSON},
		{"ACommentIsRefused", `{"a":1 /* one */}`, notJSON},
		{"AnUnknownEscapeIsRefused", `{"a":"\x41"}`, notJSON},
		{"AnUnknownLiteralIsRefused", `{"a":True}`, notJSON},
		{"AMismatchedBracketIsRefused", `{"a":[1}`, notJSON},

		{"SeventeenLevelsAreRefused", nested(17), depth},
		{"SeventeenLevelsOfArraysAreRefused", `{"a":` + strings.Repeat("[", 16) + strings.Repeat("]", 16) + `}`, depth},
		{"TenThousandLevelsAreRefused", strings.Repeat(`{"a":`, 10_000), depth},
		{"ThirtyThousandLevelsAreRefused", `{"a":` + strings.Repeat("[", 30_000), depth},
	} {
		t.Run(tt.fact, func(t *testing.T) {
			t.Parallel()
			object, err := readStrictJSON([]byte(tt.body))
			var malformed *malformedError
			require.ErrorAs(t, err, &malformed)
			require.Contains(t, malformed.reason, tt.want)
			require.Nil(t, object)
		})
	}

	t.Run("TheTreeHasTheMembersInTheirOrder", func(t *testing.T) {
		t.Parallel()
		object, err := readStrictJSON([]byte(`{"z":"\u20ac","a":-10,"n":{"t":true,"f":[false,null]}}`))
		require.NoError(t, err)
		require.Equal(t, jsonObject{
			{"z", jsonValue{kind: jsontext.KindString, text: "€"}},
			{"a", jsonValue{kind: jsontext.KindNumber, text: "-10"}},
			{"n", jsonValue{kind: jsontext.KindBeginObject, object: jsonObject{
				{"t", jsonValue{kind: jsontext.KindTrue}},
				{"f", jsonValue{kind: jsontext.KindBeginArray, array: []jsonValue{{kind: jsontext.KindFalse}, {kind: jsontext.KindNull}}}},
			}}},
		}, object)
	})
	t.Run("TheBodyIsLeftAsItWas", func(t *testing.T) {
		t.Parallel()
		body := []byte(`{"a":"x\ny","b":{"c":[1,2]}}`)
		before := bytes.Clone(body)
		object, err := readStrictJSON(body)
		require.NoError(t, err)
		require.Equal(t, before, body)

		clear(body)
		require.Equal(t, "x\ny", object[0].value.text, "the tree must not share the body's memory")
	})
	t.Run("TheReasonRepeatsNothingThatWasSent", func(t *testing.T) {
		t.Parallel()
		for _, body := range []string{
			`{"hush":1,"hush":1}`, `{"hush":1.5}`, `{"hush":"\u0000"}`, `{"hush":"\ud83d"}`, `{"hush":hush}`, `{"hush":"\hush"}`,
			`{}hush`, `"hush"`, `hush`, "{\"hush\":\"\xff\"}", `{"hush"`, `{"hush":` + strings.Repeat("[", 20),
		} {
			_, err := readStrictJSON([]byte(body))
			require.Error(t, err, body)
			require.NotContains(t, err.Error(), "hush", body)
		}
	})
}

// Not parallel, for AllocsPerRun counts the allocations of all goroutines.
func TestReadStrictJSONStopsAtTheDepthLimit(t *testing.T) {
	seventeen, tenThousand := strings.Repeat(`{"a":`, 17), strings.Repeat(`{"a":`, 10_000)
	allocations := func(body string) float64 {
		return testing.AllocsPerRun(10, func() { _, _ = readStrictJSON([]byte(body)) })
	}
	require.InDelta(t, allocations(seventeen), allocations(tenThousand), 2)
}

// All of these are linear in the bytes of the body, which the caller limits to 64 KiB.
func BenchmarkReadStrictJSON(b *testing.B) {
	names := bytes.NewBufferString(`{"":0`)
	for i := range 8_000 {
		fmt.Fprintf(names, `,"%c":0`, rune(0x4e00+i))
	}
	names.WriteString("}")

	for name, body := range map[string][]byte{
		"Payment":             []byte(`{"order_id":"0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11","amount":1000,"currency":"EUR","payment_method":"pm_ok"}`),
		"ThirtyThousandDeep":  bytes.Repeat([]byte("["), 30_000),
		"EightThousandNames":  names.Bytes(),
		"SixtyThousandDigits": []byte(`{"a":` + strings.Repeat("9", 60_000) + `}`),
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				_, _ = readStrictJSON(body)
			}
		})
	}
}

// FuzzStrictJSON holds the strict reader against encoding/json: whatever it accepts, the other accepts too and reads alike. The
// reverse is not so, which is the point of a strict reader.
func FuzzStrictJSON(f *testing.F) {
	for _, seed := range []string{
		``, `{}`, `{"a":1}`, `{"a":[1,"x",null,true,{"b":false}]}`, `{"a":1,"a":2}`, `{"a":"\ud83d\ude00"}`, `{"a":"\ud83d"}`,
		`{"a":1e3}`, `{"a":-0}`, `{"a":01}`, "{\"a\":\"\xff\"}", `{"a":"\u0000"}`, "\uFEFF{}", `{}{}`, `[{}]`,
		strings.Repeat(`{"a":`, 17), `{"order_id":"0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11","amount":1000,"currency":"EUR"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		before := bytes.Clone(body)
		object, err := readStrictJSON(body)
		require.Equal(t, before, body)
		if err != nil {
			var malformed *malformedError
			require.ErrorAs(t, err, &malformed)
			return
		}

		decoder := json.NewDecoder(bytes.NewReader(body))
		decoder.UseNumber()
		var want map[string]any
		require.NoError(t, decoder.Decode(&want))
		require.Equal(t, want, plainObject(object))
	})
}

// plainObject is the tree as encoding/json would give it.
func plainObject(o jsonObject) map[string]any {
	m := map[string]any{}
	for _, member := range o {
		m[member.name] = plainValue(member.value)
	}
	return m
}

func plainValue(v jsonValue) any {
	switch v.kind {
	case jsontext.KindString:
		return v.text
	case jsontext.KindNumber:
		return json.Number(v.text)
	case jsontext.KindTrue:
		return true
	case jsontext.KindFalse:
		return false
	case jsontext.KindBeginObject:
		return plainObject(v.object)
	case jsontext.KindBeginArray:
		elements := []any{}
		for _, element := range v.array {
			elements = append(elements, plainValue(element))
		}
		return elements
	default:
		return nil
	}
}
