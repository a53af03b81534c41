package api_test

import (
	"context"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"example.com/payments/internal/servicetest"
)

// Prefer: rows 9 to 12 of CONTRACT §4, and row 18, which ends all waiting.

const respondAsync = "Prefer: respond-async"

func TestPreferOfPayments(t *testing.T) { t.Parallel(); facts(t, preferFacts(payment)) }
func TestPreferOfRefunds(t *testing.T)  { t.Parallel(); facts(t, preferFacts(refund)) }

func preferFacts(s story) []fact {
	return []fact{
		// wait
		{"RepeatThatWaitsGetsTheAnswer", s.waitsForTheAnswer},
		{"RepeatThatWaitsInVainIsToldSo", s.waitsInVain},
		{"MalformedWaitIsIgnored", s.malformedWait},
		{"WaitIsNotAppliedToAFirstRequest", s.firstDoesNotWait},
		{"WaiterTakesOverWhatHasBecomeStale", s.waiterTakesOver},
		{"WaiterInTheSameProcessIsWokenByItsNeighbour", s.wokenByNeighbour},
		{"WaiterOnAnotherReplicaLearnsTheAnswerByTheNextPoll", s.waitsOnAnotherReplica},
		{"WaitingHoldsNoConnection", s.waitingHoldsNoConnection},

		// respond-async
		{"RespondAsyncIsAnsweredWith202AtOnce", s.asyncIs202},
		{"RepeatOfAnAsyncRequestGetsTheSame202UntilThereIsAnAnswer", s.asyncRepeat},
		{"RepeatOfAnAsyncRequestMayWaitForTheAnswer", s.asyncRepeatWaits},
		{"AsyncRepeatThatMeetsTheRecordIsNeverTold202WithAnEnd", s.asyncRepeatMeetsRecord},
		{"StaleAsyncRequestIsResumedInTheBackgroundByItsRepeat", s.asyncIsResumed},
		{"UnclearAsyncAttemptIsReleasedAndResumedByItsRepeat", s.asyncUnclear},
		{"AsyncRequestThatItsProcessLostIsTheReapers", s.asyncIsReaped},
		{"AsyncAttemptsAreCountedInTheDrain", s.asyncIsDrained},
	}
}

// inFlight has a request's first attempt held at the gateway.
func (s story) inFlight(w *world, headers ...string) (req request, first func() answer, release func()) {
	req = s.new(w.Client, "ok")
	gateway := w.Gateway.HoldBefore(s.post, 1)
	first = servicetest.Go(func() answer { return req.from(w.Client, headers...) })
	gateway.Arrived()
	return req, first, gateway.Release
}

// waiters sends requests that wait at the replica, and returns when all of them have seen the key in progress.
func waiters(w *world, r *servicetest.Replica, requests ...func() answer) (all func() []answer) {
	const look = "IdempotencyKeyGet"
	before := r.Queries.Ended(look)
	all = servicetest.Go(func() []answer {
		return servicetest.Race(len(requests), func(i int) answer { return requests[i]() })
	})
	w.Eventually("all of them wait", func() bool { return r.Queries.Ended(look)-before >= len(requests) })
	return all
}

func (s story) waiter(w *world, c *client, r *servicetest.Replica, req request, prefer string) (wait func() answer) {
	all := waiters(w, r, func() answer { return req.from(c, prefer) })
	return func() answer { return all()[0] }
}

func (s story) waitsForTheAnswer(t *testing.T) {
	w := setup(t, options{Background: true})
	req, first, release := s.inFlight(w)
	patient := s.waiter(w, w.Client, w.Replica, req, "Prefer: wait=15")
	longest := s.waiter(w, w.Client, w.Replica, req, "Prefer: foo, WAIT=4711; x=y")
	release()
	final := first().Is(201).Fresh().Has("Preference-Applied", "")
	patient().Same(final).Replayed().Has("Preference-Applied", "wait=15").Has("Original-Request-Id", final.Header.Get("X-Request-Id"))
	longest().Same(final).Replayed().Has("Preference-Applied", "wait=20")
	// There is nothing to wait for any more.
	req.from(w.Client, "Prefer: wait=15").Same(final).Replayed().Has("Preference-Applied", "")
}

func (s story) waitsInVain(t *testing.T) {
	w := setup(t, options{Background: true})
	req, first, release := s.inFlight(w)
	a := req.from(w.Client, "Prefer: wait=1").Is(409, "idempotency-in-progress").Has("Preference-Applied", "wait=1")
	require.NotEmpty(t, a.Header.Get("Retry-After"))
	a.Has("Location", s.path(a)).Has("Link", `</docs/idempotency>; rel="describedby"`)
	req.from(w.Client, "Prefer: wait=0").Is(409, "idempotency-in-progress").Has("Preference-Applied", "wait=0")
	release()
	first().Is(201).Fresh()
}

func (s story) malformedWait(t *testing.T) {
	w := setup(t, options{Background: true})
	req, first, release := s.inFlight(w)
	for _, value := range []string{"wait", "wait=", "wait=soon", "wait=-1", "wait=1.5", "wait=0x10", `wait="5`, "waits=5", "wait 5"} {
		req.from(w.Client, "Prefer: "+value).Is(409, "idempotency-in-progress").Has("Preference-Applied", "")
	}
	release()
	first().Is(201)
	require.Zero(t, w.Queries.Count("IdempotencyKeyPoll"))
}

func (s story) firstDoesNotWait(t *testing.T) {
	w := setup(t, options{Background: true})
	s.new(w.Client, "ok").from(w.Client, "Prefer: wait=5").Is(201).Fresh().Has("Preference-Applied", "")
	s.new(w.Client, "ok").from(w.Client, "Prefer: respond-async, wait=5").Is(202).Fresh().Has("Preference-Applied", "respond-async")
	s.new(w.Client, "ok").from(w.Client, "Prefer: wait=5", respondAsync).Is(202).Fresh().Has("Preference-Applied", "respond-async")
	require.NoError(t, w.Service.Drain(t.Context()))
	require.Zero(t, w.Queries.Count("IdempotencyKeyPoll"))
}

func (s story) waiterTakesOver(t *testing.T) {
	w := setup(t, options{Background: true})
	// The holder dies while the other waits: its lease ends, and nobody tells.
	req := s.new(w.Client, "ok")
	dead := w.NewReplica(options{Gateway: servicetest.Dies(true)})
	_, err := dead.As(w.Merchant).Try(t.Context(), "POST", req.path, req.key, req.body)
	require.Error(t, err)
	waiter := s.waiter(w, w.Client, w.Replica, req, "Prefer: wait=20")
	w.ExpireLease(req.key)
	waiter().Is(201).Fresh()

	// The holder gives up while the other waits.
	req = s.new(w.Client, "ok")
	gives := w.Gateway.On(s.post, servicetest.Always, servicetest.Answers(503, `{"error":"unavailable"}`))
	asking := w.Gateway.HoldBefore(s.get, 1)
	first := servicetest.Go(func() answer { return req.from(w.Client) })
	asking.Arrived()
	waiter = s.waiter(w, w.Client, w.Replica, req, "Prefer: wait=20")
	w.Queries.Before("IdempotencyKeyTakeOver", 1, func(*pgxConn) { gives() })
	asking.Release()
	require.Equal(t, s.id(first().Is(503, "gateway-unavailable")), s.id(waiter().Is(201).Fresh()))
}

func (s story) wokenByNeighbour(t *testing.T) {
	w := setup(t, options{Background: true})
	// The poller is stuck, which also tells that there is somebody to poll for.
	poll := w.Queries.HoldBefore("IdempotencyKeyPoll", 1)
	req, first, release := s.inFlight(w)
	waiter := servicetest.Go(func() answer { return req.from(w.Client, "Prefer: wait=20") })
	poll.Arrived()
	released := time.Now()
	release()
	waiter().Same(first().Is(201)).Replayed().Has("Preference-Applied", "wait=20")
	require.Less(t, time.Since(released), 15*time.Second, "nobody woke it, and it has waited to its end")
	poll.Release()
}

func (s story) waitsOnAnotherReplica(t *testing.T) {
	w := setup(t, options{})
	other := w.NewReplica(options{Background: true})
	req, first, release := s.inFlight(w)
	waiter := s.waiter(w, other.As(w.Merchant), other, req, "Prefer: wait=20")
	release()
	final := first().Is(201)
	polls := other.Queries.Count("IdempotencyKeyPoll")
	waiter().Same(final).Replayed().Has("Preference-Applied", "wait=20")
	// One poll may have been on its way when the answer was recorded; the next one has it. There are 100 to 150 ms between two.
	require.LessOrEqual(t, other.Queries.Count("IdempotencyKeyPoll")-polls, 2)
}

func (s story) waitingHoldsNoConnection(t *testing.T) {
	w := setup(t, options{DBMaxConns: 2, Background: true})
	req, first, release := s.inFlight(w)
	waiting := waiters(w, w.Replica, slices.Repeat([]func() answer{func() answer { return req.from(w.Client, "Prefer: wait=20") }}, 30)...)
	w.Do("GET", "/v1/orders", "", "").Is(200)
	require.Zero(t, w.Rows("pg_stat_activity WHERE datname = current_database() AND application_name = 'payments' AND state LIKE 'idle in transaction%'"))
	release()
	first().Is(201)
	require.Equal(t, map[string]int{"201 replay": 30}, servicetest.Count(waiting()))
}

func (s story) asyncIs202(t *testing.T) {
	w := setup(t, options{})
	req := s.new(w.Client, "ok")
	gateway := w.Gateway.HoldBefore(s.post, 1)
	a := req.from(w.Client, respondAsync).Is(202).Fresh().Has("Preference-Applied", "respond-async").Has("Retry-After", "1").
		Has("Idempotency-Key", quoted(req.key)).Has("Idempotency-Expires", "").Has("Original-Request-Id", "").
		Says("status", "processing").Says("gateway_reference", "")
	a.Has("Location", s.path(a))
	gateway.Arrived()
	require.JSONEq(t, string(a.Body), string(w.Do("GET", s.path(a), "", "").Is(200).Body))
	gateway.Release()
	require.NoError(t, w.Service.Drain(t.Context()))
	require.Equal(t, "succeeded", s.status(w.Client, a))
	// Other spellings of the same wish, and some that are not it.
	for prefer, status := range map[string]int{"RESPOND-ASYNC": 202, `respond-async=""`: 202, "respond-async; a=b": 202, "respond-async=1": 201, "async": 201} {
		require.Equal(t, status, s.new(w.Client, "ok").from(w.Client, "Prefer: "+prefer).Status, prefer)
	}
}

func (s story) asyncRepeat(t *testing.T) {
	w := setup(t, options{})
	for token, status := range map[string]int{"ok": 201, "declined": 402} {
		req := s.new(w.Client, token)
		gateway := w.Gateway.HoldBefore(s.post, 1)
		first := req.from(w.Client, respondAsync).Is(202).Fresh()
		gateway.Arrived()
		// The mode is the first request's, whatever the repeat prefers.
		req.from(w.Client).Same(first).Replayed().Has("Retry-After", "1").Has("Preference-Applied", "").Has("Idempotency-Expires", "")
		req.from(w.Client, respondAsync).Same(first).Replayed().Has("Preference-Applied", "respond-async")
		req.from(w.NewReplica(options{}).As(w.Merchant)).Same(first).Replayed()
		gateway.Release()
		require.NoError(t, w.Service.Drain(t.Context()))
		final := req.from(w.Client, respondAsync).Is(status).Replayed().Has("Preference-Applied", "").Has("Location", s.path(first)).
			Has("Original-Request-Id", first.Header.Get("X-Request-Id"))
		require.NotEmpty(t, final.Header.Get("Idempotency-Expires"))
		req.from(w.Client).Same(final).Replayed()
	}
	require.Len(t, s.ledger(w), 2)
}

func (s story) asyncRepeatWaits(t *testing.T) {
	w := setup(t, options{Background: true})
	req, first, release := s.inFlight(w, respondAsync)
	accepted := first().Is(202)
	req.from(w.Client, "Prefer: wait=1").Same(accepted).Replayed().Has("Preference-Applied", "wait=1")
	req.from(w.Client, "Prefer: wait=0, respond-async").Same(accepted).Replayed().Has("Preference-Applied", "respond-async, wait=0")
	waiter := s.waiter(w, w.Client, w.Replica, req, "Prefer: respond-async, wait=19")
	release()
	final := waiter().Is(201).Replayed().Has("Preference-Applied", "wait=19")
	req.from(w.Client).Same(final)
}

func (s story) asyncRepeatMeetsRecord(t *testing.T) {
	w := setup(t, options{})
	other := w.NewReplica(options{})
	req, first, release := s.inFlight(w, respondAsync)
	accepted := first().Is(202)
	// The repeat has seen the key in progress, and stops before it looks at what the key is for.
	looks := other.Queries.HoldBefore(s.statement("Get"), 1)
	repeat := servicetest.Go(func() answer { return req.from(other.As(w.Merchant)) })
	looks.Arrived()
	release()
	require.NoError(t, w.Service.Drain(t.Context()))
	looks.Release()
	if a := repeat(); a.Status == 202 {
		a.Same(accepted)
	} else {
		a.Is(201).Replayed()
	}
}

func (s story) asyncIsResumed(t *testing.T) {
	w := setup(t, options{Background: true})
	for _, charged := range []bool{true, false} {
		req := s.new(w.Client, "ok")
		dead := w.NewReplica(options{Gateway: servicetest.Dies(charged)})
		accepted := req.from(dead.As(w.Merchant), respondAsync).Is(202).Fresh()
		require.NoError(t, dead.Service.Drain(t.Context()))
		require.Equal(t, "in_progress", w.Key(req.key).State)
		w.ExpireLease(req.key)
		// Polling Location moves nothing.
		require.Equal(t, "processing", s.status(w.Client, accepted))
		require.Equal(t, 1, w.Key(req.key).Attempt)

		gateway := w.Gateway.HoldAfter(s.get, 1)
		req.from(w.Client).Same(accepted).Replayed()
		gateway.Arrived()
		require.Equal(t, 2, w.Key(req.key).Attempt)
		req.from(w.Client).Same(accepted).Replayed()
		waiter := s.waiter(w, w.Client, w.Replica, req, "Prefer: wait=20")
		gateway.Release()
		waiter().Is(201).Replayed()
		require.NoError(t, w.Service.Drain(t.Context()))
		require.Equal(t, 2, w.Key(req.key).Attempt)
	}
	require.Len(t, s.ledger(w), 2)
}

func (s story) asyncUnclear(t *testing.T) {
	w := setup(t, options{})
	req := s.new(w.Client, "ok")
	w.Gateway.Down()
	accepted := req.from(w.Client, respondAsync).Is(202)
	require.NoError(t, w.Service.Drain(t.Context()))
	require.Equal(t, "processing", s.status(w.Client, accepted))
	require.Nil(t, w.Key(req.key).LeaseID)
	w.Gateway.Up()
	req.from(w.Client).Same(accepted).Replayed()
	require.NoError(t, w.Service.Drain(t.Context()))
	req.from(w.Client).Is(201).Replayed().Has("Location", s.path(accepted))
}

func (s story) asyncIsReaped(t *testing.T) {
	w := setup(t, options{ReapAfter: 1})
	for _, charged := range []bool{true, false} {
		req := s.new(w.Client, "ok")
		dead := w.NewReplica(options{Gateway: servicetest.Dies(charged)})
		req.from(dead.As(w.Merchant), respondAsync).Is(202)
		require.NoError(t, dead.Service.Drain(t.Context()))
		w.ExpireLease(req.key)
		_, err := w.Reaper.RunOnce(t.Context())
		require.NoError(t, err)
		req.from(w.Client).Is(map[bool]int{true: 201, false: 402}[charged]).Replayed()
	}
}

func (s story) asyncIsDrained(t *testing.T) {
	w := setup(t, options{})
	req, first, release := s.inFlight(w, respondAsync)
	first().Is(202)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, w.Service.Drain(short), context.DeadlineExceeded)
	release()
	require.NoError(t, w.Service.Drain(t.Context()))
	req.from(w.Client).Is(201).Replayed()
}

func TestDrain(t *testing.T) {
	t.Parallel()
	facts(t, []fact{
		{"RefusesEveryRouteButLivez", func(t *testing.T) {
			w := setup(t, options{})
			w.Do("GET", "/readyz", "", "").Is(200)
			w.API.Drain()
			for _, request := range [][2]string{
				{"POST", "/v1/orders"}, {"GET", "/v1/orders"}, {"HEAD", "/v1/payments"}, {"GET", "/readyz"}, {"GET", "/docs"},
				{"GET", "/openapi.yaml"}, {"GET", "/problems/not-found"}, {"GET", "/nowhere"}, {"DELETE", "/v1/orders"},
			} {
				a := w.Do(request[0], request[1], "", "").Is(503).Has("Retry-After", "1").Has("Connection", "close")
				if request[0] != "HEAD" {
					a.Is(503, "shutting-down")
				}
			}
			w.Do("GET", "/livez", "", "").Is(200)
		}},
		{"AnswersWaitersAtOnceAndLetsTheAttemptFinish", func(t *testing.T) {
			w := setup(t, options{Background: true})
			req, first, release := payment.inFlight(w)
			async := payment.new(w.Client, "ok")
			gateway := w.Gateway.HoldBefore(payment.post, 1)
			accepted := async.from(w.Client, respondAsync).Is(202)
			gateway.Arrived()
			waiter := servicetest.Go(func() answer { return req.from(w.Client, "Prefer: wait=20") })
			other := servicetest.Go(func() answer { return async.from(w.Client, "Prefer: wait=20") })
			w.Eventually("both wait", func() bool {
				return w.Queries.Count("IdempotencyKeyGet") == 2 && w.Queries.Count("IdempotencyKeyPoll") > 0
			})
			w.API.Drain()
			w.Service.StopWaiting()
			// The gateway is still held, so it was not the answer that has ended their waiting.
			waiter().Is(409, "idempotency-in-progress").Has("Preference-Applied", "wait=20")
			other().Same(accepted).Replayed().Has("Preference-Applied", "wait=20")
			release()
			gateway.Release()
			first().Is(201).Fresh()
			require.NoError(t, w.Service.Drain(t.Context()))
			require.Zero(t, w.Rows("idempotency_keys WHERE state = 'in_progress'"))
		}},
		{"EndsWithTheServersShutdown", func(t *testing.T) {
			w := setup(t, options{Background: true})
			_, first, release := payment.inFlight(w)
			w.API.Drain()
			done := servicetest.Go(func() error { return w.Replica.Shutdown(context.Background()) })
			release()
			first().Is(201).Fresh()
			require.NoError(t, done())
			_, err := w.Try(t.Context(), http.MethodGet, "/livez", "", "")
			require.Error(t, err, "the port is closed")
		}},
	})
}
