package main

import (
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLimits(t *testing.T) {
	t.Parallel()

	t.Run("ClientsThatNeverFinishTheirHeadersAreSentAwayAndHoldNobodyUp", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		i := b.intend(t, s)
		slow := slowClients(t, s, 1000)
		require.Equal(t, http.StatusCreated, b.pay(t, s, i).status)
		require.Equal(t, http.StatusOK, s.get(t, "/readyz").status)
		var left sync.WaitGroup
		for _, conn := range slow {
			left.Go(func() {
				_ = conn.SetReadDeadline(time.Now().Add(patience))
				if _, err := io.ReadAll(conn); err != nil && !strings.Contains(err.Error(), "reset") {
					t.Errorf("it is still there: %v", err)
				}
			})
		}
		left.Wait()
		require.Equal(t, http.StatusOK, s.get(t, "/readyz").status)
	})

	t.Run("TenTimesWhatItTakesIsRefusedWithAProblemAndATimeToComeBack", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		const most = 20
		s := b.ready(t, append([]string{"MAX_IN_FLIGHT=20", "DB_MAX_CONNS=5"}, patient...)...)
		intents := make([]intent, 10*most)
		for n := range intents {
			intents[n] = b.intend(t, s)
		}
		held := b.gateway.shut(beforeCharge)
		answers := make(chan answer, len(intents))
		for _, i := range intents {
			request := b.paymentRequest(t.Context(), t, s, i)
			go func() { answers <- send(request) }()
		}
		// Those that were let in stand at the gateway; all others have been told.
		for range len(intents) - most {
			refused := receive(t, answers)
			require.Equal(t, http.StatusServiceUnavailable, refused.status, refused)
			require.Equal(t, "overloaded", refused.slug())
			require.Equal(t, "application/problem+json", refused.header.Get("Content-Type"))
			require.NotEmpty(t, refused.header.Get("Retry-After"))
		}
		require.Equal(t, http.StatusOK, s.get(t, "/readyz").status)
		require.Equal(t, http.StatusOK, s.get(t, "/livez").status)
		held.open()
		for range most {
			require.Equal(t, http.StatusCreated, receive(t, answers).status)
		}
		for _, i := range intents {
			require.Equal(t, http.StatusCreated, b.repeat(t, s, i).status, "who was refused comes back with the same key")
		}
		require.Len(t, b.gateway.charges(t), len(intents))
	})

	t.Run("APoolThatIsTooSmallRefusesWithAProblemAndATimeToComeBack", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t, "DB_MAX_CONNS=2")
		i := b.intend(t, s)
		order := lockOrder(t, b, i)
		got := b.startPaying(t.Context(), t, s, i)
		awaitLockWait(t, b) // It has the one connection.
		other := i
		other.key += "-other"
		refused := b.pay(t, s, other)
		require.Equal(t, "storage-unavailable", refused.slug(), refused)
		require.NotEmpty(t, refused.header.Get("Retry-After"))
		require.Equal(t, http.StatusOK, s.get(t, "/readyz").status, "a full pool is no dead replica")
		require.NoError(t, order.Rollback(t.Context()))
		require.Equal(t, http.StatusCreated, receive(t, got).status)
	})
}

// slowClients open connections and send the beginning of a request, and no more.
func slowClients(t testing.TB, s *service, n int) []net.Conn {
	t.Helper()
	conns := make([]net.Conn, n)
	for i := range conns {
		conn, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
		_, err = io.WriteString(conn, "POST /v1/payments HTTP/1.1\r\nHost: x\r\nX-Slow: ")
		require.NoError(t, err)
		conns[i] = conn
	}
	return conns
}
