package main

import (
	"bytes"
	"net/http"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"
)

// leaves are the words of every command that can be run.
func leaves(t *testing.T) (words [][]string) {
	t.Helper()
	parser, err := kong.New(&commands{})
	require.NoError(t, err)
	for _, leaf := range parser.Model.Leaves(false) {
		path, _, _ := strings.Cut(leaf.Path(), " <")
		words = append(words, strings.Fields(path))
	}
	require.Contains(t, words, []string{"migrate", "up"})
	return words
}

// inProcess runs a command that needs no process of its own.
func inProcess(t testing.TB, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	status = run(t.Context(), args, &out, &errs)
	return status, out.String(), errs.String()
}

func TestCommand(t *testing.T) {
	t.Parallel()

	t.Run("ExplainsItself", func(t *testing.T) {
		t.Parallel()
		for _, words := range append(leaves(t), nil, []string{"migrate"}, []string{"merchant"}) {
			status, stdout, stderr := inProcess(t, append(slices.Clone(words), "-h")...)
			require.Zero(t, status, words)
			require.Contains(t, stdout, "Usage: payments "+strings.Join(words, " "))
			require.Empty(t, stderr)
		}
	})

	t.Run("ExplainsItselfWithoutTheDatabasesPassword", func(t *testing.T) {
		t.Parallel()
		status, p := execute(t, []string{"DATABASE_URL=postgres://user:hunter2@host/payments"}, "serve", "-h")
		require.Zero(t, status)
		require.Contains(t, p.stdout.String(), "DATABASE_URL")
		require.NotContains(t, p.stdout.String(), "hunter2")
	})

	t.Run("RefusesWhatItDoesNotKnowInOneSentence", func(t *testing.T) {
		t.Parallel()
		for _, words := range [][]string{
			nil, {"pay"}, {"serve", "now"}, {"serve", "--lease", "5s"}, {"migrate"}, {"migrate", "sideways"}, {"merchant", "create"},
			{"reap"}, {"purge"}, {"version", "--long"},
		} {
			status, stdout, stderr := inProcess(t, words...)
			require.Equal(t, 1, status, words)
			require.Regexp(t, `^payments: [^\n]+\n$`, stderr, words)
			require.Empty(t, stdout)
		}
	})

	t.Run("VersionPrintsOneLine", func(t *testing.T) {
		t.Parallel()
		status, p := execute(t, nil, "version")
		require.Zero(t, status)
		require.Regexp(t, `^\S[^\n]*\n$`, p.stdout.String())
	})

	t.Run("MerchantCreatePrintsTheOneKeyThatWorks", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		status, p := b.execute(t, "merchant", "create", "Shop")
		require.Zero(t, status)
		keys := regexp.MustCompile(`sk_\S+`).FindAllString(p.stdout.String(), -1)
		require.Len(t, keys, 1)
		require.NotContains(t, p.stderr.String(), "sk_")
		require.Regexp(t, `(?m)^merchant_id +[0-9a-f-]{36}$`, p.stdout.String())

		mine := b.intend(t, s)
		b.apiKey = keys[0]
		require.Equal(t, "order-not-found", b.pay(t, s, mine).slug(), "another merchant's order")
		i := b.intend(t, s)
		require.Equal(t, http.StatusCreated, b.pay(t, s, i).status)
		var kept bool
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM api_keys WHERE api_keys::text LIKE '%' || $1 || '%')", keys[0][len("sk_"):]).Scan(&kept))
		require.False(t, kept, "only the key's SHA-256 is stored")

		status, p = b.execute(t, "merchant", "create", strings.Repeat("x", 256))
		require.Equal(t, 1, status)
		require.Len(t, p.complaints(), 1)
		require.NotContains(t, p.stdout.String(), "sk_")
	})

	t.Run("ReapOnceEndsStalePaymentsAndSaysHowMany", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		charged, claimed := b.intend(t, s), b.intend(t, s)
		held := b.gateway.shut(afterCharge)
		b.startPaying(t.Context(), t, s, charged)
		receive(t, held.reached)
		killedAt(t, b, s, claimed, beforeCharge)
		held.open()
		posts := b.gateway.posts.Load()

		reap := func(says string) {
			t.Helper()
			status, p := b.execute(t, "reap", "--once")
			require.Zero(t, status, p.stderr.String())
			require.Equal(t, says+"\n", p.stdout.String())
		}
		b.move(t, "lease_expires_at", "1 hour")
		reap("recorded 0, canceled 0, left alone 0, unclear 0, overtaken 0")
		b.move(t, "lease_expires_at", "-1 second")
		b.gatewayWire.cut(t)
		reap("recorded 0, canceled 0, left alone 0, unclear 2, overtaken 0")
		b.gatewayWire.mend(t)
		reap("recorded 1, canceled 0, left alone 1, unclear 0, overtaken 0")
		b.move(t, "lease_expires_at", "-1 hour")
		reap("recorded 0, canceled 1, left alone 0, unclear 0, overtaken 0")
		require.Equal(t, succeeded, b.row(t, charged).payment)
		require.Equal(t, failed, b.row(t, claimed).payment)
		require.Equal(t, []string{"approved"}, b.gateway.charges(t))
		require.Equal(t, posts, b.gateway.posts.Load(), "the reaper never charges")
	})

	t.Run("PurgeOnceStripsSpentAnswersAndSaysHowMany", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		i := b.intend(t, s)
		first := b.pay(t, s, i)
		purge := func(says string) {
			t.Helper()
			status, p := b.execute(t, "purge", "--once")
			require.Zero(t, status, p.stderr.String())
			require.Equal(t, says+"\n", p.stdout.String())
		}
		purge("purged 0")
		b.move(t, "expires_at", "-1 second")
		purge("purged 2") // The order's key and the payment's.
		purge("purged 0")
		spent := b.pay(t, s, i)
		require.Equal(t, "idempotency-key-expired", spent.slug(), spent)
		require.Equal(t, first.header.Get("Location"), spent.header.Get("Location"))
	})

	t.Run("GatewayKeepsItsLedgerThroughKillMinus9", func(t *testing.T) {
		t.Parallel()
		settings := []string{"LISTEN_ADDR=127.0.0.1:0", "GATEWAY_LATENCY=0s", "GATEWAY_LEDGER=" + filepath.Join(t.TempDir(), "ledger")}
		serve := func() (p *program, url string) {
			p = start(t, settings, "gateway")
			return p, "http://" + p.await(t, &p.stderr, `address=(\S+)`)
		}
		p, url := serve()
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/charges", strings.NewReader(`{"amount":1999,"currency":"EUR","payment_method":"pm_ok"}`))
		require.NoError(t, err)
		request.Header.Set("Idempotency-Key", "k")
		require.Equal(t, http.StatusOK, send(request).status)
		status, second := execute(t, settings, "gateway")
		require.Equal(t, 1, status, "one ledger, one gateway")
		require.Len(t, second.complaints(), 1)
		p.kill(t)

		p, url = serve()
		require.Equal(t, []string{"approved"}, ledger(t, send, url))
		p.signal(t, syscall.SIGTERM)
		require.Zero(t, p.wait(t))

		status, refused := execute(t, append(settings, "GATEWAY_LATENCY=-1s"), "gateway")
		require.Equal(t, 1, status)
		require.Contains(t, refused.complaints()[0], "GATEWAY_LATENCY (-1s)")
	})

	t.Run("MigrateGoesUpAndDownAndTellsTheVersion", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		_, err := b.pool.Exec(t.Context(), "DROP SCHEMA public CASCADE; CREATE SCHEMA public")
		require.NoError(t, err)
		migrate := func(status int, words ...string) *program {
			t.Helper()
			got, p := b.execute(t, append([]string{"migrate"}, words...)...)
			require.Equal(t, status, got, p.stderr.String())
			return p
		}
		version := func() string { return migrate(0, "version").stdout.String() }
		require.Equal(t, "0\n", version())

		var five sync.WaitGroup
		for range 5 {
			p := start(t, b.settings(t), "migrate", "up")
			five.Go(func() {
				<-p.exited
				if status := p.cmd.ProcessState.ExitCode(); status != 0 {
					t.Errorf("one of five at once ended with %d", status)
				}
			})
		}
		five.Wait()
		newest := version()
		require.Regexp(t, `^[1-9]\d*\n$`, newest)
		migrate(0, "down")
		require.NotEqual(t, newest, version())
		migrate(0, "up")
		migrate(0, "up")
		require.Equal(t, newest, version())

		require.Len(t, migrate(1, "down", "--steps", "0").complaints(), 1)
		require.Len(t, migrate(1, "down", "--steps", "1000").complaints(), 1)

		migrate(0, "up")
		_, err = b.pool.Exec(t.Context(), "UPDATE schema_migrations SET dirty = true")
		require.NoError(t, err)
		require.Equal(t, strings.TrimSpace(newest)+" (dirty)\n", version())
		refused := migrate(1, "up").complaints()
		require.Len(t, refused, 1)
		require.Contains(t, refused[0], "failed half way")
	})
}

// move brings a time of all keys that have it to that distance from now.
func (b *testBundle) move(t *testing.T, column, distance string) {
	t.Helper()
	_, err := b.pool.Exec(t.Context(), "UPDATE idempotency_keys SET "+column+" = now() + $1::text::interval WHERE "+column+" IS NOT NULL", distance)
	require.NoError(t, err)
}
