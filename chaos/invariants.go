package chaos

import (
	"context"
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

// awaitQuiet waits until no key is in progress, and says which still are when the time is over.
func (w *World) awaitQuiet(ctx context.Context) (left []Violation, err error) {
	var keys []string
	for deadline := time.Now().Add(w.Settings.Quiet()); ; time.Sleep(50 * time.Millisecond) {
		rows, err := w.database.current().Query(ctx, `
			SELECT concat_ws(' ', key, 'attempt', attempt, 'held by', holder, 'lease until', lease_expires_at, 'next look', next_look_at)
			FROM idempotency_keys WHERE state = 'in_progress' ORDER BY key`)
		if err != nil {
			return nil, err
		}
		if keys, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
			return nil, err
		}
		if len(keys) == 0 || time.Now().After(deadline) {
			break
		}
	}
	for _, key := range keys {
		left = append(left, Violation(fmt.Sprintf("no key stays in progress for longer than %s: %s", w.Settings.Quiet(), key)))
	}
	return left, nil
}

// Check holds everything against the gateway's ledger. Everything must be up, and no client at work.
func (w *World) Check(ctx context.Context, b *book) (violations []Violation, err error) {
	if violations, err = w.awaitQuiet(ctx); err != nil {
		return nil, err
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
	money, err := w.checkLedger(ctx, b)
	return append(violations, money...), err
}

// movement is a payment or refund as the database has it.
type movement struct {
	ID, Key, Status, GatewayKey, Currency string
	Owner                                 string // the order of a payment, the charge's gateway key of a refund
	Reference, FailureCode                *string
	Amount                                int64
}

func (w *World) movements(ctx context.Context, sql string) (map[string]movement, error) {
	rows, err := w.database.current().Query(ctx, sql)
	if err != nil {
		return nil, err
	}
	list, err := pgx.CollectRows(rows, pgx.RowToStructByPos[movement])
	byGatewayKey := make(map[string]movement, len(list))
	for _, m := range list {
		byGatewayKey[m.GatewayKey] = m
	}
	return byGatewayKey, err
}

// checkLedger compares the gateway's ledger with the database and with what clients were told.
func (w *World) checkLedger(ctx context.Context, b *book) (violations []Violation, err error) {
	charges, err := w.gateway.ledger(ctx, "charges")
	if err != nil {
		return nil, err
	}
	refunds, err := w.gateway.ledger(ctx, "refunds")
	if err != nil {
		return nil, err
	}
	payments, err := w.movements(ctx, `
		SELECT p.id::text, k.key, p.status, p.gateway_key, p.currency, p.order_id::text, p.gateway_reference, p.failure_code, p.amount
		FROM payments p JOIN idempotency_keys k ON k.resource_id = p.id`)
	if err != nil {
		return nil, err
	}
	givenBack, err := w.movements(ctx, `
		SELECT r.id::text, k.key, r.status, r.gateway_key, r.currency, p.gateway_key, r.gateway_reference, r.failure_code, r.amount
		FROM refunds r JOIN idempotency_keys k ON k.resource_id = r.id JOIN payments p ON p.id = r.payment_id`)
	if err != nil {
		return nil, err
	}
	say := func(format string, args ...any) {
		violations = append(violations, Violation(fmt.Sprintf(format, args...)))
	}

	sameMoney := func(what string, ledger []entry, known map[string]movement) map[string]entry {
		approved := make(map[string]entry)
		for _, e := range ledger {
			m, ok := known[e.Key]
			switch {
			case !ok:
				say("every %s in the ledger is one of ours: %+v", what, e)
			case e.Status == "approved" && (m.Status != "succeeded" || m.Amount != e.Amount || m.Currency != e.Currency || m.Reference == nil || *m.Reference != e.ID):
				say("every approved %s is one that succeeded, amount by amount: the ledger has %+v, the database %+v", what, e, m)
			case e.Status == "declined" && m.Status != "declined":
				say("every declined %s is declined: the ledger has %+v, the database %+v", what, e, m)
			}
			if e.Status == "approved" {
				if _, twice := approved[e.Key]; twice {
					say("a key has one %s: %+v", what, e)
				}
				approved[e.Key] = e
			}
		}
		for key, m := range known {
			if _, ok := approved[key]; m.Status == "succeeded" && !ok {
				say("every %s that succeeded is approved in the ledger: %+v", what, m)
			}
		}
		return approved
	}
	approved := sameMoney("charge", charges, payments)
	sameMoney("refund", refunds, givenBack)

	orders := make(map[string]string)
	for key := range approved {
		order := payments[key].Owner
		if other, twice := orders[order]; twice && order != "" {
			say("an order has at most one charge: %s has %s and %s", order, other, key)
		}
		orders[order] = key
	}
	returned := make(map[string]int64)
	for _, e := range refunds {
		if e.Status == "approved" {
			returned[e.ChargeKey] += e.Amount
		}
		// The gateway's own limit must never be what saves us.
		if e.DeclineCode == "amount_exceeds_charge" || e.DeclineCode == "charge_not_refundable" {
			say("the service never asks for more than is left of a charge: %+v", e)
		}
	}
	for key, sum := range returned {
		if sum > approved[key].Amount {
			say("refunds never exceed their charge: %s has %d of %d", key, sum, approved[key].Amount)
		}
	}

	for _, o := range b.operations {
		if !o.linearizable() {
			say("one intent, one outcome: the history of %s is none: %v", o.key, o.calls)
		}
		for _, c := range o.calls {
			if c.status != 0 && c.status != http.StatusAccepted && !c.isFinal() && !unfinished[c.slug] && !refusals[c.slug] {
				say("a careful client is never told such a thing: %s got %s: %s", o.key, c, c.body)
			}
		}
		answer := o.answer()
		if answer == nil || o.kind != "payment" && o.kind != "refund" {
			continue
		}
		known := payments
		if o.kind == "refund" {
			known = givenBack
		}
		m := known[w.gatewayKey(o)]
		if m.ID != answer.resource || (answer.status == http.StatusCreated) != (m.Status == "succeeded") {
			say("what a client was told is so: %s got %s about %s, the database has %+v", o.key, answer, answer.resource, m)
		}
	}
	return violations, nil
}

// replay asks once more under every key that has an answer, and under those whose client has left.
func (w *World) replay(ctx context.Context, b *book) (violations []Violation) {
	var mu sync.Mutex
	var all sync.WaitGroup
	slots := make(chan struct{}, 16)
	for _, o := range slices.Clone(b.operations) {
		last := o.answer()
		if last == nil && !o.leaves || o.refused != "" {
			continue
		}
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			var fresh call
			for range 5 { // The odd connection breaks on a busy machine.
				if fresh = w.send(ctx, o, rand.IntN(len(w.replicas)), ""); fresh.isFinal() || fresh.status == http.StatusConflict {
					break
				}
				time.Sleep(100 * time.Millisecond)
			}
			if last != nil && (fresh.status != last.status || string(fresh.body) != string(last.body) || !fresh.replayed) {
				mu.Lock()
				defer mu.Unlock()
				violations = append(violations, Violation(fmt.Sprintf("a replay has the bytes of the last answer: %s had %s %s, now %s %s (replayed: %t)",
					o.key, last, last.body, fresh, fresh.body, fresh.replayed)))
			}
		})
	}
	all.Wait()
	return violations
}
