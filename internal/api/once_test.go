package api_test

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"example.com/payments/internal/payments"
	"example.com/payments/internal/servicetest"
)

// What is promised for whatever moves money, CONTRACT §4 row by row: once for payments, once for refunds.

func TestPayment(t *testing.T) { t.Parallel(); facts(t, onceFacts(payment)) }
func TestRefund(t *testing.T)  { t.Parallel(); facts(t, onceFacts(refund)) }

func onceFacts(s story) []fact {
	return []fact{
		// Rows 1 to 3: the one answer.
		{"IsMadeOnceAndAnsweredWith201", s.isMadeOnce},
		{"DeclineIsAnsweredWith402AndItsReason", s.declineIs402},
		{"RepeatGetsTheSameBytes", s.repeatGetsTheSameBytes},
		{"RepeatIsAnsweredByAnotherReplicaAndAfterARestart", s.anyReplicaReplays},
		{"FiftyTwinsFromOneGateMakeOne", s.fiftyTwins},
		{"TwinsOfAnInstantGatewayMakeOneInEveryRound", s.instantTwins},
		{"TwinsOnTwoReplicasMakeOne", s.twinsOnTwoReplicas},

		// Rows 5 and 6: other requests under the key, and the same one too early.
		{"SameRequestInFlightIsAnsweredWith409AndTheLease", s.inFlightIs409},
		{"OtherRequestIsAnsweredWith422AlsoInFlight", s.otherRequestIs422},
		{"FormDoesNotMatterValuesDo", s.formDoesNotMatter},

		// Rows 13 and 14: a gateway that does not behave.
		{"UnclearOutcomeIsAnsweredWith504AndTheRepeatResumesAtOnce", s.unclearIs504},
		{"GatewayThatIsAwayIsAnsweredWith503NotCharged", s.gatewayAwayIs503},
		{"RefusalOfTheGatewayIsAnsweredWith503NotCharged", s.refusalIs503},
		{"NothingIsCalledNotChargedAfterAnUncertainAttempt", s.uncertainStaysUncertain},
		{"OneAttemptAsksAndFindsWhatAnUnclearAnswerHid", s.asksAfterUnclearAnswer},
		{"NonsenseOfTheGatewayIsNeverBelieved", s.nonsenseIsNotBelieved},

		// Row 15: closed with nothing charged. What the reaper does is in reaper_test.go.
		{"CancelMetByTheOwnAttemptIsAFresh402", s.ownAttemptMeetsTheCancel},

		// Row 20 to 23: attempts that end otherwise.
		{"PanicIsAnsweredWith500AndReleasesTheKey", s.panicIs500},
		{"ClientThatHangsUpChangesNothing", s.clientHangsUp},
		{"StaleKeyIsResumedAndTheGatewayAskedFirst", s.staleKeyIsResumed},
		{"OneOfManyRepeatsTakesAStaleKeyOver", s.oneTakesOver},
		{"LateFinisherAnswersWithWhatItsSuccessorStored", s.lateFinisher},
		{"LateFinisherOfAKeyInFlightIsAnsweredWith409", s.lateFinisherInFlight},
		{"LeaseIsRenewedForAsLongAsTheGatewayWorks", s.leaseIsRenewed},
	}
}

func (s story) isMadeOnce(t *testing.T) {
	w := setup(t, options{})
	req := s.new(w.Client, "ok")
	before := time.Now()
	a := req.from(w.Client).Is(201).Fresh().Has("Idempotency-Key", quoted(req.key)).
		Has("Original-Request-Id", "").Has("Preference-Applied", "").Says("status", "succeeded").Says("gateway_reference", s.ledger(w)[0].ID)
	a.Has("Location", s.path(a))
	require.WithinDuration(t, before.Add(servicetest.Day), a.HTTPDate("Idempotency-Expires"), time.Minute)

	id, err := uuid.Parse(s.id(a))
	require.NoError(t, err)
	require.Equal(t, uuid.Version(7), id.Version())
	created, err := time.Parse(time.RFC3339Nano, a.Member("created_at"))
	require.NoError(t, err)
	require.True(t, strings.HasSuffix(a.Member("created_at"), "Z"))
	require.WithinDuration(t, before, created, time.Minute)

	got := w.Do("GET", s.path(a), "", "").Is(200).Has("Content-Type", "application/json")
	require.JSONEq(t, string(a.Body), string(got.Body))
	s.once(t, w)
}

func (s story) declineIs402(t *testing.T) {
	w := setup(t, options{})
	req := s.new(w.Client, "insufficient_funds")
	a := req.from(w.Client).Is(402, s.name+"-declined").Fresh().Says("decline_code", "insufficient_funds")
	a.Has("Location", s.path(a)).Has("Idempotency-Key", quoted(req.key)).Has("Retry-After", "")
	require.NotEmpty(t, a.Header.Get("Idempotency-Expires"))
	require.Equal(t, "declined", s.status(w.Client, a))
	s.once(t, w)
}

func (s story) repeatGetsTheSameBytes(t *testing.T) {
	w := setup(t, options{})
	for _, token := range []string{"ok", "declined"} {
		req := s.new(w.Client, token)
		first := req.from(w.Client).Fresh()
		calls := w.Gateway.Calls(s.post)
		repeat := req.from(w.Client).Same(first).Replayed().
			Has("Idempotency-Key", quoted(req.key)).
			Has("Idempotency-Expires", first.Header.Get("Idempotency-Expires")).
			Has("Original-Request-Id", first.Header.Get("X-Request-Id"))
		require.NotEqual(t, first.Header.Get("X-Request-Id"), repeat.Header.Get("X-Request-Id"))
		require.NotEmpty(t, repeat.Header.Get("Date"))
		if first.Status == 402 {
			repeat.Says("instance", first.Header.Get("X-Request-Id"))
		}
		require.Equal(t, calls, w.Gateway.Calls(s.post))
	}
}

func (s story) anyReplicaReplays(t *testing.T) {
	w := setup(t, options{})
	req := s.new(w.Client, "ok")
	first := req.from(w.Client).Is(201)
	other := w.NewReplica(options{})
	w.Replica.Stop()
	req.from(other.As(w.Merchant)).Same(first).Replayed()
}

func (s story) fiftyTwins(t *testing.T) {
	w := setup(t, options{Latency: 800 * time.Millisecond})
	req := s.new(w.Client, "ok")
	require.NoError(t, onceAmongTwins(servicetest.Race(50, func(int) answer { return req.from(w.Client) })))
	require.Equal(t, 1, w.Gateway.Calls(s.post))
	require.Len(t, s.ledger(w), 1)
	s.once(t, w)
}

func (s story) instantTwins(t *testing.T) {
	w := setup(t, options{})
	rounds := 200
	if s.name == "refund" {
		rounds = 50 // its claim is another statement, its rivals are the same
	}
	orders := w.NewOrders(rounds)
	servicetest.Rounds(t, rounds, func(i int) error {
		req := request{"/v1/payments", w.NewKey(), servicetest.PayBody(orders[i], "pm_ok")}
		if s.name == "refund" {
			req = request{"/v1/payments/" + req.from(w.Client).Member("id") + "/refunds", w.NewKey(), "{}"}
		}
		return onceAmongTwins(servicetest.Race(4, func(int) answer { return req.from(w.Client) }))
	})
	require.Equal(t, rounds, w.Rows(s.table))
	require.Equal(t, rounds, w.Gateway.Calls(s.post))
}

func (s story) twinsOnTwoReplicas(t *testing.T) {
	w := setup(t, options{})
	clients := []*client{w.Client, w.NewReplica(options{}).As(w.Merchant)}
	req := s.new(w.Client, "ok")
	require.NoError(t, onceAmongTwins(servicetest.Race(20, func(i int) answer { return req.from(clients[i%2]) })))
	s.once(t, w)
}

func (s story) inFlightIs409(t *testing.T) {
	w := setup(t, options{LeaseTTL: time.Minute})
	req := s.new(w.Client, "ok")
	gateway := w.Gateway.HoldBefore(s.post, 1)
	first := servicetest.Go(func() answer { return req.from(w.Client) })
	gateway.Arrived()

	repeat := s.tellsTheLease(t, w, req).Has("Link", `</docs/idempotency>; rel="describedby"`).
		Has("Idempotency-Key", quoted(req.key)).Has("Idempotent-Replayed", "").Has("Idempotency-Expires", "")
	repeat.Has("Location", s.path(repeat))
	require.Equal(t, "processing", s.status(w.Client, repeat))
	got := w.Do("GET", s.path(repeat), "", "").Says("gateway_reference", "")
	repeat.Says("started_at", got.Member("created_at"))
	req.from(w.Client, "Prefer: respond-async").Is(409, "idempotency-in-progress").Has("Preference-Applied", "")

	w.MoveBack(req.key, 20*time.Second)
	s.tellsTheLease(t, w, req)

	gateway.Release()
	require.Equal(t, s.id(repeat), s.id(first().Is(201).Fresh()))
}

// tellsTheLease repeats a request in flight and holds Retry-After against the time that is left of the holder's lease.
func (s story) tellsTheLease(t *testing.T, w *world, req request) answer {
	t.Helper()
	most := w.Key(req.key).LeaseLeft
	a := req.from(w.Client).Is(409, "idempotency-in-progress")
	least := w.Key(req.key).LeaseLeft
	seconds, err := strconv.Atoi(a.Header.Get("Retry-After"))
	require.NoError(t, err)
	require.GreaterOrEqual(t, float64(seconds), math.Ceil(least.Seconds()))
	require.LessOrEqual(t, float64(seconds), math.Ceil(most.Seconds()))
	return a
}

func (s story) otherRequestIs422(t *testing.T) {
	w := setup(t, options{})
	req := s.new(w.Client, "ok")
	other := request{req.path, req.key, s.changed(req.body)}
	reused := func() {
		a := other.from(w.Client).Is(422, "idempotency-key-reused").
			Has("Link", `</docs/idempotency>; rel="describedby"`).Has("Idempotency-Key", quoted(req.key)).Has("Location", "")
		require.NotContains(t, a.String(), s.resources, "it never shows what is stored")
	}
	gateway := w.Gateway.HoldBefore(s.post, 1)
	first := servicetest.Go(func() answer { return req.from(w.Client) })
	gateway.Arrived()
	reused()
	w.ExpireLease(req.key)
	reused()
	require.Equal(t, 1, w.Key(req.key).Attempt)
	gateway.Release()
	original := first().Is(201)
	reused()
	req.from(w.Client).Same(original)
	s.once(t, w)
}

func (s story) formDoesNotMatter(t *testing.T) {
	w := setup(t, options{})
	req := s.new(w.Client, "ok")
	first := req.from(w.Client).Is(201)
	spaced := strings.NewReplacer(":", " : ", ",", "\n,\t", "{", "\r\n{ ").Replace(req.body)
	escaped := strings.Replace(req.body, "amount", `\u0061moun\u0074`, 1)
	reversed := "{" + strings.Join(reversedMembers(req.body), ",") + "}"
	for _, body := range []string{spaced, escaped, reversed} {
		request{req.path, req.key, body}.from(w.Client).Same(first).Replayed()
	}
	for _, key := range []string{`"` + req.key + `"`, `"` + req.key + `";a=1`, "  " + req.key + "  "} {
		request{req.path, key, req.body}.from(w.Client).Same(first).Replayed().Has("Idempotency-Key", quoted(req.key))
	}
	req.from(w.Client, "Prefer: respond-async, wait=1").Same(first).Replayed()
	request{req.path, strings.ToUpper(req.key), s.changed(req.body)}.from(w.Client) // another key
	require.True(t, w.HasKey(strings.ToUpper(req.key)) || s.name == "payment", "keys are case-sensitive")
}

// reversedMembers are the members of a flat object without commas in its values, last first.
func reversedMembers(body string) []string {
	members := strings.Split(strings.Trim(body, "{}"), ",")
	for i, j := 0, len(members)-1; i < j; i, j = i+1, j-1 {
		members[i], members[j] = members[j], members[i]
	}
	return members
}

func (s story) unclearIs504(t *testing.T) {
	w := setup(t, options{GatewayTimeout: 500 * time.Millisecond})
	healthy := w.NewReplica(options{}).As(w.Merchant)
	req := s.new(healthy, "ok")
	// The gateway takes the money, says nothing, and can not be asked.
	w.Gateway.On(s.post, servicetest.Always, servicetest.After(servicetest.Silent))
	asks := w.Gateway.On(s.get, servicetest.Always, servicetest.Answers(502, "<html>"))
	a := req.from(w.Client).Is(504, "gateway-timeout").Has("Retry-After", "1").Has("Idempotency-Key", quoted(req.key)).
		Has("Idempotent-Replayed", "").Says("outcome", "unknown").Says("retry", "same-key")
	a.Has("Location", s.path(a))
	require.Equal(t, "processing", s.status(healthy, a))

	key := w.Key(req.key)
	require.Nil(t, key.LeaseID, "it is released")
	require.True(t, key.OutcomeUncertain)
	require.Nil(t, key.AnswerStatus, "5xx is never stored")

	// The repeat need not wait for the lease, and sends nothing: the gateway knows.
	asks()
	sent := w.Gateway.Calls(s.post)
	final := req.from(healthy).Is(201).Fresh()
	require.Equal(t, s.id(a), s.id(final))
	require.Equal(t, sent, w.Gateway.Calls(s.post))
	require.Equal(t, 2, w.Key(req.key).Attempt)
	s.once(t, w)
}

func (s story) gatewayAwayIs503(t *testing.T) {
	w := setup(t, options{})
	req := s.new(w.Client, "ok")
	w.Gateway.Down()
	first := req.from(w.Client).Is(503, "gateway-unavailable").Has("Retry-After", "1").Has("Idempotency-Key", quoted(req.key)).
		Has("Idempotent-Replayed", "").Says("outcome", "not-charged").Says("retry", "same-key")
	first.Has("Location", s.path(first))
	require.False(t, w.Key(req.key).OutcomeUncertain)
	again := req.from(w.NewReplica(options{GatewayTimeout: 300 * time.Millisecond}).As(w.Merchant)).
		Is(503, "gateway-unavailable").Says("outcome", "not-charged")
	w.Gateway.Up()
	final := req.from(w.Client).Is(201).Fresh()
	require.Equal(t, s.id(first), s.id(again))
	require.Equal(t, s.id(first), s.id(final))
	s.once(t, w)
}

func (s story) refusalIs503(t *testing.T) {
	w := setup(t, options{})
	for _, status := range []int{500, 503} {
		req := s.new(w.Client, "ok")
		refuses := w.Gateway.On(s.post, servicetest.Always, servicetest.Answers(status, `{"error":"unavailable"}`))
		asked := w.Gateway.Calls(s.get)
		first := req.from(w.Client).Is(503, "gateway-unavailable").Says("outcome", "not-charged")
		require.Positive(t, w.Gateway.Calls(s.get)-asked, "it is not charged because the gateway says so when it is asked")
		refuses()
		require.Equal(t, s.id(first), s.id(req.from(w.Client).Is(201).Fresh()))
	}
	// A refusal alone says little: without the gateway's word that it has never seen the intent, the outcome is unknown.
	req := s.new(w.Client, "ok")
	w.Gateway.On(s.post, servicetest.Always, servicetest.Answers(503, `{"error":"unavailable"}`))
	w.Gateway.On(s.get, servicetest.Always, servicetest.Cuts)
	req.from(w.NewReplica(options{GatewayTimeout: 300 * time.Millisecond}).As(w.Merchant)).Is(504, "gateway-timeout")
}

func (s story) uncertainStaysUncertain(t *testing.T) {
	w := setup(t, options{GatewayTimeout: 500 * time.Millisecond})
	healthy := w.NewReplica(options{}).As(w.Merchant)
	req := s.new(healthy, "ok")
	// The request may still be under way in the network when the gateway is asked about it.
	unclear := w.Gateway.On(s.post, servicetest.Always, servicetest.Answers(502, "<html>"))
	first := req.from(w.Client).Is(504, "gateway-timeout")
	unclear()
	w.Gateway.On(s.post, servicetest.Always, servicetest.Answers(500, `{"error":"internal_error"}`))
	second := req.from(healthy).Is(504, "gateway-timeout").Says("outcome", "unknown")
	w.Gateway.Down()
	third := req.from(w.Client).Is(504, "gateway-timeout").Says("outcome", "unknown")
	require.Equal(t, s.id(first), s.id(second))
	require.Equal(t, s.id(first), s.id(third))
	w.Gateway.Up()
	require.True(t, w.Key(req.key).OutcomeUncertain)
}

func (s story) asksAfterUnclearAnswer(t *testing.T) {
	w := setup(t, options{GatewayTimeout: 4 * time.Second})
	for _, token := range []string{"error_after", "drop_after", "hang_after"} {
		s.new(w.Client, token).from(w.Client).Is(201).Fresh()
	}
	for name, handler := range map[string]servicetest.Handler{
		"html":    servicetest.After(servicetest.Answers(502, "<html>")),
		"cut":     servicetest.Cuts,
		"garbage": servicetest.After(servicetest.Answers(200, `{"status":"approved"}`)),
	} {
		w.Gateway.On(s.post, 1, handler)
		a := s.new(w.Client, "ok").from(w.Client)
		require.Equal(t, 201, a.Status, name)
	}
	require.Len(t, s.ledger(w), 6)
	s.new(w.Client, "error_before").from(w.Client).Is(503, "gateway-unavailable").Says("outcome", "not-charged")
}

func (s story) nonsenseIsNotBelieved(t *testing.T) {
	w := setup(t, options{})
	impatient := w.NewReplica(options{GatewayTimeout: time.Second}).As(w.Merchant)
	otherKey := strings.Repeat("0", 64)
	for _, says := range []servicetest.Handler{
		servicetest.Answers(200, fmt.Sprintf(`{"id":"x_1","key":%q,"status":"approved","amount":1999,"currency":"EUR"}`, otherKey)),
		servicetest.Answers(200, `{"data":[]}`),
		servicetest.Answers(200, ""),
		servicetest.Answers(404, "<html>"),
		servicetest.Answers(301, ""),
		servicetest.Answers(503, "<html>upstream"),
		servicetest.Cuts,
	} {
		req := s.new(w.Client, "ok")
		off := []func(){w.Gateway.On(s.post, servicetest.Always, says), w.Gateway.On(s.get, servicetest.Always, says)}
		a := req.from(impatient).Is(504, "gateway-timeout").Says("outcome", "unknown")
		for _, f := range off {
			f()
		}
		require.Equal(t, s.id(a), s.id(req.from(w.Client).Is(201).Fresh()))
	}
}

func (s story) ownAttemptMeetsTheCancel(t *testing.T) {
	w := setup(t, options{})
	req := s.leaveBehind(w, "ok", false)
	s.cancelAtGateway(w, req)
	a := req.from(w.Client).Is(402, s.name+"-failed").Fresh().Says("outcome", "not-charged").Says("retry", "new-key")
	a.Has("Location", s.path(a)).Has("Idempotency-Key", quoted(req.key))
	require.Equal(t, "failed", s.status(w.Client, a))
	w.Do("GET", s.path(a), "", "").Says("failure_code", "never_charged").Says("gateway_reference", "")
	require.Equal(t, "failed", w.Key(req.key).State)
	req.from(w.Client).Same(a).Replayed()
	require.Empty(t, s.ledger(w))
}

func (s story) panicIs500(t *testing.T) {
	w := setup(t, options{})
	panics := w.NewReplica(options{Gateway: func(real payments.Gateway) payments.Gateway {
		return servicetest.Scripted{Gateway: real, OnCharge: func(context.Context, payments.Intent) (payments.Outcome, error) {
			panic("the secret word is xyzzy")
		}}
	}})
	req := s.new(w.Client, "ok")
	a := req.from(panics.As(w.Merchant)).Is(500, "internal-error").Says("outcome", "unknown").Says("retry", "same-key").
		Has("Idempotent-Replayed", "")
	require.NotEmpty(t, s.id(a))
	require.NotContains(t, a.String(), "xyzzy")
	require.Contains(t, panics.Log.String(), "xyzzy", "the log gets everything")
	require.Nil(t, w.Key(req.key).LeaseID, "it is released")
	require.Equal(t, s.id(a), s.id(req.from(w.Client).Is(201).Fresh()))

	// One that has lost its lease says nothing of its own.
	arrived, goOn := make(chan struct{}), make(chan struct{})
	late := w.NewReplica(options{Gateway: func(real payments.Gateway) payments.Gateway {
		return servicetest.Scripted{Gateway: real, OnCharge: func(context.Context, payments.Intent) (payments.Outcome, error) {
			close(arrived)
			<-goOn
			panic("too late")
		}}
	}}).As(w.Merchant)
	req = s.new(w.Client, "ok")
	first := servicetest.Go(func() answer { return req.from(late) })
	<-arrived
	w.ExpireLease(req.key)
	second := req.from(w.Client).Is(201).Fresh()
	close(goOn)
	first().Same(second).Replayed()
}

func (s story) clientHangsUp(t *testing.T) {
	w := setup(t, options{})
	req := s.new(w.Client, "ok")
	gateway := w.Gateway.HoldBefore(s.post, 1)
	ctx, hangUp := context.WithCancel(t.Context())
	gone := servicetest.Go(func() error {
		_, err := w.Try(ctx, "POST", req.path, req.key, req.body)
		return err
	})
	gateway.Arrived()
	hangUp()
	require.ErrorIs(t, gone(), context.Canceled)
	// Also during a drain, which waits for it.
	w.API.Drain()
	gateway.Release()
	require.NoError(t, w.Service.Drain(t.Context()))
	require.Equal(t, "done", w.Key(req.key).State)
	req.from(w.NewReplica(options{}).As(w.Merchant)).Is(201).Replayed()
	s.once(t, w)
}

func (s story) staleKeyIsResumed(t *testing.T) {
	w := setup(t, options{})
	for _, charged := range []bool{true, false} {
		req := s.leaveBehind(w, "ok", charged)
		id := w.Key(req.key).ResourceID.String()
		asked, sent := w.Gateway.Calls(s.get), w.Gateway.Calls(s.post)
		a := req.from(w.Client).Is(201).Fresh()
		require.Equal(t, id, s.id(a))
		require.Equal(t, 1, w.Gateway.Calls(s.get)-asked, "the gateway is asked first")
		if charged {
			require.Equal(t, sent, w.Gateway.Calls(s.post), "and nothing is sent when it knows")
		} else {
			require.Equal(t, 1, w.Gateway.Calls(s.post)-sent)
		}
		key := w.Key(req.key)
		require.Equal(t, 2, key.Attempt)
		require.Equal(t, a.Header.Get("X-Request-Id"), key.RequestID)
		req.from(w.Client).Same(a).Replayed()
	}
	// A lease that has not ended is respected, dead or not.
	req := s.new(w.Client, "ok")
	dead := w.NewReplica(options{Gateway: servicetest.Dies(true)})
	_, err := dead.As(w.Merchant).Try(t.Context(), "POST", req.path, req.key, req.body)
	require.Error(t, err)
	req.from(w.Client).Is(409, "idempotency-in-progress")
}

func (s story) oneTakesOver(t *testing.T) {
	w := setup(t, options{})
	clients := []*client{w.Client, w.NewReplica(options{}).As(w.Merchant)}
	for range 10 {
		req := s.leaveBehind(w, "ok", false)
		require.NoError(t, onceAmongTwins(servicetest.Race(8, func(i int) answer { return req.from(clients[i%2]) })))
		require.Equal(t, 2, w.Key(req.key).Attempt)
	}
	require.Len(t, s.ledger(w), 10)
}

// lateEndings are what an attempt would say if it had not lost its lease.
var lateEndings = map[string]func(context.Context, payments.Gateway, payments.Intent) (payments.Outcome, error){
	"201": func(ctx context.Context, real payments.Gateway, intent payments.Intent) (payments.Outcome, error) {
		return real.Charge(ctx, intent)
	},
	"402": func(context.Context, payments.Gateway, payments.Intent) (payments.Outcome, error) {
		return payments.Outcome{Status: payments.OutcomeDeclined, Reference: "late", DeclineCode: "late"}, nil
	},
	"402 failed": func(context.Context, payments.Gateway, payments.Intent) (payments.Outcome, error) {
		return payments.Outcome{Status: payments.OutcomeCanceled}, nil
	},
	"503": func(context.Context, payments.Gateway, payments.Intent) (payments.Outcome, error) {
		return payments.Outcome{}, payments.ErrNotSent
	},
	"504": func(context.Context, payments.Gateway, payments.Intent) (payments.Outcome, error) {
		return payments.Outcome{}, payments.ErrUnclear
	},
}

// late is a replica that stands still at the gateway until goOn, and then ends as told.
func (s story) late(w *world, ending string) (c *client, arrived <-chan struct{}, goOn func()) {
	there, wake := make(chan struct{}, 1), make(chan struct{})
	r := w.NewReplica(options{GatewayTimeout: time.Second, Gateway: func(real payments.Gateway) payments.Gateway {
		return servicetest.Scripted{
			Gateway: real,
			OnCharge: func(_ context.Context, intent payments.Intent) (payments.Outcome, error) {
				select {
				case there <- struct{}{}:
				default:
				}
				<-wake
				return lateEndings[ending](context.Background(), real, intent)
			},
			OnLookUp: func(context.Context, payments.Intent) (payments.Outcome, error) {
				return payments.Outcome{}, payments.ErrUnclear
			},
		}
	}})
	return r.As(w.Merchant), there, func() { close(wake) }
}

func (s story) lateFinisher(t *testing.T) {
	w := setup(t, options{})
	for ending := range lateEndings {
		late, arrived, goOn := s.late(w, ending)
		req := s.new(w.Client, "ok")
		first := servicetest.Go(func() answer { return req.from(late) })
		<-arrived
		w.ExpireLease(req.key)
		second := req.from(w.Client).Is(201).Fresh()
		goOn()
		first().Same(second).Replayed().Has("Original-Request-Id", second.Header.Get("X-Request-Id"))
		require.Equal(t, 2, w.Key(req.key).Attempt, ending)
	}
	require.Len(t, s.ledger(w), len(lateEndings))
}

func (s story) lateFinisherInFlight(t *testing.T) {
	w := setup(t, options{})
	for ending := range lateEndings {
		late, arrived, goOn := s.late(w, ending)
		req := s.new(w.Client, "ok")
		first := servicetest.Go(func() answer { return req.from(late) })
		<-arrived
		w.ExpireLease(req.key)
		gateway := w.Gateway.HoldAfter(s.get, 1)
		second := servicetest.Go(func() answer { return req.from(w.Client) })
		gateway.Arrived()
		goOn()
		first().Is(409, "idempotency-in-progress")
		key := w.Key(req.key)
		require.Equal(t, "in_progress", key.State)
		require.NotNil(t, key.LeaseID, "the late one has released nothing")
		gateway.Release()
		second().Is(201).Fresh()
	}
}

func (s story) leaseIsRenewed(t *testing.T) {
	w := setup(t, options{LeaseTTL: 1500 * time.Millisecond, Background: true})
	req := s.new(w.Client, "ok")
	gateway := w.Gateway.HoldBefore(s.post, 1)
	first := servicetest.Go(func() answer { return req.from(w.Client) })
	gateway.Arrived()
	claimed := w.Key(req.key)
	// By now the lease of the claim would have ended.
	w.Eventually("the lease has been renewed until after its first end", func() bool {
		return w.Rows("idempotency_keys WHERE key = $1 AND clock_timestamp() > created_at + $2::interval", req.key, 1600*time.Millisecond) == 1
	})
	require.Positive(t, w.Queries.Count("IdempotencyKeyRenew"))
	req.from(w.Client).Is(409, "idempotency-in-progress")
	key := w.Key(req.key)
	require.Equal(t, 1, key.Attempt)
	require.Equal(t, claimed.LeaseID, key.LeaseID)
	require.Positive(t, key.LeaseLeft)
	gateway.Release()
	first().Is(201).Fresh()

	// What has ended is not renewed any more.
	w.Queries.Since()
	s.new(w.Client, "ok").from(w.Client).Is(201)
	require.Zero(t, w.Queries.Count("IdempotencyKeyRenew"))
}
