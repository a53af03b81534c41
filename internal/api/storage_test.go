package api_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"example.com/payments/internal/servicetest"
)

// What becomes of a request when the database goes away, comes back, or loses an answer.

func TestPaymentWithoutADatabase(t *testing.T) { t.Parallel(); facts(t, storageFacts(payment)) }
func TestRefundWithoutADatabase(t *testing.T)  { t.Parallel(); facts(t, storageFacts(refund)) }

func storageFacts(s story) []fact {
	return []fact{
		{"DatabaseAwayBeforeTheClaimIs503AndTheGatewayIsNotCalled", s.databaseAwayBeforeClaim},
		{"NoConnectionWithinTheLimitIs503AndTheGatewayIsNotCalled", s.noConnection},
		{"RecordIsTriedAgainUntilTheDatabaseIsBack", s.recordIsTriedAgain},
		{"RecordOutlivesTheEndOfItsSession", s.recordOutlivesItsSession},
		{"LeaseIsRenewedWhileTheRecordIsTriedAgain", s.recordKeepsItsLease},
		{"DatabaseAwayAtTheRecordIs503UnknownAfterFiveSeconds", s.databaseAwayAtRecord},
		{"RecordsLeaveConnectionsToEverybodyElse", s.recordsLeaveConnections},
		{"LostAnswerToTheClaimIsNoLostClaim", s.lostAnswerToClaim},
		{"LostAnswerToTheRecordIsNoLostRecord", s.lostAnswerToRecord},
		{"LostAnswerToTheReleaseIsNoLostRelease", s.lostAnswerToRelease},
		{"LostAnswerToTheTakeOverIsNoLostTakeOver", s.lostAnswerToTakeOver},
	}
}

func (s story) databaseAwayBeforeClaim(t *testing.T) {
	w := setup(t, options{Link: true})
	req := s.new(w.Client, "ok")
	sent := w.Gateway.Calls(s.post)
	w.Link.Cut()
	req.from(w.Client).Is(503, "storage-unavailable").Has("Retry-After", "1").Has("Location", "").
		Says(s.member, "").Says("outcome", "")
	w.Do("GET", "/readyz", "", "").Is(503, "storage-unavailable")
	w.Do("GET", "/livez", "", "").Is(200)
	require.Equal(t, sent, w.Gateway.Calls(s.post))
	w.Link.Restore()
	require.False(t, w.HasKey(req.key))
	w.Do("GET", "/readyz", "", "").Is(200)
	req.from(w.Client).Is(201).Fresh()
}

func (s story) noConnection(t *testing.T) {
	w := setup(t, options{})
	req := s.new(w.Client, "ok")
	// A pool of one, and somebody has it.
	narrow := w.NewReplica(options{DBMaxConns: 2, AcquireTimeout: 2 * time.Second})
	c := narrow.As(w.Merchant)
	c.Do("GET", "/v1/orders", "", "").Is(200)
	taken := narrow.Queries.HoldBefore("OrderList", 1)
	other := servicetest.Go(func() answer { return c.Do("GET", "/v1/orders", "", "") })
	taken.Arrived()
	sent := w.Gateway.Calls(s.post)
	req.from(c).Is(503, "storage-unavailable").Says(s.member, "")
	require.Equal(t, sent, w.Gateway.Calls(s.post))
	require.False(t, w.HasKey(req.key))
	taken.Release()
	other().Is(200)
	req.from(c).Is(201).Fresh()
}

func (s story) recordIsTriedAgain(t *testing.T) {
	w := setup(t, options{Link: true})
	req := s.new(w.Client, "ok")
	gateway := w.Gateway.HoldAfter(s.post, 1)
	first := servicetest.Go(func() answer { return req.from(w.Client) })
	gateway.Arrived()
	w.Link.Cut()
	gateway.Release()
	// The record has been tried, and has failed, when the connection that it has dialled is refused.
	w.Link.AwaitRefusal()
	w.Link.Restore()
	a := first().Is(201).Fresh()
	req.from(w.Client).Same(a).Replayed()
	s.once(t, w)
}

func (s story) recordOutlivesItsSession(t *testing.T) {
	w := setup(t, options{})
	req := s.new(w.Client, "ok")
	gateway := w.Gateway.HoldAfter(s.post, 1)
	first := servicetest.Go(func() answer { return req.from(w.Client) })
	gateway.Arrived()
	// Keep the record from its end until its session is ended.
	tx, err := w.DB.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM idempotency_keys WHERE key = $1 FOR UPDATE", req.key)
	require.NoError(t, err)
	gateway.Release()
	w.Eventually("the record waits for the lock", func() bool {
		return w.Rows("pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'") > 0
	})
	w.TerminateSessions()
	require.NoError(t, tx.Rollback(t.Context()))
	a := first().Is(201).Fresh()
	req.from(w.Client).Same(a).Replayed()
	s.once(t, w)
}

func (s story) recordKeepsItsLease(t *testing.T) {
	w := setup(t, options{LeaseTTL: 1500 * time.Millisecond, Background: true})
	req := s.new(w.Client, "ok")
	// A lock that cannot be had: the record is refused for now, and nothing else is.
	mend := w.Breaks("INSERT", "events", "55P03")
	first := servicetest.Go(func() answer { return req.from(w.Client) })
	w.Eventually("the lease of the claim would have ended", func() bool {
		return w.Rows("idempotency_keys WHERE key = $1 AND clock_timestamp() > created_at + $2::interval", req.key, 1600*time.Millisecond) == 1
	})
	req.from(w.Client).Is(409, "idempotency-in-progress")
	require.Greater(t, w.Queries.Count(s.statement("Record")), 1)
	mend()
	first().Is(201).Fresh()
	require.Equal(t, 1, w.Key(req.key).Attempt)
}

func (s story) databaseAwayAtRecord(t *testing.T) {
	w := setup(t, options{Link: true})
	req := s.new(w.Client, "ok")
	gateway := w.Gateway.HoldAfter(s.post, 1)
	first := servicetest.Go(func() answer { return req.from(w.Client) })
	gateway.Arrived()
	w.Link.Cut()
	gateway.Release()
	a := first().Is(503, "storage-unavailable").Has("Retry-After", "1").Says("outcome", "unknown").Says("retry", "same-key")
	a.Has("Location", s.path(a)).Has("Idempotent-Replayed", "")
	w.Link.Restore()
	key := w.Key(req.key)
	require.Equal(t, "in_progress", key.State)
	require.True(t, key.OutcomeUncertain)
	w.ExpireLease(req.key)
	require.Equal(t, s.id(a), s.id(req.from(w.Client).Is(201).Fresh()))
	s.once(t, w)
}

// statement is the name of one of the story's own statements in db/queries.
func (s story) statement(verb string) string {
	if s.name == "refund" {
		return "Refund" + verb
	}
	return "Payment" + verb
}

func (s story) lostAnswerToClaim(t *testing.T) {
	w := setup(t, options{Link: true})
	req := s.new(w.Client, "ok")
	w.Link.LoseAnswer(w.Replica, s.statement("Claim"))
	a := req.from(w.Client).Is(201).Fresh()
	require.Equal(t, 1, w.Key(req.key).Attempt)
	req.from(w.Client).Same(a).Replayed()
	s.once(t, w)

	// The same with a body that leaves something to be found out by the claim.
	if s.name == "refund" {
		req := s.new(w.Client, "ok")
		req.body = "{}"
		w.Link.LoseAnswer(w.Replica, s.statement("Claim"))
		req.from(w.Client).Is(201).Fresh().Says("amount", "1999").Says("currency", "EUR")
	}
	// And one that goes on in the background.
	req = s.new(w.Client, "ok")
	w.Link.LoseAnswer(w.Replica, s.statement("Claim"))
	accepted := req.from(w.Client, "Prefer: respond-async").Is(202).Fresh()
	require.NoError(t, w.Service.Drain(t.Context()))
	require.Equal(t, "succeeded", s.status(w.Client, accepted))
}

func (s story) lostAnswerToRecord(t *testing.T) {
	w := setup(t, options{Link: true})
	req := s.new(w.Client, "ok")
	w.Link.LoseAnswer(w.Replica, s.statement("Record"))
	a := req.from(w.Client).Is(201).Fresh().Has("Original-Request-Id", "")
	require.NotEmpty(t, a.Header.Get("Idempotency-Expires"))
	req.from(w.Client).Same(a).Replayed().Has("Idempotency-Expires", a.Header.Get("Idempotency-Expires"))
	s.once(t, w)
}

func (s story) lostAnswerToRelease(t *testing.T) {
	w := setup(t, options{Link: true})
	req := s.new(w.Client, "ok")
	w.Gateway.Down()
	w.Link.LoseAnswer(w.Replica, "IdempotencyKeyRelease")
	a := req.from(w.Client).Is(503, "gateway-unavailable").Says("outcome", "not-charged")
	w.Gateway.Up()
	require.Equal(t, s.id(a), s.id(req.from(w.Client).Is(201).Fresh()))
	s.once(t, w)
}

func (s story) lostAnswerToTakeOver(t *testing.T) {
	w := setup(t, options{Link: true})
	for _, charged := range []bool{true, false} {
		req := s.leaveBehind(w, "ok", charged)
		w.Link.LoseAnswer(w.Replica, "IdempotencyKeyTakeOver")
		a := req.from(w.Client).Is(201).Fresh()
		require.Equal(t, 2, w.Key(req.key).Attempt)
		req.from(w.Client).Same(a).Replayed()
	}
	require.Len(t, s.ledger(w), 2)
}

// Of a pool of nine, seven are for records.
func (s story) recordsLeaveConnections(t *testing.T) {
	const turns, n = 7, 12
	w := setup(t, options{DBMaxConns: 10, AcquireTimeout: 2 * time.Second})
	requests := make([]request, n)
	for i := range requests {
		requests[i] = s.new(w.Client, "ok")
	}
	gateway := w.Gateway.HoldBefore(s.post, n)
	answers := servicetest.Go(func() []answer {
		return servicetest.Race(n, func(i int) answer { return requests[i].from(w.Client) })
	})
	for range n {
		gateway.Arrived()
	}
	record := w.Queries.HoldBefore(s.statement("Record"), n)
	gateway.Release()
	for range turns {
		record.Arrived()
	}
	w.Do("GET", "/v1/orders", "", "").Is(200)
	require.Equal(t, turns, w.Queries.Count(s.statement("Record"))-w.Queries.Ended(s.statement("Record")), "the others wait for their turn")
	record.Release()
	for _, a := range answers() {
		a.Is(201).Fresh()
	}
}
