package main

import (
	"context"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// crash is a moment at which a process of the service is killed with -9.
type crash struct {
	name string
	// happen lets the service take the payment until the moment has come, and kills it.
	happen func(t *testing.T, b *testBundle, s *service, i intent)
	left   row // what the database has then
	// What becomes of the payment when its client comes back, and when nobody does.
	returned, alone string
}

const (
	succeeded = "succeeded"
	failed    = "failed"
)

var (
	nothing    = row{}
	inProgress = row{key: "in_progress", payment: "processing", order: "open", attempt: 1}
	isPaid     = row{key: "done", payment: succeeded, order: "paid", attempt: 1, events: 1}
)

// crashes are the rows of the table in DESIGN §5.
var crashes = []crash{
	{"BeforeTheClaimCommits", killedBeforeTheClaimCommits, nothing, succeeded, ""},
	{"BetweenTheClaimAndItsCommit", killedBetweenTheClaimAndItsCommit, inProgress, succeeded, failed},
	{"AfterTheClaim", killedAfterTheClaim, inProgress, succeeded, failed},
	{"AfterTheCharge", killedAfterTheCharge, inProgress, succeeded, succeeded},
	{"AfterTheRecord", killedAfterTheRecord, isPaid, succeeded, succeeded},
	{"AfterTheReapersCancel", killedAfterTheReapersCancel, inProgress, failed, failed},
}

// lockOrder makes every claim on the order wait until the transaction ends.
func lockOrder(t *testing.T, b *testBundle, i intent) pgx.Tx {
	t.Helper()
	return lock(t, b, "SELECT FROM orders WHERE id = $1 FOR UPDATE", i.orderID)
}

// lock keeps what the statement locks until it is rolled back, at the end of the test at the latest: the pool waits for its connection.
func lock(t *testing.T, b *testBundle, sql string, args ...any) pgx.Tx {
	t.Helper()
	tx, err := b.pool.Begin(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	_, err = tx.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
	return tx
}

// awaitLockWait returns when a session of the service waits for a lock.
func awaitLockWait(t *testing.T, b *testBundle) (pid int) {
	t.Helper()
	eventually(t, "a statement of the service waits for a lock", func() bool {
		return b.pool.QueryRow(t.Context(), `
			SELECT pid FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'payments' AND wait_event_type = 'Lock'`).Scan(&pid) == nil
	})
	return pid
}

func killedBeforeTheClaimCommits(t *testing.T, b *testBundle, s *service, i intent) {
	lock := lockOrder(t, b, i)
	b.startPaying(t.Context(), t, s, i)
	pid := awaitLockWait(t, b)
	s.kill(t)
	// PostgreSQL would not notice before it answers.
	_, err := b.pool.Exec(t.Context(), "SELECT pg_terminate_backend($1, 5000)", pid)
	require.NoError(t, err)
	require.NoError(t, lock.Rollback(t.Context()))
}

// The claim is on its way when its process dies, and commits all the same.
func killedBetweenTheClaimAndItsCommit(t *testing.T, b *testBundle, s *service, i intent) {
	lock := lockOrder(t, b, i)
	b.startPaying(t.Context(), t, s, i)
	awaitLockWait(t, b)
	s.kill(t)
	require.NoError(t, lock.Rollback(t.Context()))
	eventually(t, "the claim has committed", func() bool { return b.row(t, i) != nothing })
}

func killedAfterTheClaim(t *testing.T, b *testBundle, s *service, i intent) {
	killedAt(t, b, s, i, beforeCharge)
	require.Empty(t, b.gateway.charges(t))
}

func killedAfterTheCharge(t *testing.T, b *testBundle, s *service, i intent) {
	killedAt(t, b, s, i, afterCharge)
	require.Equal(t, []string{"approved"}, b.gateway.charges(t))
}

func killedAt(t *testing.T, b *testBundle, s *service, i intent, at door) {
	t.Helper()
	held := b.gateway.shut(at)
	b.startPaying(t.Context(), t, s, i)
	receive(t, held.reached)
	s.kill(t)
	receive(t, held.left)
	held.open()
}

func killedAfterTheRecord(t *testing.T, b *testBundle, s *service, i intent) {
	b.databaseWire.loseAnswerTo("payment.succeeded")
	got := b.startPaying(t.Context(), t, s, i)
	eventually(t, "the record has committed", func() bool { return b.row(t, i).key == "done" })
	s.kill(t)
	require.Error(t, receive(t, got).err, "the answer had not left")
}

func killedAfterTheReapersCancel(t *testing.T, b *testBundle, s *service, i intent) {
	killedAfterTheClaim(t, b, s, i)
	held := b.gateway.shut(afterCancel)
	// The other replicas leave the key to this look for as long as it may take.
	reaper := b.serve(t, "REAP_AFTER="+(leaseTTL+time.Millisecond).String(), "GATEWAY_TIMEOUT=2s")
	receive(t, held.reached)
	reaper.kill(t)
	receive(t, held.left)
	held.open()
}

func TestServiceKilledWithMinus9(t *testing.T) {
	t.Parallel()
	for _, c := range crashes {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			for name, gatewayDown := range map[string]bool{"": false, "AndTheGatewayIsDown": true} {
				t.Run("ItsClientComesBack"+name, func(t *testing.T) {
					t.Parallel()
					b, i := crashed(t, c, gatewayDown)
					clientComesBack(t, b, c, i, gatewayDown)
				})
				t.Run("NobodyComesBack"+name, func(t *testing.T) {
					t.Parallel()
					b, i := crashed(t, c, gatewayDown)
					nobodyComesBack(t, b, c, i, gatewayDown)
				})
			}
		})
	}
}

// crashed lets the crash happen, in a world of its own.
func crashed(t *testing.T, c crash, gatewayDown bool) (*testBundle, intent) {
	t.Helper()
	b := setup(t)
	s := b.ready(t)
	i := b.intend(t, s)
	c.happen(t, b, s, i)
	if gatewayDown {
		b.gatewayWire.cut(t)
	}
	left := b.row(t, i)
	left.looked = time.Time{}
	require.Equal(t, c.left, left, "what the crash leaves behind")
	return b, i
}

func clientComesBack(t *testing.T, b *testBundle, c crash, i intent, gatewayDown bool) {
	const repeatEvery = 250 * time.Millisecond
	bound := leaseTTL + repeatEvery + 2*latency + time.Second

	s := b.ready(t, "GATEWAY_TIMEOUT=2s")
	since := time.Now()
	repeat := time.NewTicker(repeatEvery)
	defer repeat.Stop()
	var last answer
	for {
		last = b.pay(t, s, i)
		require.NoError(t, last.err)
		if last.status == http.StatusCreated || last.status == http.StatusPaymentRequired {
			break
		}
		require.Contains(t, []int{http.StatusConflict, http.StatusServiceUnavailable, http.StatusGatewayTimeout}, last.status, last)
		seconds, err := strconv.Atoi(last.header.Get("Retry-After"))
		require.NoError(t, err, last)
		require.Positive(t, seconds)
		if last.status != http.StatusConflict {
			require.True(t, gatewayDown, "the gateway is well: %v", last)
			require.Equal(t, "same-key", last.field("retry"), last)
			outcome := "unknown" // The dead process may have charged.
			if c.left == nothing {
				outcome = "not-charged"
			}
			require.Equal(t, outcome, last.field("outcome"), last)
			if b.gatewayWire.isCut() {
				require.NotContains(t, []string{succeeded, failed}, b.row(t, i).payment)
				b.gatewayWire.mend(t)
				since = time.Now()
			}
		}
		<-repeat.C
	}
	took := time.Since(since)
	require.LessOrEqual(t, took, bound, "LEASE_TTL %s + repeat every %s + two gateway latencies of %s + 1 s", leaseTTL, repeatEvery, latency)
	t.Logf("final after %s of %s", took.Round(time.Millisecond), bound)

	requireEnd(t, b, i, c.returned)
	if c.returned == succeeded {
		require.Equal(t, http.StatusCreated, last.status, last)
	} else {
		require.Equal(t, "payment-failed", last.slug(), last)
	}
	again := b.pay(t, s, i)
	require.Equal(t, last.status, again.status)
	require.Equal(t, last.body, again.body, "a replay has the same bytes")
	require.Equal(t, "true", again.replayed())
	requireEnd(t, b, i, c.returned)
}

func nobodyComesBack(t *testing.T, b *testBundle, c crash, i intent, gatewayDown bool) {
	posts := b.gateway.posts.Load()
	left := b.row(t, i)
	s := b.ready(t, "REAP_AFTER="+(leaseTTL+time.Millisecond).String(), "GATEWAY_TIMEOUT=1s")
	if gatewayDown {
		if c.left == inProgress {
			eventually(t, "the reaper has looked twice", func() bool { return b.row(t, i).looked.Sub(left.looked) > 2*time.Second })
			require.Equal(t, "processing", b.row(t, i).payment, "nothing is known, so nothing is recorded")
		}
		b.gatewayWire.mend(t)
	}
	if c.alone != "" {
		eventually(t, "the reaper has ended the payment", func() bool { return b.row(t, i).payment == c.alone })
	}
	requireEnd(t, b, i, c.alone)
	require.Equal(t, posts, b.gateway.posts.Load(), "the reaper never charges")
	if c.alone == "" {
		return
	}
	late := b.pay(t, s, i)
	require.Equal(t, "true", late.replayed(), "a client that comes late gets the stored answer")
	require.Equal(t, c.alone == succeeded, late.status == http.StatusCreated, late)
	requireEnd(t, b, i, c.alone)
}

// requireEnd checks that key, payment, order, events and ledger tell of the same end.
func requireEnd(t *testing.T, b *testBundle, i intent, payment string) {
	t.Helper()
	got := b.row(t, i)
	got.attempt, got.looked = 0, time.Time{}
	switch payment {
	case "":
		require.Equal(t, nothing, got)
		require.Empty(t, b.gateway.charges(t))
	case succeeded:
		require.Equal(t, row{key: "done", payment: succeeded, order: "paid", events: 1}, got)
		require.Equal(t, []string{"approved"}, b.gateway.charges(t), "one charge")
	case failed:
		require.Equal(t, row{key: "failed", payment: failed, order: "open", events: 1}, got)
		require.Empty(t, b.gateway.charges(t), "no charge")
	}
}

func TestPausedProcess(t *testing.T) {
	t.Parallel()

	t.Run("ChangesNothingAndAnswersWithTheStoredAnswer", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		paused, other := b.ready(t), b.ready(t)
		i := b.intend(t, paused)
		held := b.gateway.shut(afterCharge)
		got := b.startPaying(t.Context(), t, paused, i)
		receive(t, held.reached)
		b.keepReaperAway(t, i)
		paused.pause(t)

		fresh := b.repeat(t, other, i)
		require.Equal(t, http.StatusCreated, fresh.status, fresh)
		require.Equal(t, "false", fresh.replayed(), "the other process's own attempt")
		before := b.everything(t, i)

		paused.resume(t)
		held.open()
		late := receive(t, got)
		require.Equal(t, http.StatusCreated, late.status, late)
		require.Equal(t, "true", late.replayed())
		require.Equal(t, fresh.body, late.body)
		require.Equal(t, fresh.header.Get("X-Request-Id"), late.header.Get("Original-Request-Id"))
		require.Equal(t, before, b.everything(t, i))
		requireEnd(t, b, i, succeeded)
	})

	t.Run("IsToldThatAnotherHoldsItsKey", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		paused, other := b.ready(t), b.ready(t)
		i := b.intend(t, paused)
		held := b.gateway.shut(afterCharge)
		got := b.startPaying(t.Context(), t, paused, i)
		receive(t, held.reached)
		b.keepReaperAway(t, i)
		paused.pause(t)

		asking := b.gateway.shut(beforeLookUp)
		fresh := make(chan answer, 1)
		go func() { fresh <- b.repeat(t, other, i) }()
		receive(t, asking.reached)
		paused.resume(t)
		held.open()
		late := receive(t, got)
		require.Equal(t, http.StatusConflict, late.status, late)
		require.Equal(t, "idempotency-in-progress", late.slug())
		require.NotEmpty(t, late.header.Get("Retry-After"))
		require.Equal(t, inProgress.payment, b.row(t, i).payment, "the outcome that it knew was not its to record")

		asking.open()
		require.Equal(t, http.StatusCreated, receive(t, fresh).status)
		requireEnd(t, b, i, succeeded)
	})

	t.Run("SaysNothingOfAGatewayThatItCannotReach", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		own := newWire(t, "tcp", b.gateway.address)
		paused, other := b.ready(t, "GATEWAY_URL=http://"+own.address, "GATEWAY_TIMEOUT=4s"), b.ready(t)
		i := b.intend(t, paused)
		held := b.gateway.shut(beforeCharge)
		got := b.startPaying(t.Context(), t, paused, i)
		receive(t, held.reached)
		b.keepReaperAway(t, i)
		paused.pause(t)
		own.cut(t)
		held.open()

		fresh := b.repeat(t, other, i)
		require.Equal(t, http.StatusCreated, fresh.status, fresh)
		before := b.everything(t, i)
		paused.resume(t)
		late := receive(t, got)
		require.Equal(t, http.StatusCreated, late.status, late)
		require.Equal(t, fresh.body, late.body)
		require.Equal(t, before, b.everything(t, i))
		requireEnd(t, b, i, succeeded)
	})
}

// repeat pays again and again, until the answer is another than that the key is in progress.
func (b *testBundle) repeat(t *testing.T, s *service, i intent) (last answer) {
	t.Helper()
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if last = b.pay(t, s, i); last.status != http.StatusConflict {
			break
		}
	}
	return last
}
