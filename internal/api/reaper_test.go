package api_test

import (
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"example.com/payments/internal/payments"
	"example.com/payments/internal/servicetest"
)

// What the reaper does for clients that never come back: DESIGN §1.6 and §5, row 15 of CONTRACT §4.

func TestReaperOfPayments(t *testing.T) { t.Parallel(); facts(t, reaperFacts(payment)) }
func TestReaperOfRefunds(t *testing.T)  { t.Parallel(); facts(t, reaperFacts(refund)) }

func reaperFacts(s story) []fact {
	return []fact{
		{"RecordsTheChargeThatItFinds", s.reaperRecords},
		{"LeavesAloneWhatIsHeld", s.reaperLeavesHeld},
		{"CancelsWhatWasNeverSeenButNotBeforeReapAfter", s.reaperCancels},
		{"RecordsTheCancelOfAReaperThatDied", s.reaperRecordsCancel},
		{"BelievesTheCancelWhenItFindsTheCharge", s.reaperCancelFindsCharge},
		{"CountsFromTheEndOfTheLastClientsAttempt", s.reaperCountsFromClient},
		{"IsNotWhatItCountsFrom", s.reaperDoesNotCountItself},
		{"LeavesEverythingAsItIsWhileTheGatewayIsAway", s.reaperWithoutGateway},
		{"BacksOffInStepWithOtherReplicas", s.reaperBacksOff},
		{"NeverKeepsAClientWaiting", s.reaperKeepsNobodyWaiting},
		{"MeetsAnotherReaperWithoutHarm", s.twoReapers},
		{"WakesAndEndsPaymentsByItself", s.reaperRuns},
	}
}

type endings = map[payments.ReapEnding]int

// reap has a replica's reaper look at what is due, and checks what became of it. It never sends what would move money.
func (s story) reap(t *testing.T, w *world, r *servicetest.Replica, want endings) {
	t.Helper()
	sent := w.Gateway.Calls(s.post)
	got, err := r.Reaper.RunOnce(t.Context())
	require.NoError(t, err)
	require.Equal(t, want, got)
	require.Equal(t, sent, w.Gateway.Calls(s.post), "the reaper never charges")
}

func (s story) reaperRecords(t *testing.T) {
	w := setup(t, options{})
	for token, status := range map[string]int{"ok": 201, "declined": 402} {
		req := s.leaveBehind(w, token, true)
		claimed := w.Key(req.key).RequestID
		s.reap(t, w, w.Replica, endings{payments.ReapRecorded: 1})
		// Nothing was done for this request, so it is a replay, of the answer that the first one would have had.
		req.from(w.Client).Is(status).Replayed().Has("Original-Request-Id", claimed)
		require.Equal(t, 2, w.Key(req.key).Attempt)
		s.reap(t, w, w.Replica, endings{})
	}
	require.Len(t, s.ledger(w), 2)
}

func (s story) reaperLeavesHeld(t *testing.T) {
	w := setup(t, options{})
	req := s.new(w.Client, "ok")
	gateway := w.Gateway.HoldAfter(s.post, 1)
	first := servicetest.Go(func() answer { return req.from(w.Client) })
	gateway.Arrived()
	asked := w.Gateway.Calls(s.get)
	s.reap(t, w, w.Replica, endings{})
	require.Equal(t, asked, w.Gateway.Calls(s.get))
	gateway.Release()
	first().Is(201).Fresh()
	s.reap(t, w, w.Replica, endings{})
}

func (s story) reaperCancels(t *testing.T) {
	w := setup(t, options{ReapInterval: time.Second, ReapAfter: time.Hour})
	req := s.leaveBehind(w, "ok", false)
	s.reap(t, w, w.Replica, endings{payments.ReapLeftAlone: 1})
	w.MoveBack(req.key, time.Hour-time.Minute)
	s.reap(t, w, w.Replica, endings{payments.ReapLeftAlone: 1})
	require.Zero(t, w.Gateway.Calls(s.cancel))
	w.MoveBack(req.key, time.Minute)
	s.reap(t, w, w.Replica, endings{payments.ReapCanceled: 1})
	require.Equal(t, 1, w.Gateway.Calls(s.cancel))

	a := req.from(w.Client).Is(402, s.name+"-failed").Replayed().Says("outcome", "not-charged").Says("retry", "new-key")
	a.Has("Location", s.path(a))
	w.Do("GET", s.path(a), "", "").Says("status", "failed").Says("failure_code", "never_charged")
	require.Equal(t, "failed", w.Key(req.key).State)
	require.Empty(t, s.ledger(w))

	// A new key can have what the old one could not.
	request{req.path, w.NewKey(), req.body}.from(w.Client).Is(201).Fresh()
}

func (s story) reaperRecordsCancel(t *testing.T) {
	w := setup(t, options{})
	req := s.leaveBehind(w, "ok", false)
	s.cancelAtGateway(w, req)
	s.reap(t, w, w.Replica, endings{payments.ReapRecorded: 1})
	req.from(w.Client).Is(402, s.name+"-failed").Replayed()
}

func (s story) reaperCancelFindsCharge(t *testing.T) {
	w := setup(t, options{ReapAfter: time.Hour})
	req := s.leaveBehind(w, "ok", true)
	w.MoveBack(req.key, time.Hour)
	// Asked too early, the gateway has not seen what is still under way to it.
	w.Gateway.On(s.get, 1, servicetest.Answers(404, `{"error":"never_seen"}`))
	s.reap(t, w, w.Replica, endings{payments.ReapRecorded: 1})
	req.from(w.Client).Is(201).Replayed()
	require.Len(t, s.ledger(w), 1)
}

func (s story) reaperCountsFromClient(t *testing.T) {
	w := setup(t, options{ReapInterval: time.Second, ReapAfter: time.Hour})
	req := s.leaveBehind(w, "ok", false)
	w.MoveBack(req.key, 59*time.Minute)
	// The client comes back, and its second worker dies as well.
	dead := w.NewReplica(options{Gateway: servicetest.Dies(false)})
	_, err := dead.As(w.Merchant).Try(t.Context(), "POST", req.path, req.key, req.body)
	require.Error(t, err)
	w.ExpireLease(req.key)
	w.MoveBack(req.key, 59*time.Minute)
	s.reap(t, w, w.Replica, endings{payments.ReapLeftAlone: 1})
	w.MoveBack(req.key, time.Minute)
	s.reap(t, w, w.Replica, endings{payments.ReapCanceled: 1})

	// A release is the end of an attempt as well.
	req = s.new(w.Client, "ok")
	w.Gateway.Down()
	req.from(w.Client).Is(503, "gateway-unavailable")
	w.Gateway.Up()
	w.MoveBack(req.key, 59*time.Minute)
	s.reap(t, w, w.Replica, endings{payments.ReapLeftAlone: 1})
	w.MoveBack(req.key, time.Minute)
	s.reap(t, w, w.Replica, endings{payments.ReapCanceled: 1})
}

func (s story) reaperDoesNotCountItself(t *testing.T) {
	w := setup(t, options{ReapInterval: time.Second, ReapAfter: time.Hour, LeaseTTL: 10 * time.Minute})
	req := s.leaveBehind(w, "ok", false)
	s.reap(t, w, w.Replica, endings{payments.ReapLeftAlone: 1})
	w.MoveBack(req.key, 30*time.Minute)
	s.reap(t, w, w.Replica, endings{payments.ReapLeftAlone: 1})
	w.MoveBack(req.key, 30*time.Minute)
	// It takes over to record the cancel, and the database does not take the record.
	mend := w.Breaks("INSERT", "events", "23514")
	got, err := w.Reaper.RunOnce(t.Context())
	require.Error(t, err)
	require.Equal(t, endings{payments.ReapError: 1}, got)
	mend()
	w.ExpireLease(req.key)
	require.GreaterOrEqual(t, *w.Key(req.key).AbandonedFor, time.Hour)
	s.reap(t, w, w.Replica, endings{payments.ReapRecorded: 1})
	req.from(w.Client).Is(402, s.name+"-failed").Replayed()
}

func (s story) reaperWithoutGateway(t *testing.T) {
	w := setup(t, options{ReapInterval: time.Second, ReapAfter: time.Hour, GatewayTimeout: time.Second})
	req := s.leaveBehind(w, "ok", false)
	w.MoveBack(req.key, 24*time.Hour)
	before := w.Key(req.key)
	unchanged := func() {
		t.Helper()
		after := w.Key(req.key)
		require.Equal(t, before.Attempt, after.Attempt)
		require.Equal(t, before.State, after.State)
		require.Equal(t, before.Holder, after.Holder)
		require.True(t, after.OutcomeUncertain)
	}
	w.Gateway.Down()
	s.reap(t, w, w.Replica, endings{payments.ReapUnclear: 1})
	unchanged()
	w.Gateway.Up()
	for _, says := range []servicetest.Handler{
		servicetest.Answers(500, `{"error":"internal_error"}`), servicetest.Answers(502, "<html>"), servicetest.Answers(200, `{}`), servicetest.Cuts, servicetest.Silent,
	} {
		for _, route := range []string{s.get, s.cancel} {
			w.MoveBack(req.key, 10*time.Second)
			behaves := w.Gateway.On(route, servicetest.Always, says)
			s.reap(t, w, w.Replica, endings{payments.ReapUnclear: 1})
			behaves()
			unchanged()
		}
	}
	w.MoveBack(req.key, 10*time.Second)
	s.reap(t, w, w.Replica, endings{payments.ReapCanceled: 1})
}

func (s story) reaperBacksOff(t *testing.T) {
	w := setup(t, options{ReapInterval: 10 * time.Second, ReapAfter: time.Hour})
	other := w.NewReplica(options{ReapInterval: 10 * time.Second, ReapAfter: time.Hour})
	req := s.leaveBehind(w, "ok", false)
	w.MoveBack(req.key, 2*time.Minute)
	w.Gateway.On(s.get, servicetest.Always, servicetest.Answers(502, "<html>"))
	s.reap(t, w, w.Replica, endings{payments.ReapUnclear: 1})
	// A quarter of the time that it has been stale, and nobody looks before that.
	require.InDelta(t, 30, w.Key(req.key).NextLookIn.Seconds(), 3)
	s.reap(t, w, other, endings{})
	s.reap(t, w, w.Replica, endings{})
	require.Equal(t, 1, w.Gateway.Calls(s.get))

	// At least one round, and at most five.
	w.MoveBack(req.key, 50*time.Minute)
	s.reap(t, w, other, endings{payments.ReapUnclear: 1})
	require.InDelta(t, 50, w.Key(req.key).NextLookIn.Seconds(), 3)

	// The same where it is the cancel that fails.
	w.MoveBack(req.key, time.Hour)
	seen := w.Gateway.On(s.get, 1, servicetest.Answers(404, `{"error":"never_seen"}`))
	cancels := w.Gateway.On(s.cancel, 1, servicetest.Answers(502, "<html>"))
	s.reap(t, w, other, endings{payments.ReapUnclear: 1})
	require.InDelta(t, 50, w.Key(req.key).NextLookIn.Seconds(), 3)
	seen()
	cancels()

	// `payments reap --once` does not wait.
	got, err := other.Reaper.RunAll(t.Context())
	require.NoError(t, err)
	require.Equal(t, endings{payments.ReapUnclear: 1}, got)

	// A client's repeat is not put off by any of this.
	req.from(w.NewReplica(options{GatewayTimeout: 300 * time.Millisecond}).As(w.Merchant)).Is(504, "gateway-timeout")
	require.Equal(t, 2, w.Key(req.key).Attempt)
}

func (s story) reaperKeepsNobodyWaiting(t *testing.T) {
	w := setup(t, options{ReapAfter: time.Hour})
	req := s.leaveBehind(w, "ok", false)
	w.MoveBack(req.key, time.Hour)
	for _, route := range []string{s.get, s.cancel} {
		looking := w.Gateway.HoldBefore(route, 1)
		reaped := servicetest.Go(func() endings {
			counts, err := w.Reaper.RunOnce(t.Context())
			require.NoError(t, err)
			return counts
		})
		looking.Arrived()
		a := req.from(w.Client).Is(201).Fresh()
		looking.Release()
		require.Equal(t, endings{payments.ReapOvertaken: 1}, reaped())
		req.from(w.Client).Same(a).Replayed()

		req = s.leaveBehind(w, "ok", false)
		w.MoveBack(req.key, time.Hour)
	}
}

func (s story) twoReapers(t *testing.T) {
	w := setup(t, options{ReapAfter: time.Hour})
	other := w.NewReplica(options{ReapAfter: time.Hour})
	const n = 10
	reqs := make([]request, n)
	for i := range reqs {
		reqs[i] = s.leaveBehind(w, "ok", i%2 == 0)
		w.MoveBack(reqs[i].key, time.Hour)
	}
	total := endings{}
	var mu sync.Mutex
	var group sync.WaitGroup
	for _, r := range []*servicetest.Replica{w.Replica, other, w.Replica, other} {
		group.Go(func() {
			// Back-off or not: two that meet all the same.
			counts, err := r.Reaper.RunAll(t.Context())
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Error(err)
			}
			for ending, n := range counts {
				total[ending] += n
			}
		})
	}
	group.Wait()
	require.Equal(t, n, total[payments.ReapRecorded]+total[payments.ReapCanceled], total)
	// Unclear is what one finds where another is just canceling.
	require.Zero(t, total[payments.ReapError]+total[payments.ReapLeftAlone], total)
	for i, req := range reqs {
		require.Equal(t, 2, w.Key(req.key).Attempt)
		req.from(w.Client).Is(map[bool]int{true: 201, false: 402}[i%2 == 0]).Replayed()
	}
}

func (s story) reaperRuns(t *testing.T) {
	w := setup(t, options{})
	reqs := []request{s.leaveBehind(w, "ok", true), s.leaveBehind(w, "ok", false)}
	w.NewReplica(options{Background: true, ReapInterval: 50 * time.Millisecond, ReapAfter: 100 * time.Millisecond})
	w.Eventually("the reaper has ended what was stale", func() bool { return w.Unfinished() == 0 && w.Rows("idempotency_keys WHERE state = 'in_progress'") == 0 })
	reqs[0].from(w.Client).Is(201).Replayed()
	reqs[1].from(w.Client).Is(402, s.name+"-failed").Replayed()
}
