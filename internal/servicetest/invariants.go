package servicetest

import (
	"context"
	"time"
)

// invariants are what holds in every world, whatever has happened in it. Each names what there must be none of. The gateway's ledger
// is in the temporary table entries.
var invariants = []struct{ none, from string }{
	{"two approved charges for one order", `
		(SELECT FROM entries e JOIN payments p ON p.gateway_key = e.key WHERE e.kind = 'charge' AND e.status = 'approved'
			GROUP BY p.merchant_id, p.order_id HAVING count(*) > 1) x`},
	{"an approved charge without its payment", `
		entries e WHERE e.kind = 'charge' AND e.status = 'approved' AND NOT EXISTS (SELECT FROM payments p
			WHERE p.gateway_key = e.key AND p.amount = e.amount AND p.currency = e.currency
				AND (p.status = 'succeeded' AND p.gateway_reference = e.id OR p.status = 'processing'))`},
	{"an approved refund without its row", `
		entries e WHERE e.kind = 'refund' AND e.status = 'approved' AND NOT EXISTS (SELECT FROM refunds r
			WHERE r.gateway_key = e.key AND r.amount = e.amount AND (r.status = 'succeeded' AND r.gateway_reference = e.id OR r.status = 'processing'))`},
	{"a payment that says more than the ledger", `
		payments p WHERE p.status IN ('succeeded', 'declined') AND NOT EXISTS (SELECT FROM entries e
			WHERE e.kind = 'charge' AND e.key = p.gateway_key AND e.amount = p.amount AND e.currency = p.currency
				AND e.id = p.gateway_reference AND e.status = CASE p.status WHEN 'succeeded' THEN 'approved' ELSE 'declined' END)`},
	{"a refund that says more than the ledger", `
		refunds r WHERE r.status IN ('succeeded', 'declined') AND NOT EXISTS (SELECT FROM entries e
			WHERE e.kind = 'refund' AND e.key = r.gateway_key AND e.amount = r.amount
				AND e.id = r.gateway_reference AND e.status = CASE r.status WHEN 'succeeded' THEN 'approved' ELSE 'declined' END)`},
	{"a failed payment with a charge", `payments p JOIN entries e ON e.kind = 'charge' AND e.key = p.gateway_key WHERE p.status = 'failed'`},
	{"a failed refund with a refund", `refunds r JOIN entries e ON e.kind = 'refund' AND e.key = r.gateway_key WHERE r.status = 'failed'`},
	{"a payment without its key", `
		payments p WHERE NOT EXISTS (SELECT FROM idempotency_keys k WHERE k.merchant_id = p.merchant_id AND k.resource_id = p.id
			AND k.route = 'POST /v1/payments' AND (k.state = 'in_progress') = (p.status = 'processing') AND (k.state = 'failed') = (p.status = 'failed'))`},
	{"a refund without its key", `
		refunds r WHERE NOT EXISTS (SELECT FROM idempotency_keys k WHERE k.merchant_id = r.merchant_id AND k.resource_id = r.id
			AND k.route = 'POST /v1/payments/{id}/refunds' AND (k.state = 'in_progress') = (r.status = 'processing') AND (k.state = 'failed') = (r.status = 'failed'))`},
	{"a key in progress without its payment or refund", `
		idempotency_keys k WHERE k.state = 'in_progress'
			AND NOT EXISTS (SELECT FROM payments p WHERE p.merchant_id = k.merchant_id AND p.id = k.resource_id)
			AND NOT EXISTS (SELECT FROM refunds r WHERE r.merchant_id = k.merchant_id AND r.id = k.resource_id)`},
	{"an order whose status is not its payment's", `
		orders o WHERE (o.status IN ('paid', 'refunded')) <> EXISTS (SELECT FROM payments p
			WHERE p.merchant_id = o.merchant_id AND p.order_id = o.id AND p.status = 'succeeded')`},
	{"a canceled order with a live payment", `
		orders o JOIN payments p ON p.merchant_id = o.merchant_id AND p.order_id = o.id AND p.status IN ('processing', 'succeeded') WHERE o.status = 'canceled'`},
	{"a refunded order with something left, or a paid one with nothing left", `
		orders o JOIN payments p ON p.merchant_id = o.merchant_id AND p.order_id = o.id AND p.status = 'succeeded'
			WHERE (o.status = 'refunded') <> (p.amount_refunded = p.amount)`},
	{"a payment whose refunds do not add up", `
		payments p LEFT JOIN LATERAL (SELECT coalesce(sum(amount) FILTER (WHERE status = 'succeeded'), 0) AS refunded,
				coalesce(sum(amount) FILTER (WHERE status IN ('succeeded', 'processing')), 0) AS reserved
			FROM refunds r WHERE r.merchant_id = p.merchant_id AND r.payment_id = p.id) r ON true
			WHERE p.amount_refunded <> r.refunded OR p.amount_reserved <> r.reserved`},
	{"an end without its one event", `
		(SELECT merchant_id, id, 'payment.' || status AS type FROM payments WHERE status <> 'processing'
			UNION ALL SELECT merchant_id, id, 'refund.' || status FROM refunds WHERE status <> 'processing'
			UNION ALL SELECT merchant_id, id, 'order.canceled' FROM orders WHERE status = 'canceled') x
			WHERE 1 <> (SELECT count(*) FROM events e WHERE e.merchant_id = x.merchant_id AND e.resource_id = x.id AND e.type = x.type)`},
	{"an event too many", `
		payments p WHERE p.event_count <> (SELECT count(*) FROM events e WHERE e.merchant_id = p.merchant_id AND e.subject_id = p.id)`},
	{"a stored answer that is not final", `idempotency_keys k WHERE k.answer_status NOT IN (200, 201, 402)`},
	{"a stored answer that names a request which is not the row's", `
		idempotency_keys k WHERE k.answer_status = 402 AND convert_from(k.answer_body, 'UTF8')::jsonb ->> 'instance' <> k.request_id`},
	{"a session that is idle in a transaction", `
		pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in transaction%' AND application_name = 'payments'`},
}

func (w *World) checkInvariants() {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := w.DB.Acquire(ctx)
	if err != nil {
		w.t.Errorf("check the invariants: %v", err)
		return
	}
	defer conn.Release()
	_, err = conn.Exec(ctx, `
		CREATE TEMPORARY TABLE entries AS
		SELECT e.*, CASE WHEN e.id LIKE 'ch%' THEN 'charge' ELSE 'refund' END AS kind
		FROM jsonb_to_recordset($1) AS e (id text, key text, status text, amount bigint, currency text)`,
		append(append([]Entry{}, w.Gateway.Charges()...), w.Gateway.Refunds()...))
	if err != nil {
		w.t.Errorf("check the invariants: %v", err)
		return
	}
	for _, invariant := range invariants {
		var n int
		if err := conn.QueryRow(ctx, "SELECT count(*) FROM "+invariant.from).Scan(&n); err != nil {
			w.t.Errorf("%s: %v", invariant.none, err)
		} else if n > 0 {
			w.t.Errorf("there is %s: %d", invariant.none, n)
		}
	}
}

// Unfinished tells how many keys are in progress although nobody holds them.
func (w *World) Unfinished() int {
	w.t.Helper()
	return w.Rows("idempotency_keys WHERE state = 'in_progress' AND lease_expires_at <= clock_timestamp()")
}

// Day is how long an answer is kept unless a test says otherwise.
const Day = 24 * time.Hour
