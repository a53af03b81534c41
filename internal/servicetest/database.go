package servicetest

import (
	"context"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"example.com/payments/internal/dbtest"
)

// A world's database is its own from beginning to end. Making one takes longer than most of what happens in it, so one whose test has
// passed, and that nobody has altered, is emptied and given to the next world.
var spare struct {
	mu   sync.Mutex
	urls []string
}

func (w *World) openDatabase() {
	w.t.Helper()
	spare.mu.Lock()
	if n := len(spare.urls); n > 0 {
		w.DatabaseURL, spare.urls = spare.urls[n-1], spare.urls[:n-1]
	}
	spare.mu.Unlock()
	if w.DatabaseURL == "" {
		w.DatabaseURL = dbtest.New(w.t)
	}
	w.DB = dbtest.Pool(w.t, w.DatabaseURL)
}

// passOn empties the database for the next world. On a server of somebody else's, dbtest drops it instead.
func (w *World) passOn() {
	if w.t.Failed() || w.altered || os.Getenv("DATABASE_URL") != "" {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := empty(ctx, w.DB); err != nil {
		w.t.Logf("the database is not passed on: %v", err)
		return
	}
	spare.mu.Lock()
	defer spare.mu.Unlock()
	spare.urls = append(spare.urls, w.DatabaseURL)
}

func empty(ctx context.Context, db *pgxpool.Pool) error {
	for {
		var left int
		err := db.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'payments'`).Scan(&left)
		if err != nil {
			return err
		}
		if left == 0 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	// As a replica, nobody asks for triggers or foreign keys.
	_, err := db.Exec(ctx, `
		SET session_replication_role = replica;
		DO $$
		DECLARE
			name regclass;
		BEGIN
			FOR name IN SELECT oid FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND relname <> 'schema_migrations' LOOP
				EXECUTE format('DELETE FROM %s', name);
			END LOOP;
		END $$;
		RESET session_replication_role`)
	return err
}

// alters reports whether a statement leaves more behind than rows.
func alters(sql string) bool {
	for _, word := range []string{"ALTER", "ANALYZE", "CREATE", "DROP"} {
		if strings.HasPrefix(strings.TrimSpace(sql), word) {
			return true
		}
	}
	return false
}
