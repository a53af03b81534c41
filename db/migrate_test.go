package db_test

import (
	"context"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/golang-migrate/migrate/v4/database"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"example.com/payments/db"
	"example.com/payments/internal/dbtest"
)

func TestMain(m *testing.M) {
	// Some of these tests wait for a lock, and for nothing else.
	_ = flag.Set("test.parallel", "8")
	dbtest.Main(m)
}

// testBundle is a database with all migrations, or with none.
type testBundle struct {
	url  string
	pool *pgxpool.Pool
}

func setup(t *testing.T) *testBundle {
	t.Helper()
	url := dbtest.New(t)
	return &testBundle{url, dbtest.Pool(t, url)}
}

func setupEmpty(t *testing.T) *testBundle {
	t.Helper()
	b := setup(t)
	b.exec(t, "DROP SCHEMA public CASCADE; CREATE SCHEMA public")
	return b
}

func (b *testBundle) exec(t *testing.T, sql string) {
	t.Helper()
	_, err := b.pool.Exec(t.Context(), sql)
	require.NoError(t, err)
}

func (b *testBundle) status(t *testing.T) db.Version {
	t.Helper()
	version, err := db.Status(t.Context(), b.pool)
	require.NoError(t, err)
	return version
}

// schema lists all that the migrations can make, and how it is made, but for the table of versions.
func (b *testBundle) schema(t *testing.T) []string {
	t.Helper()
	rows, err := b.pool.Query(t.Context(), `
		WITH relations AS (
			SELECT oid, relname, relkind FROM pg_class
			WHERE relnamespace = 'public'::regnamespace AND relname NOT LIKE 'schema_migrations%'
		)
		SELECT format('relation %s %s: %s', relkind, relname, obj_description(oid)) FROM relations
		UNION ALL
		SELECT format('column %s.%s %s %s %s: %s', relname, attname, format_type(atttypid, atttypmod), attnotnull, pg_get_expr(adbin, adrelid), col_description(attrelid, attnum))
		FROM pg_attribute JOIN relations ON oid = attrelid LEFT JOIN pg_attrdef ON adrelid = attrelid AND adnum = attnum
		WHERE attnum > 0 AND NOT attisdropped AND relkind = 'r'
		UNION ALL
		SELECT format('constraint %s.%s %s', relname, conname, pg_get_constraintdef(c.oid)) FROM pg_constraint AS c JOIN relations ON relations.oid = conrelid
		UNION ALL
		SELECT format('index %s', pg_get_indexdef(oid)) FROM relations WHERE relkind = 'i'
		UNION ALL
		SELECT format('trigger %s', pg_get_triggerdef(t.oid)) FROM pg_trigger AS t JOIN relations ON relations.oid = tgrelid WHERE NOT tgisinternal
		UNION ALL
		SELECT format('function %s', pg_get_functiondef(oid)) FROM pg_proc WHERE pronamespace = 'public'::regnamespace
		UNION ALL
		SELECT format('type %s', typname) FROM pg_type WHERE typnamespace = 'public'::regnamespace AND typtype IN ('e', 'd')
		UNION ALL
		SELECT format('extension %s', extname) FROM pg_extension
		ORDER BY 1`)
	require.NoError(t, err)
	defer rows.Close()
	var lines []string
	for rows.Next() {
		var line string
		require.NoError(t, rows.Scan(&line))
		lines = append(lines, line)
	}
	require.NoError(t, rows.Err())
	return lines
}

func TestMigrations(t *testing.T) {
	t.Parallel()

	t.Run("AreNumberedWithoutGapsAndEachHasItsDown", func(t *testing.T) {
		t.Parallel()
		files, err := fs.Glob(os.DirFS("."), "migrations/*.sql")
		require.NoError(t, err)
		require.Len(t, files, 2*int(db.Needed()))
		for i, down := range files {
			if i%2 == 0 {
				require.True(t, strings.HasPrefix(down, fmt.Sprintf("migrations/%06d_", i/2+1)), down)
				require.Equal(t, strings.TrimSuffix(down, ".down.sql"), strings.TrimSuffix(files[i+1], ".up.sql"))
			}
		}
	})

	t.Run("GoUpAndDownAndUpAgain", func(t *testing.T) {
		t.Parallel()
		b := setupEmpty(t)
		require.Zero(t, b.status(t))
		empty := b.schema(t)

		require.NoError(t, db.Up(t.Context(), b.url))
		require.Equal(t, db.Version{Number: db.Needed()}, b.status(t))
		full := b.schema(t)
		require.NoError(t, db.Up(t.Context(), b.url), "a database that has them all is no error")

		require.NoError(t, db.Down(t.Context(), b.url, int(db.Needed())))
		require.Zero(t, b.status(t))
		require.Equal(t, empty, b.schema(t), "down leaves nothing")
		require.NoError(t, db.Up(t.Context(), b.url))
		require.Equal(t, full, b.schema(t))
	})

	t.Run("EachDownUndoesItsUp", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		full := b.schema(t)
		last := full
		for steps := 1; steps <= int(db.Needed()); steps++ {
			require.NoError(t, db.Down(t.Context(), b.url, steps))
			require.Equal(t, db.Needed()-uint(steps), b.status(t).Number)
			less := b.schema(t)
			require.Subset(t, last, less, "going down makes nothing")
			require.NotEqual(t, last, less)
			last = less
			// Had a down left something of its up, this up would find it in its way; had it taken more, it would be missing after.
			require.NoError(t, db.Up(t.Context(), b.url))
			require.Equal(t, full, b.schema(t), "down by %d and up again", steps)
		}
	})

	t.Run("DownSaysWhenThereIsNothingLeftToTakeBack", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		require.ErrorContains(t, db.Down(t.Context(), b.url, int(db.Needed())+1), fmt.Sprintf("%d migrations were taken back", db.Needed()))
		require.Zero(t, b.status(t))
		require.ErrorContains(t, db.Down(t.Context(), b.url, 1), "no migration to take back")
	})

	t.Run("LeaveWhatANewerBuildHasMadeAlone", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		before := b.schema(t)
		b.exec(t, "UPDATE schema_migrations SET version = 1000")
		require.NoError(t, db.Up(t.Context(), b.url))
		require.ErrorContains(t, db.Down(t.Context(), b.url, 1), "version 1000")
		require.Equal(t, db.Version{Number: 1000}, b.status(t))
		require.Equal(t, before, b.schema(t))
	})

	t.Run("FiveAtOnceOnAnEmptyDatabaseAllEndWell", func(t *testing.T) {
		t.Parallel()
		b := setupEmpty(t)
		gate, errs := make(chan struct{}), make([]error, 5)
		var group sync.WaitGroup
		for i := range errs {
			group.Go(func() {
				<-gate
				errs[i] = db.Up(t.Context(), b.url)
			})
		}
		close(gate)
		group.Wait()
		for _, err := range errs {
			require.NoError(t, err)
		}
		require.Equal(t, db.Version{Number: db.Needed()}, b.status(t))
	})

	t.Run("GiveUpOnALockThatIsHeld", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		conn, err := b.pool.Acquire(t.Context())
		require.NoError(t, err)
		defer conn.Release()
		name := conn.Conn().Config().Database
		// The library's own lock, as another migration that hangs would hold it.
		lock, err := database.GenerateAdvisoryLockId(name, "public", "schema_migrations")
		require.NoError(t, err)
		var held bool
		require.NoError(t, conn.QueryRow(t.Context(), "SELECT pg_try_advisory_lock($1::bigint)", lock).Scan(&held))
		require.True(t, held)

		started := time.Now()
		err = db.Up(t.Context(), b.url)
		require.ErrorIs(t, err, db.ErrLocked)
		require.Greater(t, time.Since(started), db.LockTimeout-time.Second, "it waits first")
		require.Less(t, time.Since(started), 2*db.LockTimeout)
		var waiting int
		require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = $1)", name).Scan(&waiting))
		require.Zero(t, waiting, "no session is left behind")

		_, err = conn.Exec(t.Context(), "SELECT pg_advisory_unlock($1::bigint)", lock)
		require.NoError(t, err)
		require.NoError(t, db.Up(t.Context(), b.url))
	})

	t.Run("GiveUpOnATableThatIsHeld", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		tx, err := b.pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		_, err = tx.Exec(t.Context(), "LOCK TABLE refunds IN ACCESS SHARE MODE")
		require.NoError(t, err)
		err = db.Down(t.Context(), b.url, 1)
		require.ErrorIs(t, err, db.ErrLocked)
		require.True(t, b.status(t).Dirty, "it failed half way")
	})

	t.Run("SayThatOneHasFailedHalfWay", func(t *testing.T) {
		t.Parallel()
		b := setupEmpty(t)
		b.exec(t, "CREATE TABLE orders (in_the_way int)")
		require.ErrorContains(t, db.Up(t.Context(), b.url), "orders")
		require.Equal(t, db.Version{Number: 3, Dirty: true}, b.status(t))
		before := b.schema(t)
		err := db.Up(t.Context(), b.url)
		require.ErrorContains(t, err, "migration 3 failed half way")
		require.Equal(t, before, b.schema(t))
		require.ErrorContains(t, db.Down(t.Context(), b.url, 1), "migration 3 failed half way")
	})

	t.Run("SayThatTheyWereInterrupted", func(t *testing.T) {
		t.Parallel()
		b := setupEmpty(t)
		b.exec(t, "CREATE TABLE schema_migrations (version bigint NOT NULL PRIMARY KEY, dirty boolean NOT NULL)")
		tx, err := b.pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		_, err = tx.Exec(t.Context(), "LOCK TABLE schema_migrations")
		require.NoError(t, err)

		ctx, interrupt := context.WithCancel(t.Context())
		got := make(chan error, 1)
		go func() { got <- db.Up(ctx, b.url) }()
		require.Eventually(t, func() bool {
			var waits bool
			err := b.pool.QueryRow(t.Context(), "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')").Scan(&waits)
			return err == nil && waits
		}, 10*time.Second, 10*time.Millisecond)
		interrupt()
		require.NoError(t, tx.Rollback(t.Context()))
		require.ErrorIs(t, <-got, context.Canceled)
		require.False(t, b.status(t).Dirty)
		require.NoError(t, db.Up(t.Context(), b.url))
	})
}
