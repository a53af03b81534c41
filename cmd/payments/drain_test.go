package main

import (
	"bufio"
	"context"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestDrain(t *testing.T) {
	t.Parallel()

	// terminate sends SIGTERM and returns when the service has begun to drain.
	terminate := func(t *testing.T, s *service) {
		t.Helper()
		s.signal(t, syscall.SIGTERM)
		s.await(t, &s.stderr, `msg=(draining)`)
	}

	t.Run("LetsAPaymentInFlightEndAndItsClientHaveItsAnswer", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		i, second := b.intend(t, s), b.intend(t, s)
		held := b.gateway.shut(afterCharge)
		got := b.startPaying(t.Context(), t, s, i)
		receive(t, held.reached)
		terminate(t, s)

		eventually(t, "nothing new is let in", func() bool {
			refused := b.pay(t, s, second)
			return refused.err != nil || refused.status == http.StatusServiceUnavailable && refused.slug() == "shutting-down"
		})
		require.Equal(t, nothing, b.row(t, second))

		held.open()
		answered := receive(t, got)
		require.Equal(t, http.StatusCreated, answered.status, answered)
		require.Equal(t, "false", answered.replayed())
		require.Zero(t, s.wait(t))
		requireEnd(t, b, i, succeeded)
	})

	t.Run("UnderLoadGivesEveryPaymentInFlightItsFinalAnswer", func(t *testing.T) {
		t.Parallel()
		b := setupWithLatency(t, 800*time.Millisecond)
		s := b.ready(t, patient...)
		intents := make([]intent, 100)
		for n := range intents {
			intents[n] = b.intend(t, s)
		}
		answers := make(chan answer, len(intents))
		for _, i := range intents {
			request := b.paymentRequest(t.Context(), t, s, i)
			go func() { answers <- send(request) }()
		}
		eventually(t, "all are at the gateway", func() bool { return b.gateway.posts.Load() == int64(len(intents)) })
		terminate(t, s)
		for range intents {
			paid := receive(t, answers)
			require.Equal(t, http.StatusCreated, paid.status, paid)
			require.Equal(t, "false", paid.replayed())
		}
		require.Zero(t, s.wait(t))
		require.Len(t, b.gateway.charges(t), len(intents))
		for _, i := range intents {
			require.Equal(t, succeeded, b.row(t, i).payment)
		}
	})

	t.Run("SendsWhoWaitsForAnothersAnswerAwayAtOnce", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		i := b.intend(t, s)
		held := b.gateway.shut(afterCharge)
		got := b.startPaying(t.Context(), t, s, i)
		receive(t, held.reached)
		waiting := i
		waiting.prefer = "wait=20"
		waited := b.startPaying(t.Context(), t, s, waiting)
		select {
		case early := <-waited:
			t.Fatalf("it did not wait: %v", early)
		case <-time.After(300 * time.Millisecond): // Nothing tells that a request has begun to wait.
		}
		terminate(t, s)
		sentAway := receive(t, waited)
		require.Equal(t, "idempotency-in-progress", sentAway.slug(), sentAway)
		held.open()
		require.Equal(t, http.StatusCreated, receive(t, got).status)
		require.Zero(t, s.wait(t))
	})

	t.Run("LetsThePaymentOfAClientThatHungUpEnd", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		i := b.intend(t, s)
		held := b.gateway.shut(beforeCharge)
		ctx, hangUp := context.WithCancel(t.Context())
		got := b.startPaying(ctx, t, s, i)
		receive(t, held.reached)
		hangUp()
		require.ErrorIs(t, receive(t, got).err, context.Canceled)
		terminate(t, s)
		held.open()
		require.Zero(t, s.wait(t))
		requireEnd(t, b, i, succeeded)
	})

	t.Run("LetsAPaymentInTheBackgroundEnd", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		i := b.intend(t, s)
		i.prefer = "respond-async"
		held := b.gateway.shut(beforeCharge)
		require.Equal(t, http.StatusAccepted, b.pay(t, s, i).status)
		receive(t, held.reached)
		terminate(t, s)
		held.open()
		require.Zero(t, s.wait(t))
		requireEnd(t, b, i, succeeded)
	})

	t.Run("IsNotHeldByABodyThatNeverComes", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		conn, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
		require.NoError(t, err)
		defer conn.Close()
		_, err = conn.Write([]byte("POST /v1/payments HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + b.apiKey +
			"\r\nIdempotency-Key: k\r\nContent-Type: application/json\r\nContent-Length: 100\r\nExpect: 100-continue\r\n\r\n"))
		require.NoError(t, err)
		asked, err := bufio.NewReader(conn).ReadString('\n')
		require.NoError(t, err)
		require.Contains(t, asked, "100 Continue", "the service reads, and nothing comes")
		terminate(t, s)
		require.Zero(t, s.wait(t))
	})

	t.Run("ThatIsCutOffBySHUTDOWN_TIMEOUTEndsWithANonZeroStatus", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t, "GATEWAY_TIMEOUT=1s", "SHUTDOWN_TIMEOUT=6s")
		i := b.intend(t, s)
		// Claim, gateway and record take, each for itself, no longer than they may. Together they take longer than the drain has.
		order := lockOrder(t, b, i)
		got := b.startPaying(t.Context(), t, s, i)
		awaitLockWait(t, b)
		terminate(t, s)
		since := time.Now()
		held := b.gateway.shut(beforeCharge)
		time.Sleep(3 * time.Second)
		require.NoError(t, order.Rollback(t.Context()))
		receive(t, held.reached)
		key := lock(t, b, "SELECT FROM idempotency_keys WHERE key = $1 FOR UPDATE", i.key)

		require.Equal(t, 1, s.wait(t))
		require.Less(t, time.Since(since), 6*time.Second+6*time.Second, "the longest that a statement goes on")
		require.Contains(t, strings.Join(s.complaints(), "\n"), "SHUTDOWN_TIMEOUT (6s)")
		require.Len(t, s.complaints(), 1)
		require.Error(t, receive(t, got).err)
		require.NoError(t, key.Rollback(t.Context()))

		held.open()
		require.Equal(t, http.StatusCreated, b.repeat(t, b.ready(t), i).status, "what is left is left to a repeat")
		requireEnd(t, b, i, succeeded)
	})

	t.Run("EndsAtOnceWithASecondSignal", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		i := b.intend(t, s)
		held := b.gateway.shut(afterCharge)
		got := b.startPaying(t.Context(), t, s, i)
		receive(t, held.reached)
		terminate(t, s)
		s.signal(t, syscall.SIGTERM)
		require.NotZero(t, s.wait(t))
		require.Error(t, receive(t, got).err)
		held.open()
		require.Equal(t, http.StatusCreated, b.repeat(t, b.ready(t), i).status)
		requireEnd(t, b, i, succeeded)
	})
}
