package api

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"
	"unicode"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// paymentFields reads the request with the most fields, and a text for good measure.
type paymentFields struct {
	orderID       uuid.UUID
	amount        int64
	currency      string
	paymentMethod string
	reference     *string
	metadata      map[string]string
}

func readPaymentFields(t *testing.T, body string) (p paymentFields, err error) {
	t.Helper()
	object, err := readStrictJSON([]byte(body))
	require.NoError(t, err, body)

	f := newFields(object)
	p.orderID = f.uuid("order_id")
	p.amount = f.amount("amount")
	p.currency = f.currency("currency")
	p.paymentMethod = f.paymentMethod("payment_method")
	p.reference = f.text("reference", 255)
	p.metadata = f.metadata("metadata")
	return p, f.err()
}

// paymentBody is a good request in which the named members are replaced, or left out where the value is empty.
func paymentBody(changes map[string]string) string {
	members := map[string]string{
		"order_id": `"0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11"`, "amount": "1000", "currency": `"EUR"`, "payment_method": `"pm_ok"`,
	}
	maps.Copy(members, changes)
	var list []string
	for name, value := range members {
		if value != "" {
			list = append(list, fmt.Sprintf("%q:%s", name, value))
		}
	}
	return "{" + strings.Join(list, ",") + "}"
}

func quoted(s string) string {
	b, _ := json.Marshal(s)
	return string(b)
}

// metadataOf is a metadata object of that many names.
func metadataOf(names int) string {
	list := make([]string, names)
	for i := range list {
		list[i] = fmt.Sprintf(`"n%d":""`, i)
	}
	return "{" + strings.Join(list, ",") + "}"
}

func TestFields(t *testing.T) {
	t.Parallel()

	t.Run("AGoodRequestIsReadWhole", func(t *testing.T) {
		t.Parallel()
		p, err := readPaymentFields(t, paymentBody(map[string]string{"reference": `"Größe 5"`, "metadata": `{"a/b":"1","c":""}`}))
		require.NoError(t, err)
		reference := "Größe 5"
		require.Equal(t, paymentFields{
			orderID: uuid.MustParse("0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11"), amount: 1000, currency: "EUR", paymentMethod: "pm_ok",
			reference: &reference, metadata: map[string]string{"a/b": "1", "c": ""},
		}, p)
	})
	t.Run("AbsentOptionalFieldsAreNilAndTheEmptyMap", func(t *testing.T) {
		t.Parallel()
		p, err := readPaymentFields(t, paymentBody(nil))
		require.NoError(t, err)
		require.Nil(t, p.reference)
		require.Equal(t, map[string]string{}, p.metadata)
	})

	for _, tt := range []struct {
		fact  string
		name  string
		value string
	}{
		{"TheSmallestAmountIsAccepted", "amount", "1"},
		{"TheLargestAmountIsAccepted", "amount", "999999999999"},
		{"AUUIDInUpperCaseIsAccepted", "order_id", `"0198C2F0-7F3E-7C1A-9A53-5F0F5F2B1C11"`},
		{"AUUIDOfAnotherVersionIsAccepted", "order_id", `"7d444840-9dc0-11d1-b245-5ffdce74fad2"`},
		{"APaymentMethodOf64CharactersIsAccepted", "payment_method", quoted("pm_" + strings.Repeat("a", 64))},
		{"DigitsThatFailLuhnArePaymentMethods", "payment_method", `"pm_4242424242424241"`},
		{"AReferenceOfOneCharacterIsAccepted", "reference", `"x"`},
		{"AReferenceOf255CharactersIsAccepted", "reference", quoted(strings.Repeat("ß", 255))},
		{"CharactersOutsideTheBasicPlaneCountOnce", "reference", quoted(strings.Repeat("😀", 255))},
		{"DigitsThatFailLuhnAreReferences", "reference", `"4242424242424241"`},
		{"ElevenDigitsAreAReference", "reference", `"00000000000"`},
		{"TwentyDigitsAreAReference", "reference", `"00000000000000000000"`},
		{"DigitsWithinAReferenceAreAReference", "reference", `"order 4242424242424242"`},
		{"EmptyMetadataIsAccepted", "metadata", `{}`},
		{"FiftyNamesAreAccepted", "metadata", metadataOf(50)},
		{"ANameOf40CharactersIsAccepted", "metadata", `{"` + strings.Repeat("ß", 40) + `":""}`},
		{"AValueOf500CharactersIsAccepted", "metadata", `{"a":"` + strings.Repeat("ß", 500) + `"}`},
		{"AnEmptyValueIsAccepted", "metadata", `{"a":""}`},
		{"MetadataNamesMayBeThoseOfFields", "metadata", `{"amount":"1","Amount":"2"}`},
	} {
		t.Run(tt.fact, func(t *testing.T) {
			t.Parallel()
			_, err := readPaymentFields(t, paymentBody(map[string]string{tt.name: tt.value}))
			require.NoError(t, err)
		})
	}

	for _, tt := range []struct {
		fact    string
		name    string
		value   string
		code    string
		pointer string // of the fault; "/" + name if empty
	}{
		{"AMissingAmountIsRequired", "amount", "", faultRequired, ""},
		{"AnAmountInQuotesHasTheWrongType", "amount", `"1000"`, faultInvalidType, ""},
		{"ANullAmountHasTheWrongType", "amount", `null`, faultInvalidType, ""},
		{"ATrueAmountHasTheWrongType", "amount", `true`, faultInvalidType, ""},
		{"AnObjectForAnAmountHasTheWrongType", "amount", `{}`, faultInvalidType, ""},
		{"AnArrayForAnAmountHasTheWrongType", "amount", `[1]`, faultInvalidType, ""},
		{"ZeroIsTooSmall", "amount", "0", faultTooSmall, ""},
		{"ANegativeAmountIsTooSmall", "amount", "-1", faultTooSmall, ""},
		{"AnAmountBelowInt64IsTooSmall", "amount", "-9223372036854775809", faultTooSmall, ""},
		{"TenToTheTwelveIsTooLarge", "amount", "1000000000000", faultTooLarge, ""},
		{"AnAmountBeyondInt64IsTooLarge", "amount", "9223372036854775808", faultTooLarge, ""},
		{"AnAmountOfAHundredDigitsIsTooLarge", "amount", strings.Repeat("9", 100), faultTooLarge, ""},

		{"AMissingCurrencyIsRequired", "currency", "", faultRequired, ""},
		{"ANumberForACurrencyHasTheWrongType", "currency", "978", faultInvalidType, ""},
		{"ANullCurrencyHasTheWrongType", "currency", "null", faultInvalidType, ""},
		{"ALowerCaseCurrencyIsInvalid", "currency", `"eur"`, faultInvalid, ""},
		{"AnEmptyCurrencyIsInvalid", "currency", `""`, faultInvalid, ""},
		{"FourLettersAreInvalid", "currency", `"EURO"`, faultInvalid, ""},
		{"ANewlineAfterTheCodeIsInvalid", "currency", `"EUR\n"`, faultInvalid, ""},
		{"OtherScriptsLettersAreInvalid", "currency", quoted("\u0415UR"), faultInvalid, ""},
		{"AnUnassignedCodeIsUnknown", "currency", `"ZZZ"`, faultUnknownValue, ""},
		{"AWithdrawnCodeIsUnknown", "currency", `"BGN"`, faultUnknownValue, ""},
		{"AFundIsUnknown", "currency", `"CHE"`, faultUnknownValue, ""},
		{"GoldIsUnknown", "currency", `"XAU"`, faultUnknownValue, ""},
		{"TheTestCodeIsUnknown", "currency", `"XTS"`, faultUnknownValue, ""},

		{"AMissingOrderIDIsRequired", "order_id", "", faultRequired, ""},
		{"ANullOrderIDHasTheWrongType", "order_id", "null", faultInvalidType, ""},
		{"AnEmptyOrderIDIsInvalid", "order_id", `""`, faultInvalid, ""},
		{"AUUIDWithoutHyphensIsInvalid", "order_id", `"0198c2f07f3e7c1a9a535f0f5f2b1c11"`, faultInvalid, ""},
		{"AUUIDInBracesIsInvalid", "order_id", `"{0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11}"`, faultInvalid, ""},
		{"AUUIDAsAURNIsInvalid", "order_id", `"urn:uuid:0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11"`, faultInvalid, ""},
		{"ASpaceBeforeAUUIDIsInvalid", "order_id", `" 0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c1"`, faultInvalid, ""},
		{"HyphensInOtherPlacesAreInvalid", "order_id", `"0198c2f07-f3e-7c1a-9a53-5f0f5f2b1c11"`, faultInvalid, ""},

		{"AMissingPaymentMethodIsRequired", "payment_method", "", faultRequired, ""},
		{"ANullPaymentMethodHasTheWrongType", "payment_method", "null", faultInvalidType, ""},
		{"APaymentMethodWithoutItsPrefixIsInvalid", "payment_method", `"ok"`, faultInvalid, ""},
		{"APrefixAloneIsInvalid", "payment_method", `"pm_"`, faultInvalid, ""},
		{"UpperCaseInAPaymentMethodIsInvalid", "payment_method", `"pm_OK"`, faultInvalid, ""},
		{"AHyphenInAPaymentMethodIsInvalid", "payment_method", `"pm_a-b"`, faultInvalid, ""},
		{"ANewlineAfterAPaymentMethodIsInvalid", "payment_method", `"pm_ok\n"`, faultInvalid, ""},
		{"APaymentMethodOf65CharactersIsInvalid", "payment_method", quoted("pm_" + strings.Repeat("a", 65)), faultInvalid, ""},

		{"ANullReferenceHasTheWrongType", "reference", "null", faultInvalidType, ""},
		{"ANumberForAReferenceHasTheWrongType", "reference", "1", faultInvalidType, ""},
		{"AnEmptyReferenceIsInvalid", "reference", `""`, faultInvalid, ""},
		{"AReferenceOf256CharactersIsTooLong", "reference", quoted(strings.Repeat("ß", 256)), faultTooLong, ""},

		{"NullMetadataHasTheWrongType", "metadata", "null", faultInvalidType, ""},
		{"AnArrayForMetadataHasTheWrongType", "metadata", "[]", faultInvalidType, ""},
		{"AStringForMetadataHasTheWrongType", "metadata", `"{}"`, faultInvalidType, ""},
		{"FiftyOneNamesAreTooMany", "metadata", metadataOf(51), faultTooLarge, ""},
		{"AnEmptyNameIsInvalid", "metadata", `{"":"x"}`, faultInvalid, "/metadata/"},
		{"ANameOf41CharactersIsTooLong", "metadata", `{"` + strings.Repeat("n", 41) + `":""}`, faultTooLong, "/metadata/" + strings.Repeat("n", 41)},
		{"ANullValueHasTheWrongType", "metadata", `{"a":null}`, faultInvalidType, "/metadata/a"},
		{"ANumberForAValueHasTheWrongType", "metadata", `{"a":1}`, faultInvalidType, "/metadata/a"},
		{"AnObjectForAValueHasTheWrongType", "metadata", `{"a":{"b":"c"}}`, faultInvalidType, "/metadata/a"},
		{"AValueOf501CharactersIsTooLong", "metadata", `{"a":"` + strings.Repeat("ß", 501) + `"}`, faultTooLong, "/metadata/a"},
		{"PointersEscapeSlashesAndTildes", "metadata", `{"a/b~c~1":1}`, faultInvalidType, "/metadata/a~1b~0c~01"},
	} {
		t.Run(tt.fact, func(t *testing.T) {
			t.Parallel()
			_, err := readPaymentFields(t, paymentBody(map[string]string{tt.name: tt.value}))
			var invalid *validationError
			require.ErrorAs(t, err, &invalid)
			require.Len(t, invalid.faults, 1)

			pointer := tt.pointer
			if pointer == "" {
				pointer = "/" + tt.name
			}
			require.Equal(t, pointer, invalid.faults[0].Pointer)
			require.Equal(t, tt.code, invalid.faults[0].Code)
			require.NotEmpty(t, invalid.faults[0].Detail)
		})
	}

	t.Run("AllFaultsAreToldAtOnceInTheOrderOfTheFields", func(t *testing.T) {
		t.Parallel()
		_, err := readPaymentFields(t, `{"metadata":{"b":1,"a":null},"reference":"","payment_method":"ok","currency":null,"amount":0}`)
		var invalid *validationError
		require.ErrorAs(t, err, &invalid)
		require.Equal(t, []fieldFault{
			{"/order_id", "required", "This field is required."},
			{"/amount", "too_small", "This must be at least 1."},
			{"/currency", "invalid_type", "This must be a string, and null is not one."},
			{"/payment_method", "invalid", "This must be pm_ and 1 to 64 lower-case letters, digits or underscores."},
			{"/reference", "invalid", "This must not be empty. Leave it out instead."},
			{"/metadata/b", "invalid_type", "This must be a string."},
			{"/metadata/a", "invalid_type", "This must be a string, and null is not one."},
		}, invalid.faults)
	})
	t.Run("ANameAndItsValueAreToldBoth", func(t *testing.T) {
		t.Parallel()
		_, err := readPaymentFields(t, paymentBody(map[string]string{"metadata": `{"":1}`}))
		var invalid *validationError
		require.ErrorAs(t, err, &invalid)
		require.Len(t, invalid.faults, 2)
	})
	t.Run("FaultsAreJSONAsTheContractSpellsIt", func(t *testing.T) {
		t.Parallel()
		b, err := json.Marshal(fieldFault{"/amount", faultRequired, "This field is required."})
		require.NoError(t, err)
		require.JSONEq(t, `{"pointer":"/amount","code":"required","detail":"This field is required."}`, string(b))
	})
	t.Run("TheErrorsTextHasNoMetadataName", func(t *testing.T) {
		t.Parallel()
		_, err := readPaymentFields(t, paymentBody(map[string]string{"metadata": `{"hush":1}`}))
		require.EqualError(t, err, "request is invalid in 1 places")
	})
	t.Run("DetailsRepeatNothingThatWasSent", func(t *testing.T) {
		t.Parallel()
		_, err := readPaymentFields(t, `{"order_id":"hush","amount":-77,"currency":"hush","payment_method":"hush","reference":"`+
			strings.Repeat("hush", 100)+`","metadata":{"hush":77}}`)
		var invalid *validationError
		require.ErrorAs(t, err, &invalid)
		require.Len(t, invalid.faults, 6)
		for _, fault := range invalid.faults {
			require.NotContains(t, fault.Detail, "hush")
			require.NotContains(t, fault.Detail, "77")
		}
	})
	t.Run("AThousandBadNamesAreOneFault", func(t *testing.T) {
		t.Parallel()
		_, err := readPaymentFields(t, paymentBody(map[string]string{"metadata": strings.ReplaceAll(metadataOf(1000), `""`, "null")}))
		var invalid *validationError
		require.ErrorAs(t, err, &invalid)
		require.Len(t, invalid.faults, 1)
	})
}

func TestFieldsUnknownNames(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		fact string
		name string
	}{
		{"AnUnknownNameIsMalformed", "capture"},
		{"AnotherCaseIsAnUnknownName", "Amount"},
		{"AnInvisibleCharacterMakesAnUnknownName", "amount\u200b"},
		{"ASpaceMakesAnUnknownName", "amount "},
		{"TheEmptyNameIsUnknown", ""},
	} {
		t.Run(tt.fact, func(t *testing.T) {
			t.Parallel()
			_, err := readPaymentFields(t, paymentBody(map[string]string{tt.name: "1"}))
			var malformed *malformedError
			require.ErrorAs(t, err, &malformed)
			require.Equal(t, "The object has a field that this request does not take. It takes order_id, amount, currency, "+
				"payment_method, reference, metadata, and case matters.", malformed.reason)
		})
	}

	t.Run("AnUnknownNameWinsOverFaults", func(t *testing.T) {
		t.Parallel()
		_, err := readPaymentFields(t, `{"amount":0,"Amount":1000}`)
		var malformed *malformedError
		require.ErrorAs(t, err, &malformed)
	})
	t.Run("ARequestWithoutFieldsTakesTheEmptyObjectOnly", func(t *testing.T) {
		t.Parallel()
		require.NoError(t, newFields(jsonObject{}).err())
		object, err := readStrictJSON([]byte(`{"a":1}`))
		require.NoError(t, err)
		require.EqualError(t, newFields(object).err(), "request is malformed: The object has a field that this request does not take. It takes none.")
	})
}

func TestFieldsOptionalAmount(t *testing.T) {
	t.Parallel()

	read := func(t *testing.T, body string) (*int64, error) {
		t.Helper()
		object, err := readStrictJSON([]byte(body))
		require.NoError(t, err)
		f := newFields(object)
		return f.optionalAmount("amount"), f.err()
	}

	t.Run("IsNilWhenAbsent", func(t *testing.T) {
		t.Parallel()
		amount, err := read(t, `{}`)
		require.NoError(t, err)
		require.Nil(t, amount)
	})
	t.Run("IsReadWhenPresent", func(t *testing.T) {
		t.Parallel()
		amount, err := read(t, `{"amount":5}`)
		require.NoError(t, err)
		require.EqualValues(t, 5, *amount)
	})
	t.Run("HasTheSameRangeAndType", func(t *testing.T) {
		t.Parallel()
		for body, code := range map[string]string{
			`{"amount":0}`: faultTooSmall, `{"amount":1000000000000}`: faultTooLarge, `{"amount":null}`: faultInvalidType,
		} {
			_, err := read(t, body)
			var invalid *validationError
			require.ErrorAs(t, err, &invalid, body)
			require.Equal(t, code, invalid.faults[0].Code, body)
		}
	})
}

func TestFieldsRefuseCardNumbers(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		fact    string
		name    string
		value   string
		pointer string
	}{
		{"InAPaymentMethod", "payment_method", `"4242424242424242"`, "/payment_method"},
		{"InAPaymentMethodWithSpaces", "payment_method", `"4242 4242 4242 4242"`, "/payment_method"},
		{"InAPaymentMethodAfterThePrefix", "payment_method", `"pm_4242424242424242"`, "/payment_method"},
		{"InAPaymentMethodAfterThePrefixWithDashes", "payment_method", `"pm_4242-4242-4242-4242"`, "/payment_method"},
		{"InAPaymentMethodAfterThePrefixWithUnderscores", "payment_method", `"pm_4242_4242_4242_4242"`, "/payment_method"},
		{"InAReference", "reference", `"4000056655665556"`, "/reference"},
		{"InAReferenceWithSpaceAround", "reference", `"\t4242424242424242 "`, "/reference"},
		{"InAMetadataValue", "metadata", `{"card":"5555-5555-5555-4444"}`, "/metadata/card"},
		{"InAMetadataName", "metadata", `{"4242 4242 4242 4242":1}`, "/metadata"},
	} {
		t.Run(tt.fact, func(t *testing.T) {
			t.Parallel()
			_, err := readPaymentFields(t, paymentBody(map[string]string{tt.name: tt.value}))
			var invalid *validationError
			require.ErrorAs(t, err, &invalid)
			require.Equal(t, []fieldFault{{tt.pointer, faultInvalid, "Card numbers are not accepted."}}, invalid.faults)
			require.NotContains(t, err.Error(), "4242")
		})
	}
}

func TestIsCardNumber(t *testing.T) {
	t.Parallel()

	for _, tt := range []struct {
		fact string
		text string
		want bool
	}{
		{"SixteenDigits", "4242424242424242", true},
		{"FifteenDigits", "378282246310005", true},
		{"TwelveDigits", "501800000009", true},
		{"NineteenDigits", "6304000000000000000", true},
		{"GroupsWithSpaces", "4242 4242 4242 4242", true},
		{"GroupsWithHyphens", "4242-4242-4242-4242", true},
		{"NonBreakingSpaces", "4242\u00a04242\u00a04242\u00a04242", true},
		{"ThinAndIdeographicSpaces", "4242\u20094242\u30004242\u202f4242", true},
		{"LineBreaks", "4242\n4242\u20284242\u00854242", true},
		{"EnAndEmDashes", "4242\u20134242\u201442424242", true},
		{"NonBreakingHyphensAndMinusSigns", "4242\u20114242\u22124242\ufe634242", true},
		{"SoftHyphensAndZeroWidthSpaces", "4242\u00ad4242\u200b4242\ufeff4242", true},
		{"FullWidthDigits", strings.Repeat("\uff14\uff12", 8), true},
		{"ArabicDigits", strings.Repeat("\u0664\u0662", 8), true},
		{"MathematicalDigits", strings.Repeat("\U0001d7d2\U0001d7d0", 8), true},

		{"AWrongCheckDigitIsNone", "4242424242424243", false},
		{"TwoDigitsSwappedAreNone", "2442424242424242", false},
		{"ElevenDigitsAreNone", "00000000000", false},
		{"TwentyDigitsAreNone", "00000000000000000000", false},
		{"LettersAroundAreNone", "x4242424242424242", false},
		{"DotsBetweenAreNone", "4242.4242.4242.4242", false},
		{"NothingIsNone", "", false},
		{"DashesAloneAreNone", "----------------", false},
		{"SuperscriptsAreNone", strings.Repeat("\u2074\u00b2", 8), false},
	} {
		t.Run(tt.fact, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, tt.want, isCardNumber(tt.text))
		})
	}

	t.Run("ExactlyOneCheckDigitPasses", func(t *testing.T) {
		t.Parallel()
		rapid.Check(t, func(t *rapid.T) {
			digits := rapid.StringMatching(`[0-9]{11,18}`).Draw(t, "digits")
			passed := 0
			for check := range 10 {
				if isCardNumber(fmt.Sprint(digits, check)) {
					passed++
				}
			}
			if passed != 1 {
				t.Fatalf("%d check digits pass", passed)
			}
		})
	})
	t.Run("UnicodeKeepsDigitsTogetherFromZeroToNine", func(t *testing.T) {
		t.Parallel()
		// digitValue relies on it.
		for _, digits := range unicode.Nd.R16 {
			require.EqualValues(t, 1, digits.Stride)
			require.Zero(t, (digits.Hi-digits.Lo+1)%10)
		}
		for _, digits := range unicode.Nd.R32 {
			require.EqualValues(t, 1, digits.Stride)
			require.Zero(t, (digits.Hi-digits.Lo+1)%10)
		}
	})
}
