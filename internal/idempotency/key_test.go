package idempotency

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func TestParseKey(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		fact  string
		lines []string
		want  Key
	}{
		{"ABareValueIsTheKey", []string{"abc"}, "abc"},
		{"AQuotedValueIsTheSameKey", []string{`"abc"`}, "abc"},
		{"CaseMatters", []string{"ABC"}, "ABC"},
		{"ParametersAreDropped", []string{`"abc";a=1;b="x, y"`}, "abc"},
		{"ABareValueIsTakenWhole", []string{"abc;a=1"}, "abc;a=1"},
		{"QuotesAndBackslashesAreUnescaped", []string{`"a\"b\\c"`}, `a"b\c`},
		{"QuotesMakeACommaPartOfTheKey", []string{`"a,b"`}, "a,b"},
		{"ABareUUIDIsAKey", []string{"0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11"}, "0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11"},
		{"ABareValueMayLookLikeAnotherStructuredType", []string{"?1"}, "?1"},
		{"SpaceAroundTheValueIsNoPartOfIt", []string{" \t\"abc\" "}, "abc"},
		{"OneCharacterIsEnough", []string{"a"}, "a"},
		{"TwoHundredAndFiftyFiveCharactersAreAccepted", []string{strings.Repeat("k", 255)}, Key(strings.Repeat("k", 255))},
		{"TheLengthIsCountedAfterUnescaping", []string{`"` + strings.Repeat(`\\`, 255) + `"`}, Key(strings.Repeat(`\`, 255))},
		{"TheFirstAndTheLastVisibleCharacterAreAccepted", []string{"!~"}, "!~"},
	} {
		t.Run(tt.fact, func(t *testing.T) {
			t.Parallel()
			key, err := ParseKey(tt.lines)
			require.NoError(t, err)
			require.Equal(t, string(tt.want), string(key))
		})
	}

	for _, tt := range []struct {
		fact  string
		lines []string
		want  error
	}{
		{"NoLineIsMissing", nil, ErrKeyMissing},
		{"TwoLinesAreInvalid", []string{"abc", "def"}, ErrKeyInvalid},
		{"TwoEqualLinesAreInvalid", []string{"abc", "abc"}, ErrKeyInvalid},
		{"AnEmptyLineIsInvalid", []string{""}, ErrKeyInvalid},
		{"ALineOfSpacesIsInvalid", []string{"  "}, ErrKeyInvalid},
		{"AnEmptyStringIsInvalid", []string{`""`}, ErrKeyInvalid},
		{"TwoHundredAndFiftySixCharactersAreTooMany", []string{strings.Repeat("k", 256)}, ErrKeyInvalid},
		{"TwoHundredAndFiftySixQuotedCharactersAreTooMany", []string{`"` + strings.Repeat("k", 256) + `"`}, ErrKeyInvalid},
		{"ASpaceInsideIsInvalid", []string{"a b"}, ErrKeyInvalid},
		{"ASpaceInsideQuotesIsInvalid", []string{`"a b"`}, ErrKeyInvalid},
		{"AControlCharacterIsInvalid", []string{"a\x01b"}, ErrKeyInvalid},
		{"DeleteIsInvalid", []string{"a\x7f"}, ErrKeyInvalid},
		{"NonASCIIIsInvalid", []string{"schlüssel"}, ErrKeyInvalid},
		{"QuotedNonASCIIIsInvalid", []string{`"schlüssel"`}, ErrKeyInvalid},
		{"InvalidUTF8IsInvalid", []string{"a\xff"}, ErrKeyInvalid},
		{"ABareCommaIsInvalid", []string{"a,b"}, ErrKeyInvalid},
		{"ABareBackslashIsInvalid", []string{`a\b`}, ErrKeyInvalid},
		{"ABareQuoteIsInvalid", []string{`ab"`}, ErrKeyInvalid},
		{"AnOpenQuoteIsInvalid", []string{`"abc`}, ErrKeyInvalid},
		{"ALoneQuoteIsInvalid", []string{`"`}, ErrKeyInvalid},
		{"AnUnknownEscapeIsInvalid", []string{`"a\nb"`}, ErrKeyInvalid},
		{"AnythingAfterTheStringIsInvalid", []string{`"abc"def`}, ErrKeyInvalid},
		{"AListOfTwoStringsIsInvalid", []string{`"abc", "def"`}, ErrKeyInvalid},
		{"BrokenParametersAreInvalid", []string{`"abc";=`}, ErrKeyInvalid},
	} {
		t.Run(tt.fact, func(t *testing.T) {
			t.Parallel()
			key, err := ParseKey(tt.lines)
			require.ErrorIs(t, err, tt.want)
			require.Empty(t, string(key))
		})
	}

	t.Run("TheReasonIsASentenceWithNothingThatWasSent", func(t *testing.T) {
		t.Parallel()
		_, err := ParseKey([]string{"hush hush"})
		var invalid *InvalidKeyError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, "The key must consist of visible ASCII characters without spaces.", invalid.Reason)
		require.NotContains(t, err.Error(), "hush")
	})
}

func TestKeyHeader(t *testing.T) {
	t.Parallel()

	t.Run("EchoesInQuotes", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, `"abc"`, Key("abc").Header())
	})
	t.Run("EscapesQuotesAndBackslashes", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, `"a\"b\\c"`, Key(`a"b\c`).Header())
	})
	t.Run("ParsesBackToTheSameKey", func(t *testing.T) {
		t.Parallel()
		rapid.Check(t, func(t *rapid.T) {
			key := Key(rapid.StringMatching(`[!-~]{1,255}`).Draw(t, "key"))
			parsed, err := ParseKey([]string{key.Header()})
			if err != nil || string(parsed) != string(key) {
				t.Fatalf("%q came back as %q, %v", string(key), string(parsed), err)
			}
		})
	})
	t.Run("NeverBreaksTheAnswerOnAKeyThatWasNotParsed", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, `""`, Key("a\r\nSet-Cookie: b").Header())
	})
}

func TestKeyIsNeverLogged(t *testing.T) {
	t.Parallel()

	key := Key("order-1234-payment")

	t.Run("TheHashIsTwelveHexDigits", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, "76754d750375", key.Hash())
		require.NotEqual(t, key.Hash(), Key("order-1234-PAYMENT").Hash())
	})
	t.Run("FmtWritesTheHash", func(t *testing.T) {
		t.Parallel()
		for _, verb := range []string{"%s", "%v", "%+v", "%#v", "%q", "%x", "%d"} {
			require.Equal(t, key.Hash(), fmt.Sprintf(verb, key), verb)
		}
		require.NotContains(t, fmt.Errorf("claim %v: %w", key, errors.ErrUnsupported).Error(), "1234")
	})
	t.Run("SlogWritesTheHash", func(t *testing.T) {
		t.Parallel()
		var text, json bytes.Buffer
		slog.New(slog.NewTextHandler(&text, nil)).Info("claimed", "key", key)
		slog.New(slog.NewJSONHandler(&json, nil)).Info("claimed", "key", key)
		require.Contains(t, text.String(), "key="+key.Hash())
		require.Contains(t, json.String(), `"key":"`+key.Hash()+`"`)
	})
}

func TestKeyPattern(t *testing.T) {
	t.Parallel()

	pattern := regexp.MustCompile(KeyPattern)

	t.Run("MatchesExactlyTheBareKeys", func(t *testing.T) {
		t.Parallel()
		rapid.Check(t, func(t *rapid.T) {
			// Any ASCII but white space, which would be trimmed, and the quote, which would begin the other form.
			value := rapid.StringMatching(`(?:[!#-\x7f][\x00-\x7f]{0,20}[!-\x7f])?`).Draw(t, "value")
			_, err := ParseKey([]string{value})
			if pattern.MatchString(value) != (err == nil) {
				t.Fatalf("%q: pattern %v, parser %v", value, pattern.MatchString(value), err)
			}
		})
	})
	t.Run("MatchesEveryQuotedKey", func(t *testing.T) {
		t.Parallel()
		for _, value := range []string{`"abc"`, `"a,b"`, `"a\"b\\c"`, `"abc";a=1`, `"` + strings.Repeat(`\\`, 255) + `"`} {
			_, err := ParseKey([]string{value})
			require.NoError(t, err, value)
			require.Regexp(t, pattern, value)
		}
	})
	t.Run("MatchesNoBrokenQuotedKey", func(t *testing.T) {
		t.Parallel()
		for _, value := range []string{`""`, `"abc`, `"a b"`, `"a\nb"`, `"abc"def`, `"abc", "def"`} {
			_, err := ParseKey([]string{value})
			require.ErrorIs(t, err, ErrKeyInvalid, value)
			require.NotRegexp(t, pattern, value)
		}
	})
}

func FuzzParseKey(f *testing.F) {
	for _, seed := range []string{
		"", "abc", `"abc"`, `"a\"b"`, `"a\\b"`, `"abc";a=1`, `"abc", "def"`, "a,b", `a\b`, "\x00", "ä", `"`, `"\`, `"abc";`, "?1", ":YQ==:",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, line string) {
		key, err := ParseKey([]string{line})
		if err != nil {
			require.ErrorIs(t, err, ErrKeyInvalid)
			require.Empty(t, string(key))
			return
		}
		require.Regexp(t, `^[!-~]{1,255}$`, string(key))
		require.Regexp(t, KeyPattern, strings.Trim(line, " \t"))

		again, err := ParseKey([]string{key.Header()})
		require.NoError(t, err)
		require.Equal(t, string(key), string(again))
	})
}
