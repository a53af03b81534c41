package dbtest

import (
	"os"
	"os/exec"
	"regexp"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"example.com/payments/db"
	"example.com/payments/internal/devdb"
)

// inChild marks a run of this binary that another test has started.
const inChild = "DBTEST_CHILD"

func TestMain(m *testing.M) { Main(m) }

// runChild runs the tests of that name in a process of their own and returns what they said.
func runChild(t *testing.T, test string, env ...string) (string, error) {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), self, "-test.v", "-test.run=^"+test+"$")
	cmd.Env = append(append(os.Environ(), inChild+"=1"), env...)
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func count(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), sql, args...).Scan(&n))
	return n
}

func TestNew(t *testing.T) {
	t.Parallel()

	t.Run("GivesEachTestADatabaseOfItsOwn", func(t *testing.T) {
		t.Parallel()
		one, other := Pool(t, New(t)), Pool(t, New(t))
		_, err := one.Exec(t.Context(), "CREATE TABLE mine AS SELECT 1")
		require.NoError(t, err)
		_, err = other.Exec(t.Context(), "CREATE TABLE mine AS SELECT 1 UNION ALL SELECT 2")
		require.NoError(t, err)
		require.Equal(t, 1, count(t, one, "SELECT count(*) FROM mine"))
		require.Equal(t, 2, count(t, other, "SELECT count(*) FROM mine"))
	})

	t.Run("GivesAMigratedDatabase", func(t *testing.T) {
		t.Parallel()
		version, err := db.Status(t.Context(), Pool(t, New(t)))
		require.NoError(t, err)
		require.Equal(t, db.Version{Number: db.Needed()}, version)
	})

	t.Run("WorksForManyTestsAtOnce", func(t *testing.T) {
		t.Parallel()
		for range 8 {
			t.Run("One", func(t *testing.T) {
				t.Parallel()
				require.Equal(t, 1, count(t, Pool(t, New(t)), "SELECT count(*) FROM schema_migrations"))
			})
		}
	})
}

func TestPoolSpeaksUTC(t *testing.T) {
	t.Parallel()
	var zone string
	require.NoError(t, Pool(t, New(t)).QueryRow(t.Context(), "SHOW timezone").Scan(&zone))
	require.Equal(t, "UTC", zone)
}

func TestDatabaseURL(t *testing.T) {
	t.Parallel()
	server, err := devdb.Start(t.Context(), devdb.Options{Throwaway: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	env := "DATABASE_URL=" + server.URL("postgres")
	pool := Pool(t, server.URL("postgres"))
	databases := func(t *testing.T) int {
		return count(t, pool, "SELECT count(*) FROM pg_database WHERE datname LIKE 'payments_%'")
	}

	// In order: they count the databases of one server.
	t.Run("IsUsedAndLeftAsItWas", func(t *testing.T) {
		out, err := runChild(t, "TestNew", env)
		require.NoError(t, err, out)
		require.Contains(t, out, "using DATABASE_URL")
		require.Zero(t, databases(t))
	})
	t.Run("KeepsTheDatabaseOfAFailedTestAndSaysItsName", func(t *testing.T) {
		out, err := runChild(t, "TestThatFails", env)
		require.Error(t, err)
		kept := regexp.MustCompile(`kept for a look at it: (payments_test_\w+)`).FindStringSubmatch(out)
		require.NotNil(t, kept, out)
		require.Equal(t, 1, count(t, pool, "SELECT count(*) FROM pg_database WHERE datname = $1", kept[1]))
		require.Equal(t, 1, databases(t), "the template is dropped")
	})
}

// TestThatFails fails when another test has started it to see just that.
func TestThatFails(t *testing.T) {
	url := New(t)
	if os.Getenv(inChild) != "" {
		t.Fatal("on purpose, with ", url)
	}
}

func TestWithoutAPostgreSQLFailsAndSaysHowToGetOne(t *testing.T) {
	t.Parallel()
	out, err := runChild(t, "TestPoolSpeaksUTC", "DATABASE_URL=", "PG_BINDIR=/nonexistent")
	require.Error(t, err)
	require.Contains(t, out, "--- FAIL: TestPoolSpeaksUTC")
	require.Contains(t, out, "PG_BINDIR=/nonexistent")
	require.Contains(t, out, "install PostgreSQL")
	require.Contains(t, out, "DATABASE_URL")
}

func TestDatabaseIsPutIntoEitherFormOfAddress(t *testing.T) {
	t.Parallel()
	for _, address := range []string{
		"postgres://me:p%40ss@127.0.0.1:5433/postgres?sslmode=disable",
		"host=127.0.0.1 port=5433 user=me password=p@ss dbname=postgres sslmode=disable",
	} {
		config, err := pgx.ParseConfig(withDatabase(address, "other"))
		require.NoError(t, err)
		require.Equal(t, "other", config.Database)
		require.Equal(t, "p@ss", config.Password)
		require.EqualValues(t, 5433, config.Port)
	}
}
