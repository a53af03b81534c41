package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// Violation is an invariant that did not hold.
type Violation string

// auditSQL keeps what the tables forget: every change of a status, and every change of a stored answer.
const auditSQL = `
CREATE TABLE chaos_audit (at timestamptz DEFAULT clock_timestamp(), relation text, name text, was text, became text);
CREATE FUNCTION chaos_audit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
	IF TG_TABLE_NAME = 'idempotency_keys' THEN
		INSERT INTO chaos_audit (relation, name, was, became) VALUES (TG_TABLE_NAME, NEW.key,
			concat_ws(' ', OLD.state, OLD.answer_status, md5(OLD.answer_body)), concat_ws(' ', NEW.state, NEW.answer_status, md5(NEW.answer_body)));
	ELSE
		INSERT INTO chaos_audit (relation, name, was, became) VALUES (TG_TABLE_NAME, NEW.id::text, OLD.status, NEW.status);
	END IF;
	RETURN NULL;
END
$$;
CREATE TRIGGER chaos_audit AFTER UPDATE ON idempotency_keys FOR EACH ROW
	WHEN (OLD.state <> 'in_progress') EXECUTE FUNCTION chaos_audit();
CREATE TRIGGER chaos_audit AFTER UPDATE ON payments FOR EACH ROW
	WHEN (OLD.status <> 'processing' AND OLD.status <> NEW.status) EXECUTE FUNCTION chaos_audit();
CREATE TRIGGER chaos_audit AFTER UPDATE ON refunds FOR EACH ROW
	WHEN (OLD.status <> 'processing') EXECUTE FUNCTION chaos_audit();
CREATE TRIGGER chaos_audit AFTER UPDATE ON orders FOR EACH ROW
	WHEN (OLD.status <> NEW.status AND NOT (OLD.status, NEW.status) IN (('open', 'paid'), ('open', 'canceled'), ('paid', 'refunded')))
	EXECUTE FUNCTION chaos_audit();
`

// rowInvariants are facts that must have no exception once everything is quiet. Each query returns the exceptions. They join, and look up
// nothing row by row: there is no index for them, and there should be none.
var rowInvariants = []struct{ fact, exceptions string }{
	{"what is final never changes", `
		SELECT concat_ws(' ', relation, name, 'was', was, 'became', became) FROM chaos_audit`},
	{"a key has one payment or refund, and it one key", `
		SELECT concat_ws(' ', 'gateway key', gateway_key, count(*)) FROM payments GROUP BY gateway_key HAVING count(*) <> 1
		UNION ALL SELECT concat_ws(' ', 'gateway key', gateway_key, count(*)) FROM refunds GROUP BY gateway_key HAVING count(*) <> 1
		UNION ALL SELECT concat_ws(' ', 'key', k.key) FROM idempotency_keys k WHERE k.route = 'POST /v1/payments'
			AND NOT EXISTS (SELECT FROM payments p WHERE p.id = k.resource_id)
		UNION ALL SELECT concat_ws(' ', 'payment', p.id, count(k)) FROM payments p
			LEFT JOIN idempotency_keys k ON k.resource_id = p.id GROUP BY p.merchant_id, p.id HAVING count(k) <> 1
		UNION ALL SELECT concat_ws(' ', 'refund', r.id, count(k)) FROM refunds r
			LEFT JOIN idempotency_keys k ON k.resource_id = r.id GROUP BY r.merchant_id, r.id HAVING count(k) <> 1`},
	{"key and payment have the same end", `
		SELECT concat_ws(' ', k.key, k.state, p.status, k.answer_status) FROM idempotency_keys k JOIN payments p ON p.id = k.resource_id
		WHERE (k.state, p.status, coalesce(k.answer_status, 0)) NOT IN
			(('in_progress', 'processing', 0), ('done', 'succeeded', 201), ('done', 'declined', 402), ('failed', 'failed', 402))
		UNION ALL
		SELECT concat_ws(' ', k.key, k.state, r.status, k.answer_status) FROM idempotency_keys k JOIN refunds r ON r.id = k.resource_id
		WHERE (k.state, r.status, coalesce(k.answer_status, 0)) NOT IN
			(('in_progress', 'processing', 0), ('done', 'succeeded', 201), ('done', 'declined', 402), ('failed', 'failed', 402))`},
	{"an order is paid exactly if it has one payment that succeeded", `
		SELECT concat_ws(' ', o.id, o.status, count(p)) FROM orders o LEFT JOIN payments p ON p.order_id = o.id AND p.status = 'succeeded'
			GROUP BY o.merchant_id, o.id HAVING count(p) <> (o.status IN ('paid', 'refunded'))::int
		UNION ALL SELECT concat_ws(' ', o.id, o.status, 'has a live payment') FROM orders o JOIN payments p ON p.order_id = o.id
			WHERE o.status = 'canceled' AND p.status IN ('processing', 'succeeded')`},
	{"refunds never exceed their payment, and its counters are their sums", `
		SELECT concat_ws(' ', p.id, p.amount, p.amount_reserved, p.amount_refunded) FROM payments p
		LEFT JOIN refunds r ON r.payment_id = p.id
		GROUP BY p.merchant_id, p.id
		HAVING p.amount_reserved <> coalesce(sum(r.amount) FILTER (WHERE r.status IN ('processing', 'succeeded')), 0)
			OR p.amount_refunded <> coalesce(sum(r.amount) FILTER (WHERE r.status = 'succeeded'), 0)
			OR p.amount_reserved > p.amount`},
	{"what is final has one event that says so, and nothing else has any", `
		SELECT concat_ws(' ', p.id, p.status, count(e)) FROM payments p
		LEFT JOIN events e ON e.resource_id = p.id AND e.type = 'payment.' || p.status
		GROUP BY p.merchant_id, p.id HAVING count(e) <> (p.status <> 'processing')::int
		UNION ALL SELECT concat_ws(' ', r.id, r.status, count(e)) FROM refunds r
		LEFT JOIN events e ON e.resource_id = r.id AND e.type = 'refund.' || r.status
		GROUP BY r.merchant_id, r.id HAVING count(e) <> (r.status <> 'processing')::int
		UNION ALL SELECT concat_ws(' ', resource_id, count(*), 'events') FROM events GROUP BY resource_id HAVING count(*) <> 1`},
}

// overdue looks at the keys that are in progress, and complains of those that have been so, while everything was up, for longer than
// [Settings.Quiet]. A key counts from when it was first seen here: its own time is by a clock that may be wrong.
func (w *World) overdue(ctx context.Context) (inProgress int, late []Violation, err error) {
	rows, err := w.database.current().Query(ctx, `
		SELECT key, concat_ws(' ', 'attempt', attempt, 'held by', holder, 'lease until', lease_expires_at, 'next look', next_look_at)
		FROM idempotency_keys WHERE state = 'in_progress' ORDER BY key`)
	if err != nil {
		return 0, nil, err
	}
	defer rows.Close()
	now, up, limit := time.Now(), w.up.Load(), w.Settings.Quiet()
	waiting := make(map[string]time.Time)
	for rows.Next() {
		var key, story string
		if err := rows.Scan(&key, &story); err != nil {
			return 0, nil, err
		}
		inProgress++
		since, seen := w.waiting[key]
		if !seen {
			since = now
		}
		if up != nil && now.Sub(*up) > limit && now.Sub(since) > limit {
			late = append(late, Violation(fmt.Sprintf("no key stays in progress for longer than %s: %s %s", limit, key, story)))
			since = now // The next complaint comes after as long again.
		}
		waiting[key] = since
	}
	if err := rows.Err(); err != nil {
		return 0, nil, err
	}
	w.waiting = waiting
	return inProgress, late, nil
}

// watch asks for overdue keys while the customers shop.
func (w *World) watch(ctx context.Context) (late []Violation) {
	for sleep(ctx, 250*time.Millisecond) {
		if w.up.Load() != nil { // Else there may be no database. Nor is there for what has an error; it is asked again in a moment.
			_, more, _ := w.overdue(ctx)
			late = append(late, more...)
		}
	}
	return late
}

// awaitQuiet waits until no key is in progress, or those that are have been so for too long.
func (w *World) awaitQuiet(ctx context.Context) (late []Violation, err error) {
	if err := w.awaitUp(ctx); err != nil {
		return nil, err
	}
	for {
		inProgress, more, err := w.overdue(ctx)
		late = append(late, more...)
		if err != nil || inProgress == 0 || len(late) >= inProgress {
			return late, err
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// Check holds everything against the gateway's ledger. Everything must be up, and no client at work.
func (w *World) Check(ctx context.Context, b *book) (violations []Violation, err error) {
	if violations, err = w.awaitQuiet(ctx); err != nil {
		return nil, err
	}
	for _, o := range b.operations {
		if !o.leaves && o.refused == "" && o.answer() == nil {
			violations = append(violations, Violation(fmt.Sprintf("a client that comes back gets a final answer: %s has none: %v", o.key, o.calls)))
		}
	}
	violations = append(violations, w.replay(ctx, b)...)
	pool := w.database.current()
	for _, invariant := range rowInvariants {
		rows, err := pool.Query(ctx, invariant.exceptions)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", invariant.fact, err)
		}
		exceptions, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", invariant.fact, err)
		}
		for _, e := range exceptions {
			violations = append(violations, Violation(invariant.fact+": "+e))
		}
	}
	for _, line := range w.logs(`panic`, 5) {
		violations = append(violations, Violation("nothing panics: "+line))
	}
	deadlocks, err := w.database.countDeadlocks()
	if err != nil {
		return nil, err
	}
	if deadlocks > 0 {
		violations = append(violations, Violation(fmt.Sprintf("there is no deadlock: there were %d", deadlocks)))
	}
	violations = append(violations, checkClocks(b)...)
	for _, o := range b.operations {
		if !o.linearizable() {
			violations = append(violations, Violation(fmt.Sprintf("one intent, one outcome: the history of %s is none: %v", o.key, o.calls)))
		}
		for _, c := range o.calls {
			if c.status != 0 && c.status != http.StatusAccepted && !c.isFinal() && !unfinished[c.slug] && !refusals[c.slug] {
				violations = append(violations, Violation(fmt.Sprintf("a careful client is never told such a thing: %s got %s: %s", o.key, c, c.body)))
			}
		}
	}
	ledger, err := w.gateway.ledger()
	if err != nil {
		return nil, err
	}
	violations = append(violations, w.checkIntents(ledger, b)...)
	rows, err := w.checkRows(ctx, ledger, b)
	return append(violations, rows...), err
}

// checkClocks knows that a replica's clock is as wrong as it was made: an order is as old as the replica that has made it believes.
func checkClocks(b *book) (violations []Violation) {
	for _, o := range b.operations {
		for _, c := range o.calls {
			if o.kind != "order" || c.status != http.StatusCreated || c.replayed || c.restarted {
				continue
			}
			var made struct {
				At time.Time `json:"created_at"`
			}
			if err := json.Unmarshal(c.body, &made); err != nil {
				violations = append(violations, Violation(fmt.Sprintf("an order says when it was made: %s: %v", c.body, err)))
				continue
			}
			if at := made.At.Add(-c.clock); at.Before(c.sent.Add(-time.Second)) || at.After(c.received.Add(time.Second)) {
				violations = append(violations, Violation(fmt.Sprintf("a replica's clock is as wrong as it was made: replica %d, %s wrong, made %s at %s, asked at %s",
					c.replica+1, c.clock, o.key, made.At, c.sent)))
			}
		}
	}
	return violations
}

// ends are the gateway's last words and what each is called elsewhere.
var ends = map[string]struct {
	row    string          // the status of the payment's or refund's row
	answer map[string]bool // the slugs of the final answer; empty is a 201
}{
	"approved": {"succeeded", map[string]bool{"": true}},
	"declined": {"declined", map[string]bool{"payment-declined": true, "refund-declined": true}},
	"canceled": {"failed", map[string]bool{"payment-failed": true, "refund-failed": true}},
}

// intent is what an entry of the ledger, a row and an operation have in common.
type intent struct{ kind, gatewayKey string }

// checkIntents holds the ledger against what the clients have asked for and were told. It believes nothing that the service has written.
func (w *World) checkIntents(ledger []entry, b *book) (violations []Violation) {
	say := func(format string, args ...any) {
		violations = append(violations, Violation(fmt.Sprintf(format, args...)))
	}
	asked := make(map[intent]*operation)
	for _, o := range b.operations {
		if o.kind == "payment" || o.kind == "refund" {
			asked[intent{o.ledgerKind(), w.gatewayKey(o)}] = o
		}
	}
	words := make(map[intent]entry)
	paid := make(map[string]entry) // by the order that the client has named
	amounts, returned := make(map[string]int64), make(map[string]int64)
	for _, e := range ledger {
		o := asked[intent{e.Kind, e.Key}]
		if o == nil {
			say("every %s in the ledger is one of ours: %+v", e.Kind, e)
			continue
		}
		words[intent{e.Kind, e.Key}] = e
		if e.Status != "canceled" && (e.Amount != o.amount || e.Currency != o.currency || o.of != nil && e.ChargeKey != w.gatewayKey(o.of)) {
			say("the gateway is asked for what the client has asked for: the ledger has %+v, %s was for %d %s", e, o.key, o.amount, o.currency)
		}
		// The gateway's own limit must never be what saves us.
		if e.DeclineCode == "amount_exceeds_charge" || e.DeclineCode == "charge_not_refundable" {
			say("the service never asks for more than is left of a charge: %+v", e)
		}
		if e.Status != "approved" {
			continue
		}
		if e.Kind == "refund" {
			returned[e.ChargeKey] += e.Amount
			continue
		}
		amounts[e.Key] = e.Amount
		if other, twice := paid[o.orderID]; twice {
			say("an order has at most one charge: %s has %+v and %+v", o.orderID, other, e)
		}
		paid[o.orderID] = e
	}
	for key, sum := range returned {
		if sum > amounts[key] {
			say("refunds never exceed their charge: %s has %d of %d", key, sum, amounts[key])
		}
	}
	for i, o := range asked {
		if answer, e := o.answer(), words[i]; answer != nil && !ends[e.Status].answer[answer.slug] {
			say("what a client was told is so: %s got %s, the ledger has %+v", o.key, answer, e)
		}
	}
	return violations
}

// movement is a payment or refund as the database has it.
type movement struct {
	ID, Key, Kind, Status, GatewayKey, Currency, Reference string
	Amount                                                 int64
}

// checkRows holds the ledger against the rows, and these against what the clients were told.
func (w *World) checkRows(ctx context.Context, ledger []entry, b *book) (violations []Violation, err error) {
	rows, err := w.database.current().Query(ctx, `
		SELECT p.id::text, k.key, 'charge', p.status, p.gateway_key, p.currency, coalesce(p.gateway_reference, ''), p.amount
		FROM payments p JOIN idempotency_keys k ON k.resource_id = p.id
		UNION ALL
		SELECT r.id::text, k.key, 'refund', r.status, r.gateway_key, r.currency, coalesce(r.gateway_reference, ''), r.amount
		FROM refunds r JOIN idempotency_keys k ON k.resource_id = r.id`)
	if err != nil {
		return nil, err
	}
	movements, err := pgx.CollectRows(rows, pgx.RowToStructByPos[movement])
	if err != nil {
		return nil, err
	}
	say := func(format string, args ...any) {
		violations = append(violations, Violation(fmt.Sprintf(format, args...)))
	}
	known := make(map[intent]movement, len(movements))
	for _, m := range movements {
		known[intent{m.Kind, m.GatewayKey}] = m
	}
	words := make(map[intent]entry, len(ledger))
	for _, e := range ledger {
		i := intent{e.Kind, e.Key}
		words[i] = e
		m := known[i]
		if end := ends[e.Status].row; m.Status != end {
			say("every %s %s is one that %s: the ledger has %+v, the database %+v", e.Status, e.Kind, end, e, m)
		} else if e.Status == "approved" && (m.Amount != e.Amount || m.Currency != e.Currency || m.Reference != e.ID) {
			say("a row has the ledger's amount, currency and reference: the ledger has %+v, the database %+v", e, m)
		}
	}
	for i, m := range known {
		if e := words[i]; m.Status != "processing" && ends[e.Status].row != m.Status {
			say("every %s that %s has the gateway's word for it: the ledger has %+v, the database %+v", m.Kind, m.Status, e, m)
		}
	}
	for _, o := range b.operations {
		if answer := o.answer(); answer != nil && (o.kind == "payment" || o.kind == "refund") {
			if m := known[intent{o.ledgerKind(), w.gatewayKey(o)}]; m.ID != answer.resource {
				say("what a client was told is so: %s got %s about %s, the database has %+v", o.key, answer, answer.resource, m)
			}
		}
	}
	return violations, nil
}

// replay asks once more under every key but those that the rules have refused. Whoever has had a final answer gets its bytes; whoever has
// not, because it has left or in vain, gets one now, or a refusal if the service has never heard of it.
func (w *World) replay(ctx context.Context, b *book) (violations []Violation) {
	var mu sync.Mutex
	var all sync.WaitGroup
	say := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		violations = append(violations, Violation(fmt.Sprintf(format, args...)))
	}
	slots := make(chan struct{}, 16)
	for _, o := range slices.Clone(b.operations) {
		if o.refused != "" {
			continue
		}
		last := o.answer()
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			var fresh call
			for deadline := time.Now().Add(w.Settings.Quiet()); time.Now().Before(deadline); time.Sleep(100 * time.Millisecond) {
				// The odd connection breaks on a busy machine, and an intent that begins only now may have to be asked for again.
				if fresh = w.send(ctx, o, rand.IntN(len(w.replicas)), ""); fresh.isFinal() || refusals[fresh.slug] {
					break
				}
			}
			switch {
			case last == nil && !fresh.isFinal() && !refusals[fresh.slug]:
				say("whoever asks gets an answer: %s, now %s %s", o.key, fresh, fresh.body)
			case last != nil && (fresh.status != last.status || string(fresh.body) != string(last.body) || !fresh.replayed):
				say("a replay has the bytes of the last answer: %s had %s %s, now %s %s (replayed: %t)", o.key, last, last.body, fresh, fresh.body, fresh.replayed)
			}
		})
	}
	all.Wait()
	return violations
}
