package deploy_test

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func runbook(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile("../docs/operations.md")
	require.NoError(t, err)
	return string(raw)
}

// blocks are what a page shows in a language.
func blocks(t *testing.T, page, language string) (blocks []string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("../docs", page))
	require.NoError(t, err)
	fence := regexp.MustCompile("(?s)```" + language + "\n(.*?)```")
	for _, match := range fence.FindAllStringSubmatch(string(text), -1) {
		blocks = append(blocks, match[1])
	}
	require.NotEmpty(t, blocks)
	return blocks
}

func TestRunbook(t *testing.T) {
	t.Parallel()

	t.Run("LinksToWhatIsThere", func(t *testing.T) {
		t.Parallel()
		text := runbook(t)
		anchors := make(map[string]bool)
		for _, heading := range regexp.MustCompile(`(?m)^#+ (.+)$`).FindAllStringSubmatch(text, -1) {
			anchors[strings.ReplaceAll(strings.ToLower(heading[1]), " ", "-")] = true
		}
		for _, link := range regexp.MustCompile(`\]\(([^)]+)\)`).FindAllStringSubmatch(text, -1) {
			path, anchor, _ := strings.Cut(link[1], "#")
			if path != "" {
				require.FileExists(t, filepath.Join("../docs", path))
			} else {
				require.True(t, anchors[anchor], link[1])
			}
		}
		for _, path := range regexp.MustCompile("`(deploy/[a-z/]+|Dockerfile|compose.yaml|[a-z-]+\\.yaml)`").FindAllStringSubmatch(text, -1) {
			found := false
			for _, dir := range []string{"..", "kubernetes"} {
				_, err := os.Stat(filepath.Join(dir, path[1]))
				found = found || err == nil || path[1] == "secret.example.yaml"
			}
			require.True(t, found, path[1])
		}
	})

	t.Run("NamesSettingsAndCommandsThatThereAre", func(t *testing.T) {
		t.Parallel()
		text := runbook(t)
		known := settings(t)
		for _, name := range regexp.MustCompile("`([A-Z]+_[A-Z_]+)(?:=[^`]*)?`").FindAllStringSubmatch(text, -1) {
			if !strings.HasPrefix(name[1], "OTEL_") {
				require.Contains(t, known, name[1])
			}
		}
		external(t)
		binary := filepath.Join(t.TempDir(), "payments")
		build := exec.Command("go", "build", "-o", binary, "./cmd/payments")
		build.Dir = ".."
		output(t, build)
		shown := regexp.MustCompile("(?:`|(?m)^)payments ([a-z]+(?:\\s[a-z]+)?)(?: --once)?").FindAllStringSubmatch(text, -1)
		require.Greater(t, len(shown), 8)
		for _, command := range shown {
			output(t, exec.Command(binary, append(strings.Fields(command[1]), "-h")...))
		}
	})

	t.Run("ShowsQueriesThatPostgreSQLUnderstands", func(t *testing.T) {
		t.Parallel()
		external(t)
		s := newStack(t)
		s.run(t, "migrate", "migrate", "up")
		conn, err := pgx.Connect(t.Context(), s.database)
		require.NoError(t, err)
		defer conn.Close(t.Context())
		queries := blocks(t, "operations.md", " *sql")
		for _, inline := range regexp.MustCompile("`(SELECT [^`]+)`").FindAllStringSubmatch(runbook(t), -1) {
			queries = append(queries, strings.ReplaceAll(inline[1], "= …", "IS NULL"))
		}
		require.Greater(t, len(queries), 4)
		for _, query := range queries {
			if strings.HasPrefix(strings.TrimSpace(query), "SELECT") {
				_, err := conn.Exec(t.Context(), query)
				require.NoError(t, err, query)
			}
		}
	})
}

// What docs/pgbouncer.md tells PgBouncer and the database, as it stands there.
func TestPgBouncer(t *testing.T) {
	t.Parallel()
	external(t)
	pgbouncer := tool(t, "pgbouncer", "pgbouncer")
	s := newStack(t)
	s.run(t, "migrate", "migrate", "up")
	direct, err := pgx.ParseConfig(s.database)
	require.NoError(t, err)
	conn, err := pgx.ConnectConfig(t.Context(), direct)
	require.NoError(t, err)
	defer conn.Close(t.Context())
	_, err = conn.Exec(t.Context(), `ALTER DATABASE payments SET default_transaction_isolation = 'serializable'; CREATE ROLE payments LOGIN SUPERUSER PASSWORD 'payments'`)
	require.NoError(t, err)
	for _, block := range blocks(t, "pgbouncer.md", "sql") {
		_, err = conn.Exec(t.Context(), block)
		require.NoError(t, err, block)
	}

	// PgBouncer refuses to be root; whom it becomes has to read its files.
	dir, err := os.MkdirTemp("", "payments-test-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o755))
	port := freePort(t)
	ini := fmt.Sprintf(`[databases]
payments = host=%s port=%d user=payments password=payments
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %s
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 5
%s`, direct.Host, direct.Port, port, blocks(t, "pgbouncer.md", "ini")[0])
	require.NoError(t, os.WriteFile(filepath.Join(dir, "pgbouncer.ini"), []byte(ini), 0o644))
	args := []string{filepath.Join(dir, "pgbouncer.ini")}
	if os.Geteuid() == 0 {
		args = append([]string{"-u", "nobody"}, args...)
	}
	startProcess(t, exec.Command(pgbouncer, args...))

	s.database = fmt.Sprintf("postgres://payments@127.0.0.1:%s/payments?sslmode=disable&default_query_exec_mode=cache_describe", port)
	s.start(t, "gateway")
	await(t, s.url("gateway", "/charges"))
	for name := range s.file.replicas() {
		s.start(t, name)
	}
	for name := range s.file.replicas() {
		await(t, s.url(name, "/readyz"))
	}
	printed := s.run(t, "payments-1", "merchant", "create", "Shop")
	merchant := client{apiKey: regexp.MustCompile(`sk_\S+`).FindString(printed)}
	for i := range 10 {
		key := fmt.Sprint("pay-", i)
		payment, first := merchant.pay(t, s, "payments-1", key, "pm_ok")
		require.Equal(t, http.StatusCreated, first.status, first.body)
		require.Equal(t, first.body, merchant.post(t, s.url("payments-2", "/v1/payments"), key, payment).body)
	}

	// What the service asks for at a connection's start does not get past PgBouncer; the database sets it nevertheless.
	through, err := pgx.Connect(t.Context(), s.database)
	require.NoError(t, err)
	defer through.Close(t.Context())
	for setting, value := range map[string]string{
		"default_transaction_isolation": "read committed", "statement_timeout": "6s", "lock_timeout": "5s", "idle_in_transaction_session_timeout": "10s",
	} {
		var shown string
		require.NoError(t, through.QueryRow(t.Context(), "SHOW "+setting).Scan(&shown))
		require.Equal(t, value, shown, setting)
	}
}
