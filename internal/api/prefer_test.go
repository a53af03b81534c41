package api

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestParsePrefer(t *testing.T) {
	t.Parallel()

	async := preferences{respondAsync: true}
	wait := func(seconds int) preferences {
		return preferences{wait: time.Duration(seconds) * time.Second, waitSet: true}
	}
	both := func(seconds int) preferences {
		p := wait(seconds)
		p.respondAsync = true
		return p
	}

	for _, tt := range []struct {
		fact  string
		lines []string
		want  preferences
	}{
		{"NoLineIsNoPreference", nil, preferences{}},
		{"AnEmptyLineIsNoPreference", []string{""}, preferences{}},
		{"RespondAsync", []string{"respond-async"}, async},
		{"Wait", []string{"wait=5"}, wait(5)},
		{"WaitZeroIsSet", []string{"wait=0"}, wait(0)},
		{"BothOnOneLine", []string{"respond-async, wait=10"}, both(10)},
		{"BothOnTwoLines", []string{"wait=10", "respond-async"}, both(10)},
		{"NamesAreCaseInsensitive", []string{"Respond-Async, WAIT=3"}, both(3)},
		{"SpaceDoesNotMatter", []string{" \twait =\t7 ,,\trespond-async "}, both(7)},
		{"UnknownPreferencesAreIgnored", []string{`return=minimal, handling=lenient, foo="wait=9, respond-async", wait=4`}, wait(4)},
		{"ParametersAreIgnored", []string{`respond-async; wait=9; foo="a, b;c", wait=4; x`}, both(4)},
		{"AnEscapedQuoteDoesNotEndAString", []string{`foo="\", respond-async, \\", wait=4`}, wait(4)},
		{"AQuotedWaitIsAccepted", []string{`wait="6"`}, wait(6)},
		{"AnEscapeInAQuotedWaitIsUndone", []string{`wait="\6"`}, wait(6)},
		{"LeadingZerosAreDigits", []string{"wait=007"}, wait(7)},
		{"TwentySecondsAreAccepted", []string{"wait=20"}, wait(20)},
		{"ALongerWaitIsCutToTwentySeconds", []string{"wait=21"}, wait(20)},
		{"AWaitBeyondAnyIntegerIsCutToTwentySeconds", []string{"wait=" + strings.Repeat("9", 100)}, wait(20)},
		{"ANegativeWaitIsIgnored", []string{"wait=-1"}, preferences{}},
		{"ASignedWaitIsIgnored", []string{"wait=+1"}, preferences{}},
		{"AFractionIsIgnored", []string{"wait=1.5"}, preferences{}},
		{"AWaitInWordsIsIgnored", []string{"wait=soon"}, preferences{}},
		{"AWaitWithAUnitIsIgnored", []string{"wait=5s"}, preferences{}},
		{"OtherScriptsDigitsAreIgnored", []string{"wait=٥"}, preferences{}},
		{"AWaitWithoutAValueIsIgnored", []string{"wait"}, preferences{}},
		{"AnEmptyWaitIsIgnored", []string{"wait="}, preferences{}},
		{"AnEmptyQuotedWaitIsIgnored", []string{`wait=""`}, preferences{}},
		{"TheFirstOfTwoCounts", []string{"wait=3, wait=9"}, wait(3)},
		{"TheFirstOfTwoCountsAcrossLines", []string{"wait=3", "wait=9"}, wait(3)},
		{"TheFirstOfTwoCountsEvenIfMalformed", []string{"wait=x, wait=9"}, preferences{}},
		{"TheFirstOfTwoCountsInAnyCase", []string{"Wait=3, wait=9"}, wait(3)},
		{"AnOpenQuoteIsIgnored", []string{`wait="5`}, preferences{}},
		{"AnythingAfterAQuoteIsIgnored", []string{`wait="5"5`}, preferences{}},
		{"AnOpenQuoteSwallowsNoOtherLine", []string{`foo="bar`, "respond-async"}, async},
		{"RespondAsyncWithAnEmptyValueIsTheSame", []string{`respond-async=""`}, async},
		{"RespondAsyncWithAValueIsIgnored", []string{"respond-async=foo"}, preferences{}},
		{"RespondAsyncWithAnOpenQuoteIsIgnored", []string{`respond-async="`}, preferences{}},
		{"ALongerNameIsAnother", []string{"respond-asynchronously, waits=5"}, preferences{}},
	} {
		t.Run(tt.fact, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, tt.want, parsePrefer(tt.lines))
		})
	}
}
