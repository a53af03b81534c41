package main

import (
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestServe(t *testing.T) {
	t.Parallel()

	t.Run("TellsEveryBrokenRelationAtOnceAndNamesBothSettings", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		status, p := execute(t, b.settings(t,
			"LEASE_TTL=400ms", "REAP_INTERVAL=1s", "REAP_AFTER=300ms", "GATEWAY_TIMEOUT=10s", "SHUTDOWN_TIMEOUT=14s",
			"DB_ACQUIRE_TIMEOUT=300ms", "KEY_RETENTION=0s", "DB_MAX_CONNS=1", "RATE_LIMIT=-1", "PUBLIC_URL=payments.example",
		), "serve")
		require.Equal(t, 1, status)
		complaints := p.complaints()
		for _, names := range [][]string{
			{"LEASE_TTL (400ms)", "500ms"},
			{"REAP_INTERVAL (1s)", "LEASE_TTL (400ms)"},
			{"REAP_AFTER (300ms)", "LEASE_TTL (400ms)"},
			{"SHUTDOWN_TIMEOUT (14s)", "GATEWAY_TIMEOUT (10s)"},
			{"DB_ACQUIRE_TIMEOUT (300ms)", "LEASE_TTL (400ms)"},
			{"KEY_RETENTION (0s)"},
			{"DB_MAX_CONNS (1)", "2"},
			{"RATE_LIMIT (-1)"},
			{"PUBLIC_URL (payments.example)"},
		} {
			told := 0
			for _, complaint := range complaints {
				if strings.HasPrefix(complaint, names[0]) && strings.Contains(complaint, names[len(names)-1]) {
					told++
				}
			}
			require.Equal(t, 1, told, "%v in %q", names, complaints)
		}
		require.Len(t, complaints, 9)
		require.Zero(t, b.databaseWire.connections.Load())
		requireNothingStarted(t, p)
	})

	t.Run("TakesSettingsThatKeepTheRelationsOnTheEdge", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		b.ready(t, "LEASE_TTL=500ms", "REAP_INTERVAL=500ms", "REAP_AFTER=501ms", "GATEWAY_TIMEOUT=10s", "SHUTDOWN_TIMEOUT=15s",
			"DB_ACQUIRE_TIMEOUT=333ms", "KEY_RETENTION=1ns", "DB_MAX_CONNS=2")
	})

	t.Run("RefusesAValueByTheNameOfItsSetting", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		for _, setting := range []string{
			"LEASE_TTL=-1s", "LEASE_TTL=soon", "LEASE_TTL=5", "REAP_INTERVAL=-1s", "REAP_INTERVAL=0s", "REAP_AFTER=-1m", "REAP_AFTER=x",
			"GATEWAY_TIMEOUT=-1s", "GATEWAY_TIMEOUT=0s", "KEY_RETENTION=-24h", "KEY_RETENTION=1d", "SHUTDOWN_TIMEOUT=-1s",
			"DB_ACQUIRE_TIMEOUT=-1s", "DB_ACQUIRE_TIMEOUT=0s", "DB_MAX_CONNS=-1", "DB_MAX_CONNS=many", "DB_MAX_CONNS=99999999999",
			"RATE_LIMIT=-0.5", "RATE_LIMIT=fast", "RATE_LIMIT=NaN", "LOG_LEVEL=loud", "LOG_FORMAT=xml",
			"GATEWAY_URL=gateway", "PUBLIC_URL=", "LISTEN_ADDR=8080", "DATABASE_URL=",
		} {
			status, p := execute(t, b.settings(t, setting), "serve")
			require.Equal(t, 1, status, setting)
			name, _, _ := strings.Cut(setting, "=")
			require.Contains(t, p.complaints()[0], name, setting)
			requireNothingStarted(t, p)
		}
	})

	t.Run("NeverRepeatsTheDatabasesPassword", func(t *testing.T) {
		t.Parallel()
		for _, address := range []string{
			"postgres://user:hunter2@host:port/payments", "postgres://user:hunter2@%zz/payments", "postgres://user:hun%ter2@host/payments",
			"postgres//user:hunter2@host/payments", "postgres://user:hunter2/@host:5432/payments", "hunter2",
			"host=h password=hunter2 port=x", "host=h password='hunter2", "postgres://user:hunter2@127.0.0.1:1/payments",
		} {
			for _, args := range [][]string{{"migrate", "up"}, {"migrate", "version"}, {"purge", "--once"}, {"merchant", "create", "Shop"}} {
				status, stdout, stderr := inProcess(t, append(args, "--database-url", address)...)
				require.Equal(t, 1, status)
				require.Regexp(t, `^payments: [^\n]+\n$`, stderr)
				require.NotContains(t, stdout+stderr, "hun", "%s with %s", args, address)
			}
		}
	})

	t.Run("EndsOnATakenPort", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer listener.Close()
		for _, name := range []string{"LISTEN_ADDR", "ADMIN_ADDR"} {
			status, p := execute(t, b.settings(t, name+"="+listener.Addr().String()), "serve")
			require.Equal(t, 1, status)
			require.Len(t, p.complaints(), 1)
			require.Contains(t, p.complaints()[0], name)
			require.Contains(t, p.complaints()[0], listener.Addr().String())
			requireNothingStarted(t, p)
		}
	})

	t.Run("EndsOnADirtyMigration", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		_, err := b.pool.Exec(t.Context(), "UPDATE schema_migrations SET dirty = true")
		require.NoError(t, err)
		status, p := execute(t, b.settings(t), "serve")
		require.Equal(t, 1, status)
		require.Len(t, p.complaints(), 1)
		require.Contains(t, p.complaints()[0], "dirty")
		requireNothingStarted(t, p)
	})

	t.Run("StaysUpWithoutADatabaseAndBecomesReadyByItself", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		_, err := b.pool.Exec(t.Context(), "DROP SCHEMA public CASCADE; CREATE SCHEMA public")
		require.NoError(t, err)
		b.databaseWire.cut(t)
		s := b.serve(t)

		b.requireNotReady(t, s)
		require.Contains(t, s.stderr.String(), "not ready")
		b.databaseWire.mend(t)
		s.await(t, &s.stderr, `not ready.*(run payments migrate up)`)
		b.requireNotReady(t, s)

		status, migrated := b.execute(t, "migrate", "up")
		require.Zero(t, status, migrated.stderr.String())
		s.awaitReady(t)
		s.await(t, &s.stderr, `msg=(ready)`)
		b.apiKey = newMerchant(t, b.databaseURL)
		i := b.intend(t, s)
		require.Equal(t, http.StatusCreated, b.pay(t, s, i).status)

		b.databaseWire.cut(t)
		b.requireNotReady(t, s)
		b.databaseWire.mend(t)
		s.awaitReady(t)
		require.Equal(t, "true", b.pay(t, s, i).replayed())
		requireEnd(t, b, i, succeeded)
		if password := b.pool.Config().ConnConfig.Password; password != "" { // A server named by DATABASE_URL may want none.
			require.NotContains(t, s.stderr.String(), password)
		}
	})

	t.Run("RefusesTheKeyThatEverybodyKnows", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		_, err := b.pool.Exec(t.Context(), `
			WITH m AS (INSERT INTO merchants (id, name) VALUES (gen_random_uuid(), 'demo') RETURNING id)
			INSERT INTO api_keys (merchant_id, id, secret_sha256) SELECT id, id, sha256($1) FROM m`, []byte(demoAPIKey))
		require.NoError(t, err)
		s := b.ready(t)
		b.apiKey = demoAPIKey
		refused := b.pay(t, s, intent{key: "k"})
		require.Equal(t, http.StatusUnauthorized, refused.status)
		require.Equal(t, `Bearer realm="payments"`, refused.header.Get("WWW-Authenticate"))
	})
}

// requireNotReady checks that the service lives, says that it is not ready, and calls no gateway.
func (b *testBundle) requireNotReady(t *testing.T, s *service) {
	t.Helper()
	require.Equal(t, http.StatusOK, s.get(t, "/livez").status)
	notReady := s.get(t, "/readyz")
	require.Equal(t, http.StatusServiceUnavailable, notReady.status, notReady)
	posts := b.gateway.posts.Load()
	refused := b.pay(t, s, intent{key: "k", orderID: "0199a4a4-0000-7000-8000-000000000000"})
	require.Equal(t, "storage-unavailable", refused.slug(), refused)
	require.NotEmpty(t, refused.header.Get("Retry-After"))
	require.Empty(t, refused.field("payment_id"))
	require.Equal(t, posts, b.gateway.posts.Load())
}

func requireNothingStarted(t *testing.T, p *program) {
	t.Helper()
	require.NotContains(t, p.stderr.String(), "msg=serving")
	require.NotContains(t, p.stderr.String(), "goroutine ")
	require.Empty(t, p.stdout.String())
}
