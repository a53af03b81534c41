package main

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAdmin(t *testing.T) {
	t.Parallel()

	t.Run("HasMetricsAndProfilesOnAListenerOfItsOwn", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t, "DB_MAX_CONNS=7")
		i := b.intend(t, s)
		require.Equal(t, http.StatusCreated, b.pay(t, s, i).status)
		admin := &service{s.program, "http://" + s.await(t, &s.stderr, ` admin=(\S+)`)}
		address, err := url.Parse(admin.url)
		require.NoError(t, err)
		require.Equal(t, "127.0.0.1", address.Hostname(), "by default it is nobody's but this machine's")

		scraped := admin.get(t, "/metrics")
		require.Equal(t, http.StatusOK, scraped.status)
		for _, line := range []string{
			`payments_claims_total{result="won",route="/v1/payments"} 1`,
			`payments_gateway_calls_total{call="charge",ending="approved"} 1`,
			`payments_keys_in_progress 0`,
			`pgxpool_max_conns{pool="requests"} 6`,
			`pgxpool_max_conns{pool="renewals"} 1`,
			`pgxpool_acquired_conns{pool="requests"} `,
			`pgxpool_idle_conns{pool="requests"} `,
			`pgxpool_empty_acquire{pool="requests"} `,
			`pgxpool_empty_acquire_wait_time_ns{pool="requests"} `,
			`go_goroutines `,
			`process_resident_memory_bytes `,
		} {
			require.Contains(t, scraped.body, "\n"+line)
		}
		require.Equal(t, http.StatusOK, admin.get(t, "/debug/pprof/").status)
		require.Equal(t, http.StatusOK, admin.get(t, "/debug/pprof/goroutine").status)

		require.Equal(t, http.StatusNotFound, admin.get(t, "/debug/pprof/cmdline").status, "the database's password may be in it")
		for _, path := range []string{"/metrics", "/debug/pprof/"} {
			require.Equal(t, http.StatusNotFound, s.get(t, path).status, "the public listener has none of it")
		}
		require.Equal(t, http.StatusNotFound, admin.get(t, "/v1/orders").status)
	})

	t.Run("IsThereWhileTheDatabaseIsNot", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		admin := &service{s.program, "http://" + s.await(t, &s.stderr, ` admin=(\S+)`)}
		b.databaseWire.cut(t)
		scraped := admin.get(t, "/metrics")
		require.Equal(t, http.StatusOK, scraped.status)
		require.Contains(t, scraped.body, "payments_claims_total")
		require.NotContains(t, scraped.body, "payments_keys_in_progress", "what is not known is absent")
	})
}

func TestReadiness(t *testing.T) {
	t.Parallel()
	b := setup(t)
	s := b.ready(t, "DB_MAX_CONNS=2")
	i := b.intend(t, s)
	held := b.gateway.shut(beforeCharge)
	got := b.startPaying(t.Context(), t, s, i)
	receive(t, held.reached)

	// Who asks for the schema's version waits for this lock, as behind a migration; the renewals share a connection with them.
	locked := lock(t, b, "LOCK TABLE schema_migrations IN ACCESS EXCLUSIVE MODE")
	eventually(t, "it is not ready", func() bool { return s.get(t, "/readyz").status == http.StatusServiceUnavailable })
	for since := time.Now(); time.Since(since) < 2*leaseTTL; {
		require.Equal(t, http.StatusServiceUnavailable, s.get(t, "/readyz").status)
		var held bool
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT lease_expires_at > clock_timestamp() FROM idempotency_keys WHERE key = $1", i.key).Scan(&held))
		require.True(t, held, "the lease of who is at work goes on")
	}
	require.NoError(t, locked.Rollback(t.Context()))
	s.awaitReady(t)
	held.open()
	require.Equal(t, http.StatusCreated, receive(t, got).status)
	require.Equal(t, 1, b.row(t, i).attempt)
}

func TestHealth(t *testing.T) {
	t.Parallel()
	b := setup(t)
	s := b.ready(t)
	address := strings.TrimPrefix(s.url, "http://")
	status, _, stderr := inProcess(t, "health", "--listen-addr", address)
	require.Zero(t, status, stderr)

	b.databaseWire.cut(t)
	status, _, stderr = inProcess(t, "health", "--listen-addr", address)
	require.Zero(t, status, "to be restarted would help nobody: %s", stderr)

	s.kill(t)
	status, _, stderr = inProcess(t, "health", "--listen-addr", address)
	require.Equal(t, 1, status)
	require.NotEmpty(t, stderr)
}
