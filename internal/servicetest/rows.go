package servicetest

import (
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
)

// Key is a key's row as a test looks at it. What is relative is so by the database's clock.
type Key struct {
	State            string
	Mode             string
	Attempt          int
	Holder           string
	RequestID        string
	LeaseID          *uuid.UUID
	LeaseLeft        time.Duration
	OutcomeUncertain bool
	AbandonedFor     *time.Duration
	NextLookIn       *time.Duration
	AnswerStatus     *int
	ExpiresIn        *time.Duration
	ResourceID       uuid.UUID
}

// Key reads the row of one of the first merchant's keys.
func (w *World) Key(key string) Key {
	w.t.Helper()
	rows, err := w.DB.Query(w.t.Context(), `
		SELECT state, mode, attempt, holder, request_id, lease_id,
			coalesce(lease_expires_at - clock_timestamp(), '0') AS lease_left, outcome_uncertain,
			clock_timestamp() - abandoned_at AS abandoned_for, next_look_at - clock_timestamp() AS next_look_in,
			answer_status, expires_at - clock_timestamp() AS expires_in, resource_id
		FROM idempotency_keys WHERE merchant_id = $1 AND key = $2`, w.Merchant.ID, key)
	if err != nil {
		w.t.Fatal(err)
	}
	row, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[Key])
	if err != nil {
		w.t.Fatalf("read key: %v", err)
	}
	return row
}

// HasKey tells whether the first merchant's key has a row.
func (w *World) HasKey(key string) bool {
	w.t.Helper()
	return w.Rows("idempotency_keys WHERE merchant_id = $1 AND key = $2", w.Merchant.ID, key) == 1
}

// NewOrders puts n open orders of the first merchant into the database, as [Client.NewOrder] would have, and returns their ids.
func (w *World) NewOrders(n int) []string {
	w.t.Helper()
	rows, err := w.DB.Query(w.t.Context(), `
		INSERT INTO orders (merchant_id, id, status, amount, currency, metadata, created_at)
		SELECT $1, gen_random_uuid(), 'open', 1999, 'EUR', '{}', now() FROM generate_series(1, $2)
		RETURNING id::text`, w.Merchant.ID, n)
	if err != nil {
		w.t.Fatal(err)
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		w.t.Fatal(err)
	}
	return ids
}

// Rows counts the rows of what follows FROM.
func (w *World) Rows(from string, args ...any) (n int) {
	w.t.Helper()
	if err := w.DB.QueryRow(w.t.Context(), "SELECT count(*) FROM "+from, args...).Scan(&n); err != nil {
		w.t.Fatal(err)
	}
	return n
}

// Exec runs a statement and returns how many rows it has changed.
func (w *World) Exec(sql string, args ...any) int {
	w.t.Helper()
	w.altered = w.altered || alters(sql)
	tag, err := w.DB.Exec(w.t.Context(), sql, args...)
	if err != nil {
		w.t.Fatal(err)
	}
	return int(tag.RowsAffected())
}

// ExpireLease moves the key's row to a moment after the end of its lease.
func (w *World) ExpireLease(key string) {
	w.t.Helper()
	if left := w.Key(key).LeaseLeft; left > 0 {
		w.MoveBack(key, left+time.Millisecond)
	}
}

// MoveBack moves the key's row into the past: everything about it has happened, and will happen, by so much earlier.
func (w *World) MoveBack(key string, by time.Duration) {
	w.t.Helper()
	n := w.Exec(`
		UPDATE idempotency_keys
		SET lease_expires_at = lease_expires_at - $3::interval, abandoned_at = abandoned_at - $3::interval,
			next_look_at = next_look_at - $3::interval, final_at = final_at - $3::interval, expires_at = expires_at - $3::interval
		WHERE merchant_id = $1 AND key = $2`, w.Merchant.ID, key, by)
	if n != 1 {
		w.t.Fatalf("move the key's row: %d rows", n)
	}
}

// TerminateSessions has the database end the replicas' sessions.
func (w *World) TerminateSessions() {
	w.t.Helper()
	w.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'payments'`)
}

// Breaks has the database refuse an INSERT or UPDATE of a table with an SQLSTATE, until mended.
func (w *World) Breaks(operation, table, sqlstate string) (mend func()) {
	w.t.Helper()
	w.Exec(`CREATE FUNCTION breaks() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'broken by the test' USING ERRCODE = '` + sqlstate + `'; END $$`)
	w.Exec(`CREATE TRIGGER breaks BEFORE ` + operation + ` ON ` + table + ` FOR EACH ROW EXECUTE FUNCTION breaks()`)
	return func() {
		w.t.Helper()
		w.Exec(`DROP TRIGGER breaks ON ` + table)
		w.Exec(`DROP FUNCTION breaks`)
	}
}

// GatewayKey is the key by which the gateway knows a payment or refund.
func (w *World) GatewayKey(table string, id uuid.UUID) (key string) {
	w.t.Helper()
	if err := w.DB.QueryRow(w.t.Context(), "SELECT gateway_key FROM "+table+" WHERE id = $1", id).Scan(&key); err != nil {
		w.t.Fatal(err)
	}
	return key
}
