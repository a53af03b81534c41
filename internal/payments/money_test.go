package payments

import (
	"slices"
	"strings"
	"testing"

	"github.com/bojanz/currency"
	"github.com/stretchr/testify/require"
)

func TestCurrencyActive(t *testing.T) {
	t.Parallel()

	assert := func(t *testing.T, want bool, codes string) {
		t.Helper()
		for code := range strings.FieldsSeq(codes) {
			require.Equal(t, want, CurrencyActive(code), code)
		}
	}

	t.Run("CurrenciesInUseAreActive", func(t *testing.T) {
		t.Parallel()
		assert(t, true, "EUR USD JPY KWD CLP MXN CHF COP UYU BOB XAF XOF XPF XCD")
	})
	t.Run("RecentCurrenciesAreActive", func(t *testing.T) {
		t.Parallel()
		assert(t, true, "XCG ZWG SLE VED VES MRU STN BYN SSP")
	})
	t.Run("WithdrawnCurrenciesAreNot", func(t *testing.T) {
		t.Parallel()
		assert(t, false, "HRK BGN ANG ZWL CUC SLL VEF LTL LVL EEK BYR MRO STD ZMK DEM")
	})
	t.Run("FundsAreNot", func(t *testing.T) {
		t.Parallel()
		assert(t, false, "BOV CHE CHW CLF COU MXV USN USS UYI UYW XAD")
	})
	t.Run("MetalsAreNot", func(t *testing.T) {
		t.Parallel()
		assert(t, false, "XAU XAG XPD XPT")
	})
	t.Run("UnitsOfTheBanksAreNot", func(t *testing.T) {
		t.Parallel()
		assert(t, false, "XBA XBB XBC XBD XDR XSU XUA")
	})
	t.Run("TestAndNoCurrencyAreNot", func(t *testing.T) {
		t.Parallel()
		assert(t, false, "XTS XXX")
	})
	t.Run("OtherSpellingsAreNot", func(t *testing.T) {
		t.Parallel()
		for _, code := range []string{"", "eur", "Eur", "EUR ", "EU", "EURO", "978", "€", "ZZZ"} {
			require.False(t, CurrencyActive(code), code)
		}
	})
	t.Run("TheListChangesOnlyByDecision", func(t *testing.T) {
		t.Parallel()
		active := slices.DeleteFunc(slices.Clone(currency.GetCurrencyCodes()), func(code string) bool { return !CurrencyActive(code) })
		slices.Sort(active)
		require.Equal(t, strings.Fields(`
			AED AFN ALL AMD AOA ARS AUD AWG AZN BAM BBD BDT BHD BIF BMD BND BOB BRL BSD BTN BWP BYN BZD CAD CDF
			CHF CLP CNY COP CRC CUP CVE CZK DJF DKK DOP DZD EGP ERN ETB EUR FJD FKP GBP GEL GHS GIP GMD GNF GTQ
			GYD HKD HNL HTG HUF IDR ILS INR IQD IRR ISK JMD JOD JPY KES KGS KHR KMF KPW KRW KWD KYD KZT LAK LBP
			LKR LRD LSL LYD MAD MDL MGA MKD MMK MNT MOP MRU MUR MVR MWK MXN MYR MZN NAD NGN NIO NOK NPR NZD OMR
			PAB PEN PGK PHP PKR PLN PYG QAR RON RSD RUB RWF SAR SBD SCR SDG SEK SGD SHP SLE SOS SRD SSP STN SVC
			SYP SZL THB TJS TMT TND TOP TRY TTD TWD TZS UAH UGX USD UYU UZS VED VES VND VUV WST XAF XCD XCG XOF
			XPF YER ZAR ZMW ZWG
		`), active)
	})
	t.Run("EveryCodeThatIsTakenOutIsOnTheLibrarysList", func(t *testing.T) {
		t.Parallel()
		for code := range notMoney {
			require.True(t, currency.IsValid(code), code)
		}
	})
}
