package payments

import "github.com/bojanz/currency"

// MaxAmount is the largest amount of one order, payment or refund, in the currency's minor unit: just short of 10¹². That is ten
// billion euros, more than any card pays, and small enough that sums of millions of amounts stay within an int64, and that every
// amount survives a client which reads JSON numbers as doubles.
const MaxAmount int64 = 999_999_999_999

// notMoney are the codes of ISO 4217's list one that nobody can be paid in: units of account, which the list flags as funds.
// Metals, bond units, the special drawing right and the codes for testing and for no currency (XAU, XBA, XDR, XTS, XXX and
// their like) have no minor unit, and the library leaves those out by itself.
var notMoney = map[string]bool{
	"BOV": true, // Bolivia's Mvdol
	"CHE": true, // WIR euro
	"CHW": true, // WIR franc
	"CLF": true, // Chile's Unidad de Fomento
	"COU": true, // Colombia's Unidad de Valor Real
	"MXV": true, // Mexico's Unidad de Inversion
	"USN": true, // US dollar, next day
	"UYI": true, // Uruguay's peso in index-linked units
	"UYW": true, // Uruguay's Unidad Previsional
	"XAD": true, // Arab accounting dinar
}

// CurrencyActive reports whether code is the upper-case ISO 4217 code of a currency that is in use now.
//
// The list is the library's, which generates it from the list one of the standard's maintenance agency, so that nobody has to copy
// 150 codes by hand. v1.5.1 of November 2026 is up to date: the lev is gone, the Caribbean guilder is there. A test has
// the whole list all the same. A code that a newer version of the library drops would turn honest repeats of requests made with it
// into 400, and a fund that it adds would become payable; the test makes either somebody's decision.
func CurrencyActive(code string) bool {
	// The library takes the empty code for valid.
	return code != "" && currency.IsValid(code) && !notMoney[code]
}
