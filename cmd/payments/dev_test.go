package main

import (
	"context"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"example.com/payments/internal/dbtest"
)

// dev is a running `payments dev`.
type dev struct {
	*service
	gatewayURL string
	curl       string // the request to paste
}

// startDev starts it on a directory of its data and returns when it has said where everything is.
func startDev(t testing.TB, dir string, settings ...string) *dev {
	t.Helper()
	p := start(t, append([]string{"LISTEN_ADDR=127.0.0.1:0", "GATEWAY_LATENCY=" + latency.String()}, settings...), "dev", "--data-dir", dir)
	curl := p.await(t, &p.stdout, `(?s)\n(curl .*?)\n\n`)
	said := func(pattern string) string { return p.await(t, &p.stdout, pattern) }
	require.Contains(t, said(`(?m)^service .*$`), demoAPIKey)
	require.Equal(t, strconv.Itoa(p.cmd.Process.Pid), said(`(?m)^process +(\d+)$`))
	return &dev{&service{p, said(`(?m)^service +(\S+)`)}, said(`(?m)^gateway +(\S+)`), curl}
}

// paste runs what a reader would paste into a terminal.
func paste(t *testing.T, command string) string {
	t.Helper()
	tool(t, "curl", "curl")
	out, err := exec.CommandContext(t.Context(), tool(t, "bash", "bash"), "-c", command).Output()
	require.NoError(t, err, string(out))
	return strings.ReplaceAll(string(out), "\r", "")
}

// postmaster is the process of the PostgreSQL that dev has started.
func postmaster(t *testing.T, dir string) int {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(dir, "postgres", "data", "postmaster.pid"))
	require.NoError(t, err)
	first, _, _ := strings.Cut(string(content), "\n")
	pid, err := strconv.Atoi(first)
	require.NoError(t, err)
	return pid
}

func TestDev(t *testing.T) {
	t.Parallel()

	t.Run("BringsUpEverythingAndFindsItAgainAfterKillMinus9", func(t *testing.T) {
		t.Parallel()
		dir := openDir(t)
		d := startDev(t, dir)

		first := paste(t, d.curl)
		require.Regexp(t, `^HTTP/1.1 201 Created\n`, first)
		require.Contains(t, first, "\nIdempotent-Replayed: false\n")
		second := paste(t, d.curl)
		require.Contains(t, second, "\nIdempotent-Replayed: true\n")
		body := func(response string) string { return response[strings.Index(response, "\n\n"):] }
		require.Equal(t, body(first), body(second))
		require.Equal(t, []string{"approved"}, ledger(t, send, d.gatewayURL), "pasted twice, charged once")
		server := postmaster(t, dir)
		d.kill(t)

		again := startDev(t, dir)
		eventually(t, "the server of the killed process is gone", func() bool {
			state := processState(t, server)
			return state == "" || strings.HasPrefix(state, "Z")
		})
		replay := paste(t, strings.ReplaceAll(d.curl, d.url, again.url))
		require.Contains(t, replay, "\nIdempotent-Replayed: true\n")
		require.Equal(t, body(first), body(replay))
		require.Equal(t, []string{"approved"}, ledger(t, send, again.gatewayURL))
		location := regexp.MustCompile(`(?m)^Location: (\S+)$`).FindStringSubmatch(first)[1]
		require.Contains(t, paste(t, "curl -s -H 'Authorization: Bearer "+demoAPIKey+"' "+again.url+location), `"status":"succeeded"`)

		server = postmaster(t, dir)
		again.signal(t, syscall.SIGINT)
		require.Zero(t, again.wait(t))
		require.Empty(t, processState(t, server), "Ctrl-C leaves no PostgreSQL")
		require.Error(t, send(newRequest(t, again.gatewayURL+"/charges")).err, "nor a gateway")
		require.NoFileExists(t, filepath.Join(dir, "postgres", "data", "postmaster.pid"))
	})

	t.Run("RespectsDATABASE_URL", func(t *testing.T) {
		t.Parallel()
		dir, databaseURL := filepath.Join(openDir(t), "new"), dbtest.New(t)
		pool := dbtest.Pool(t, databaseURL)
		_, err := pool.Exec(t.Context(), "DROP SCHEMA public CASCADE; CREATE SCHEMA public")
		require.NoError(t, err)
		d := startDev(t, dir, "DATABASE_URL="+databaseURL)
		require.NotContains(t, d.stdout.String(), databaseURL, "its password is somebody's")
		require.Regexp(t, `^HTTP/1.1 201 Created\n`, paste(t, d.curl))
		var status string
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT status FROM payments").Scan(&status))
		require.Equal(t, succeeded, status)
		require.NoDirExists(t, filepath.Join(dir, "postgres"))
		d.signal(t, syscall.SIGINT)
		require.Zero(t, d.wait(t))
		require.NoError(t, pool.Ping(context.Background()), "the database is not dev's to stop")
	})

	t.Run("RefusesADatabaseWhosePaymentsWereMadeAtAnotherGateway", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		i := b.intend(t, s)
		killedAt(t, b, s, i, afterCharge)
		before := b.everything(t, i)
		status, p := execute(t, []string{"DATABASE_URL=" + b.databaseURL, "LISTEN_ADDR=127.0.0.1:0"}, "dev", "--data-dir", openDir(t))
		require.Equal(t, 1, status)
		require.Contains(t, p.complaints()[0], "DATABASE_URL has payments that were not made by dev")
		require.Equal(t, before, b.everything(t, i), "its simulator would have denied the charge")
	})

	t.Run("RefusesBrokenSettingsBeforeItStartsAnything", func(t *testing.T) {
		t.Parallel()
		dir := filepath.Join(openDir(t), "new")
		status, p := execute(t, []string{"LEASE_TTL=100ms", "GATEWAY_LATENCY=-1s"}, "dev", "--data-dir", dir)
		require.Equal(t, 1, status)
		require.Contains(t, p.stderr.String(), "LEASE_TTL (100ms)")
		require.Contains(t, p.stderr.String(), "GATEWAY_LATENCY (-1s)")
		require.NoDirExists(t, dir)
	})
}

func newRequest(t *testing.T, url string) *http.Request {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	return request
}
