package payments

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// step is what the gateway does when it is called: "send" for Charge, "ask" for LookUp.
type step struct {
	call   string
	status OutcomeStatus
	err    error
	hangs  bool // until the caller's patience ends
}

// scriptedGateway goes through its steps and repeats those of the rest for ever. What it was called for is written down.
type scriptedGateway struct {
	t     *testing.T
	steps []step
	rest  []step
	calls []string
}

func (g *scriptedGateway) next(ctx context.Context, call string) (Outcome, error) {
	g.calls = append(g.calls, call)
	var s step
	if len(g.steps) > 0 {
		s, g.steps = g.steps[0], g.steps[1:]
	} else if i := slices.IndexFunc(g.rest, func(s step) bool { return s.call == call }); i >= 0 {
		s = g.rest[i]
	}
	if s.call != call {
		g.t.Fatalf("call %d is %q, and the script says %+v", len(g.calls), call, s)
	}
	if _, ok := ctx.Deadline(); !ok {
		g.t.Fatal("an exchange has no end")
	}
	if s.hangs {
		<-ctx.Done()
	}
	if s.err != nil {
		return Outcome{}, s.err
	}
	return Outcome{Status: s.status, Reference: "ch_1"}, nil
}

func (g *scriptedGateway) Charge(ctx context.Context, _ Intent) (Outcome, error) {
	return g.next(ctx, "send")
}

func (g *scriptedGateway) LookUp(ctx context.Context, _ Intent) (Outcome, error) {
	return g.next(ctx, "ask")
}

func (g *scriptedGateway) Cancel(context.Context, Intent) (Outcome, error) {
	g.t.Fatal("only the reaper cancels")
	return Outcome{}, nil
}

func send(status OutcomeStatus) step { return step{call: "send", status: status} }
func ask(status OutcomeStatus) step  { return step{call: "ask", status: status} }
func sendFails(err error) step       { return step{call: "send", err: err} }
func askFails(err error) step        { return step{call: "ask", err: err} }

func TestCharge(t *testing.T) {
	t.Parallel()

	var (
		first     = history{}
		uncertain = history{resumed: true, uncertain: true}
		sure      = history{resumed: true}
		refused   = []step{sendFails(ErrRefused), ask(OutcomeNeverSeen)}
		down      = []step{sendFails(ErrNotSent), askFails(ErrNotSent)}
		mute      = []step{{call: "send", err: ErrUnclear, hangs: true}, {call: "ask", err: ErrUnclear, hangs: true}}
	)
	script := func(parts ...any) (steps []step) {
		for _, part := range parts {
			switch part := part.(type) {
			case step:
				steps = append(steps, part)
			case []step:
				steps = append(steps, part...)
			}
		}
		return steps
	}
	for _, tt := range []struct {
		fact    string
		history history
		steps   []step
		rest    []step
		want    OutcomeStatus // or
		err     error
		calls   string // the beginning of all calls; all of them unless there is a rest
	}{
		{"FirstAttemptSendsWithoutAsking", first, script(send(OutcomeApproved)), nil, OutcomeApproved, nil, "send"},
		{"DeclineIsAnEnd", first, script(send(OutcomeDeclined)), nil, OutcomeDeclined, nil, "send"},
		{"CanceledIsAnEnd", first, script(send(OutcomeCanceled)), nil, OutcomeCanceled, nil, "send"},

		{"LaterAttemptAsksFirst", uncertain, script(ask(OutcomeApproved)), nil, OutcomeApproved, nil, "ask"},
		{"LaterAttemptAsksFirstAlsoAfterASureRelease", sure, script(ask(OutcomeDeclined)), nil, OutcomeDeclined, nil, "ask"},
		{"LaterAttemptMayFindTheCancel", uncertain, script(ask(OutcomeCanceled)), nil, OutcomeCanceled, nil, "ask"},
		{"LaterAttemptSendsWhatWasNeverSeen", uncertain, script(ask(OutcomeNeverSeen), send(OutcomeApproved)), nil, OutcomeApproved, nil, "ask send"},
		{"LaterAttemptAsksAgainWhileItIsInWork", uncertain, script(ask(OutcomeProcessing), ask(OutcomeProcessing), ask(OutcomeApproved)), nil, OutcomeApproved, nil, "ask ask ask"},
		{"LaterAttemptNeverSendsBlindly", uncertain, nil, script(askFails(ErrUnclear)), "", ErrOutcomeUnknown, "ask ask"},
		{"LaterAttemptNeverSendsWhatIsInWork", sure, nil, script(ask(OutcomeProcessing)), "", ErrNotCharged, "ask ask"},

		{"RefusalIsSentAgainWhenTheGatewayHasNeverSeenIt", first, script(refused, send(OutcomeApproved)), nil, OutcomeApproved, nil, "send ask send"},
		{"RefusalAfterTheChargeIsFound", first, script(sendFails(ErrRefused), ask(OutcomeApproved)), nil, OutcomeApproved, nil, "send ask"},
		{"ThreeRefusalsAreEnough", first, script(refused, refused, refused), nil, "", ErrNotCharged, "send ask send ask send ask"},
		{"RefusalThatTheGatewayDoesNotConfirmIsUnknown", first, script(sendFails(ErrRefused)), script(askFails(ErrUnclear)), "", ErrOutcomeUnknown, "send ask ask"},
		{"RefusalThatAProxys404AnswersIsUnknown", first, nil, script(sendFails(ErrRefused), ask(OutcomeNotFound)), "", ErrOutcomeUnknown, "send ask send ask send ask"},
		{"LastRefusalIsAskedAboutForAsLongAsItTakes", first, script(refused, refused, sendFails(ErrRefused), askFails(ErrUnclear), ask(OutcomeApproved)), nil, OutcomeApproved, nil, ""},

		{"UnclearAnswerIsAskedAbout", first, script(sendFails(ErrUnclear), ask(OutcomeApproved)), nil, OutcomeApproved, nil, "send ask"},
		{"UnclearAnswerIsNotSentAgainWhileItIsInWork", first, script(sendFails(ErrUnclear), ask(OutcomeProcessing), ask(OutcomeDeclined)), nil, OutcomeDeclined, nil, "send ask ask"},
		{"UnclearAnswerIsSentAgainWhenNeverSeen", first, script(sendFails(ErrUnclear), ask(OutcomeNeverSeen), send(OutcomeApproved)), nil, OutcomeApproved, nil, "send ask send"},
		{"UnclearAnswerStaysUnclearAfterRefusals", first, script(sendFails(ErrUnclear), ask(OutcomeNeverSeen), refused, refused), nil, "", ErrOutcomeUnknown, "send ask send ask send ask"},
		{"SilenceLeavesTimeToAsk", first, script(mute[0], ask(OutcomeApproved)), nil, OutcomeApproved, nil, "send ask"},
		{"SilenceOfEverythingEndsWithTheBudget", first, nil, mute, "", ErrOutcomeUnknown, "send ask"},

		{"GatewayThatIsDownIsTriedThreeTimes", first, script(down[0], down[0], down[0]), nil, "", ErrNotCharged, "send send send"},
		{"GatewayThatIsBackIsFound", first, script(down[0], down[0], send(OutcomeApproved)), nil, OutcomeApproved, nil, "send send send"},
		{"GatewayThatIsDownChargesNothingAfterASureRelease", sure, script(down[1], down[1], down[1]), nil, "", ErrNotCharged, "ask ask ask"},
		{"GatewayThatIsDownSaysNothingOfAnUncertainAttempt", uncertain, nil, down, "", ErrOutcomeUnknown, "ask ask"},
		{"GatewayThatGoesDownAfterARefusalConfirmsNothing", first, script(sendFails(ErrRefused)), down, "", ErrOutcomeUnknown, "send ask ask"},
		{"UncertaintyOutlivesEveryRefusal", uncertain, script(ask(OutcomeNeverSeen), refused, refused, refused), nil, "", ErrOutcomeUnknown, "ask send ask send ask send ask"},
	} {
		t.Run(tt.fact, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const budget = 10 * time.Second
				gateway := &scriptedGateway{t: t, steps: tt.steps, rest: tt.rest}
				started := time.Now()
				outcome, err := charge(t.Context(), gateway, Intent{}, tt.history, budget)
				require.LessOrEqual(t, time.Since(started), budget)
				require.Empty(t, gateway.steps, "it gave up too early")
				if tt.err != nil {
					require.ErrorIs(t, err, tt.err)
					require.Zero(t, outcome)
				} else {
					require.NoError(t, err)
					require.Equal(t, tt.want, outcome.Status)
				}
				calls := strings.Join(gateway.calls, " ")
				require.True(t, strings.HasPrefix(calls, tt.calls), calls)
				if tt.rest == nil && tt.calls != "" {
					require.Equal(t, tt.calls, calls)
				}
			})
		})
	}
}

// worldGateway is a gateway and a network that do whatever they may: lose, delay, refuse, charge and stay silent.
type worldGateway struct {
	t         *rapid.T
	charged   bool
	underWay  bool   // a request that somebody gave up may still arrive
	first     string // what the present attempt began with
	exchanges int
}

func (g *worldGateway) begin(call string) {
	if g.first == "" {
		g.first = call
	}
	g.exchanges++
	if g.underWay && rapid.Bool().Draw(g.t, "arrives now") {
		g.underWay, g.charged = false, true
	}
}

func (g *worldGateway) Charge(ctx context.Context, _ Intent) (Outcome, error) {
	g.begin("send")
	approved := Outcome{Status: OutcomeApproved, Reference: "ch_1"}
	switch rapid.SampledFrom([]string{"works", "refuses", "charges and refuses", "charges and is cut", "is cut", "comes late", "hangs", "charges and hangs", "is down"}).Draw(g.t, "send") {
	case "works":
		g.charged = true
		return approved, nil
	case "refuses":
		if g.charged { // a key that has its charge is answered with it
			return approved, nil
		}
		return Outcome{}, ErrRefused
	case "charges and refuses":
		g.charged = true
		return Outcome{}, ErrRefused
	case "charges and is cut":
		g.charged = true
		return Outcome{}, ErrUnclear
	case "is cut":
		return Outcome{}, ErrUnclear
	case "comes late":
		g.underWay = true
		return Outcome{}, ErrUnclear
	case "charges and hangs":
		g.charged = true
		fallthrough
	case "hangs":
		<-ctx.Done()
		return Outcome{}, ErrUnclear
	default:
		return Outcome{}, ErrNotSent
	}
}

func (g *worldGateway) LookUp(context.Context, Intent) (Outcome, error) {
	g.begin("ask")
	switch rapid.SampledFrom([]string{"tells", "tells", "tells", "is unclear", "is down", "is a proxy's 404", "is in work"}).Draw(g.t, "ask") {
	case "tells":
		if g.charged {
			return Outcome{Status: OutcomeApproved, Reference: "ch_1"}, nil
		}
		return Outcome{Status: OutcomeNeverSeen}, nil
	case "is unclear":
		return Outcome{}, ErrUnclear
	case "is down":
		return Outcome{}, ErrNotSent
	case "is a proxy's 404":
		return Outcome{Status: OutcomeNotFound}, nil
	default:
		return Outcome{Status: OutcomeProcessing}, nil
	}
}

func (g *worldGateway) Cancel(context.Context, Intent) (Outcome, error) {
	panic("only the reaper cancels")
}

// inBubble keeps rapid from asking for the deadline, which is one of the real clock.
type inBubble struct{ *testing.T }

func (inBubble) Deadline() (time.Time, bool) { return time.Time{}, false }

// Whatever gateway and network do, and however many attempts there are: an outcome is true, and "not charged" is, for now and for ever.
func TestChargeIsHonest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(inBubble{t}, func(t *rapid.T) {
			g := &worldGateway{t: t}
			past := history{}
			for attempt := range rapid.IntRange(1, 4).Draw(t, "attempts") {
				g.first = ""
				outcome, err := charge(context.Background(), g, Intent{}, past, 10*time.Second)
				if past.resumed && g.first != "ask" {
					t.Fatalf("attempt %d began with %q", attempt, g.first)
				}
				switch {
				case err == nil && (outcome.Status != OutcomeApproved || !g.charged):
					t.Fatalf("attempt %d says %v of what was not charged", attempt, outcome)
				case err == nil:
					return
				case errors.Is(err, ErrNotCharged) && (g.charged || g.underWay):
					t.Fatalf("attempt %d says that nothing was charged, and it was, or may yet be: %+v", attempt, *g)
				case !errors.Is(err, ErrNotCharged) && !errors.Is(err, ErrOutcomeUnknown):
					t.Fatal(fmt.Errorf("attempt %d ends with neither: %w", attempt, err))
				}
				past = history{resumed: true, uncertain: !errors.Is(err, ErrNotCharged)}
			}
		})
	})
}
