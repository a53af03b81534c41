package payments_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"example.com/payments/internal/dbtest"
	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/servicetest"
)

// What the story costs its database: round trips, and how each of them finds its rows (DESIGN §2 and §6).

type options = servicetest.Options

func TestRoundTrips(t *testing.T) {
	t.Parallel()
	w := servicetest.New(t, options{DBMaxConns: 2})
	// On one connection, after everything has been said once: an API key is looked up, a statement prepared.
	id := w.NewPayment("pm_ok")
	order := w.NewOrder()
	w.Pay(order, "warm", "pm_ok").Is(201)
	w.Pay(order, "warm", "pm_ok").Is(201)
	refund := func(key string) servicetest.Answer {
		return w.Do("POST", "/v1/payments/"+id+"/refunds", key, `{"amount":1}`)
	}
	refund("warm-refund").Is(201)
	w.Queries.Since()
	trips := func() int {
		n := 0
		for _, count := range w.Queries.Since() {
			n += count
		}
		return n
	}
	for _, tt := range []struct {
		fact string
		most int
		do   func()
	}{
		{"PaymentTakesTwo", 2, func() { w.Pay(order, "k", "pm_ok").Is(201).Fresh() }},
		{"ReplayTakesTwoAtMost", 2, func() { w.Pay(order, "k", "pm_ok").Is(201).Replayed() }},
		{"MismatchTakesTwoAtMost", 2, func() { w.Pay(order, "k", "pm_other").Is(422) }},
		{"RefundTakesTwo", 2, func() { refund("r").Is(201).Fresh() }},
		{"ReplayOfARefundTakesTwoAtMost", 2, func() { refund("r").Is(201).Replayed() }},
		{"OrderTakesOne", 1, func() { w.Do("POST", "/v1/orders", "o", `{"amount":1,"currency":"EUR"}`).Is(201) }},
		{"ReplayOfAnOrderTakesTwoAtMost", 2, func() { w.Do("POST", "/v1/orders", "o", `{"amount":1,"currency":"EUR"}`).Is(201).Replayed() }},
		{"LookTakesOne", 1, func() { w.Do("GET", "/v1/payments/"+id, "", "").Is(200) }},
	} {
		order = w.NewOrder()
		if strings.Contains(tt.fact, "Replay") || strings.Contains(tt.fact, "Mismatch") {
			order = w.Do("GET", "/v1/payments?idempotency_key=k", "", "").Data("order_id")[0]
		}
		w.Queries.Since()
		tt.do()
		require.LessOrEqual(t, trips(), tt.most, tt.fact)
	}
}

// A thousand requests that wait for one key are one question.
func TestWaitersOfAProcessAskTogether(t *testing.T) {
	t.Parallel()
	const n = 1000
	w := servicetest.New(t, options{Background: true})
	req := payments.NewPayment{
		Claim: idempotency.Claim{
			MerchantID: w.Merchant.ID, Key: "k", Mode: idempotency.ModeSync, RequestID: "first",
			Request: idempotency.Request{Method: "POST", Route: "/v1/payments", Fields: []idempotency.Field{{Name: "a", Value: "b"}}},
		},
		OrderID: uuid.MustParse(w.NewOrder()), Amount: 1999, Currency: "EUR", PaymentMethod: "pm_ok", Metadata: map[string]string{},
	}
	gateway := w.Gateway.HoldBefore(servicetest.PostCharge, 1)
	pay := func(wait *time.Duration, requestID string) servicetest.Answer {
		mine := req
		mine.Wait, mine.Claim.RequestID = wait, requestID
		answer, err := w.Service.CreatePayment(t.Context(), mine)
		if err != nil {
			t.Error(err)
		}
		return servicetest.Answer{Status: answer.Status, Body: answer.Body}
	}
	first := servicetest.Go(func() servicetest.Answer { return pay(nil, "first") })
	gateway.Arrived()
	wait := time.Minute
	waiting := servicetest.Go(func() []servicetest.Answer {
		return servicetest.Race(n, func(i int) servicetest.Answer { return pay(&wait, fmt.Sprint(i)) })
	})
	w.Eventually("all of them wait", func() bool { return w.Queries.Ended("IdempotencyKeyGet") == n })
	w.Queries.Since()
	w.Eventually("there have been some polls", func() bool { return w.Queries.Count("IdempotencyKeyPoll") >= 3 })
	asked := w.Queries.Since()
	require.Equal(t, []string{"IdempotencyKeyPoll"}, slices.Collect(maps.Keys(asked)), "nothing else is asked while they wait")
	require.Less(t, asked["IdempotencyKeyPoll"], 10, "and not once for each of them")

	gateway.Release()
	answer := first()
	for _, other := range waiting() {
		require.Equal(t, answer.Status, other.Status)
		require.Equal(t, answer.Body, other.Body)
	}
	require.LessOrEqual(t, w.Queries.Count("IdempotencyKeyGet"), n, "each has looked once at what has become of it")
}

// scan is what a plan does to a table.
type scan struct {
	table, node, index, cond string
}

// TestPlans explains every statement that the service has sent as it is planned in production sooner or later, for any values at all,
// on tables that are empty and on tables that are large. On a plan that reads more than the rows it names, nobody notices anything until
// there are many of them.
func TestPlans(t *testing.T) {
	t.Parallel()
	texts := everyStatement(t)
	for _, size := range []string{"Empty", "Large"} {
		db := dbtest.Pool(t, dbtest.New(t))
		if size == "Large" {
			fill(t, db)
		}
		for _, name := range slices.Sorted(maps.Keys(texts)) {
			if !strings.HasPrefix(texts[name], "-- name:") {
				continue // begin, commit
			}
			t.Run(name+"On"+size+"Tables", func(t *testing.T) {
				indexes, known := plans[name]
				require.True(t, known, "a new statement: say how it may find its rows")
				for _, s := range explain(t, db, texts[name]) {
					if background[name] && size == "Empty" {
						continue // it is planned again when there are rows, long before they are many
					}
					columns, allowed := indexes[s.index]
					require.True(t, allowed, "%+v", s)
					for _, column := range columns {
						require.Contains(t, s.cond, column, "%+v", s)
					}
				}
			})
		}
	}
}

// background are the statements that no request waits for.
var background = map[string]bool{
	"IdempotencyKeyRenew": true, "IdempotencyKeyPoll": true, "IdempotencyKeyLook": true, "IdempotencyKeyPurge": true, "IdempotencyKeyBacklog": true,
}

// plans says by which indexes each statement may find its rows, and what has to be in the condition by which the index is entered.
var plans = func() map[string]map[string][]string {
	const keys, byOrder, live = "idempotency_keys_pkey", "payments_by_order", "one_live_payment_per_order"
	key := map[string][]string{keys: {"merchant_id = ", "key = "}}
	rows := func(tables ...string) map[string][]string {
		found := maps.Clone(key)
		for _, table := range tables {
			found[table+"_pkey"] = []string{"merchant_id = ", "id = "}
		}
		return found
	}
	ofOrder := []string{"merchant_id = ", "order_id = "}
	page := []string{"merchant_id = ", "id < "}
	return map[string]map[string][]string{
		"MerchantInsert": {}, "APIKeyInsert": {},
		"MerchantByAPIKey": {"secret_names_one_merchant": {"secret_sha256 = "}},

		"OrderCreate": rows(), "OrderGet": rows("orders"), "OrderLock": rows("orders"), "OrderCancel": rows("orders"), "OrderList": {"orders_pkey": page},

		"PaymentClaim": rows("orders"), "PaymentRecord": rows("payments", "orders"), "PaymentGet": rows("payments"),
		"PaymentLiveOfOrder": {live: ofOrder, byOrder: ofOrder}, "PaymentList": {"payments_pkey": page}, "PaymentListOfOrder": {byOrder: ofOrder},

		"RefundClaim": rows("payments"), "RefundRecord": rows("refunds", "payments", "orders"), "RefundGet": rows("refunds", "payments"),
		"RefundListOfPayment": {"refunds_by_payment": {"merchant_id = ", "payment_id = "}},

		"IdempotencyKeyGet": key, "IdempotencyKeyTakeOver": key, "IdempotencyKeyRelease": key, "IdempotencyKeyLookAgain": key, "IdempotencyKeyAbandoned": key,
		"IdempotencyKeyPoll": {keys: {"merchant_id = ANY", "key = ANY"}},
		// With nothing in progress the two small indexes cost the same; either has no more than what is in progress.
		"IdempotencyKeyRenew": {
			"idempotency_keys_by_lease": {"lease_id = ANY"}, "idempotency_keys_by_next_look": nil, keys: {"merchant_id = ", "key = "},
		},
		"IdempotencyKeyLook":    {"idempotency_keys_by_next_look": {"next_look_at <= "}, keys: {"merchant_id = ", "key = "}},
		"IdempotencyKeyPurge":   {"idempotency_keys_by_expiry": {"expires_at <= "}, keys: {"merchant_id = ", "key = "}},
		"IdempotencyKeyBacklog": {"idempotency_keys_by_next_look": nil, "idempotency_keys_by_lease": nil, "idempotency_keys_by_expiry": nil},
	}
}()

// everyStatement has the service say everything that it says in its life, and returns the texts.
func everyStatement(t *testing.T) map[string]string {
	t.Helper()
	w := servicetest.New(t, options{})
	live := w.NewReplica(options{Background: true, LeaseTTL: 500 * time.Millisecond, ReapAfter: 1})
	c := live.As(w.Merchant)
	order := c.NewOrder()
	id := c.Pay(order, "pay", "pm_ok").Is(201).Member("id")
	c.Pay(order, "pay", "pm_ok").Replayed()
	c.Pay(order, "other", "pm_ok").Is(409)
	refund := c.Do("POST", "/v1/payments/"+id+"/refunds", "refund", "").Is(201).Header.Get("Location")
	open := c.NewOrder()
	for _, path := range []string{"/v1/orders", "/v1/orders/" + order, "/v1/payments", "/v1/payments?order_id=" + order, "/v1/payments/" + id, "/v1/payments/" + id + "/refunds", refund} {
		c.Do("GET", path, "", "").Is(200)
	}
	// A slow gateway, so that the lease is renewed and somebody waits.
	gateway := w.Gateway.HoldBefore(servicetest.PostCharge, 1)
	first := servicetest.Go(func() servicetest.Answer { return c.Pay(open, "slow", "pm_ok") })
	gateway.Arrived()
	c.Pay(open, "second", "pm_ok").Is(409)
	waiter := servicetest.Go(func() servicetest.Answer { return c.Pay(open, "slow", "pm_ok", "Prefer: wait=20") })
	w.Eventually("there has been a renewal and a poll", func() bool {
		return live.Queries.Count("IdempotencyKeyRenew") > 0 && live.Queries.Count("IdempotencyKeyPoll") > 0
	})
	gateway.Release()
	first().Is(201)
	waiter().Is(201)
	// A gateway that is away, a repeat, and the reaper.
	again := c.NewOrder()
	w.Gateway.Down()
	c.Pay(again, "released", "pm_ok").Is(503)
	c.Pay(again, "released", "pm_ok").Is(503)
	_, err := live.Reaper.RunOnce(t.Context())
	require.NoError(t, err)
	w.Gateway.Up()
	w.MoveBack("released", servicetest.Day)
	_, err = live.Reaper.RunOnce(t.Context())
	require.NoError(t, err)
	c.Do("POST", "/v1/orders/"+c.NewOrder()+"/cancel", "cancel", "").Is(200)
	_, err = idempotency.NewPurger(live.Pool, nil).RunOnce(t.Context())
	require.NoError(t, err)
	texts := live.Queries.SQL()
	maps.Copy(texts, w.Queries.SQL())
	for name := range plans {
		if name == "IdempotencyKeyBacklog" {
			continue // only when the metrics are read
		}
		require.Contains(t, texts, name, "a statement that this test does not have the service say")
	}
	return texts
}

// fill makes the tables large: all of it one merchant's, which is the hardest case for an index that is not used whole, and with
// nothing in progress, which makes the indexes of what is in progress look as if they cost nothing.
func fill(t *testing.T, db *pgxpool.Pool) {
	t.Helper()
	_, err := db.Exec(t.Context(), `
		SET synchronous_commit = off;
		SET session_replication_role = replica; -- nobody asks for foreign keys
		CREATE TEMPORARY TABLE many AS
			SELECT i, gen_random_uuid() AS id, gen_random_uuid() AS other, '00000000-0000-0000-0000-000000000001'::uuid AS merchant_id
			FROM generate_series(1, 50000) i;
		INSERT INTO orders (merchant_id, id, status, amount, currency, metadata, created_at)
			SELECT merchant_id, other, 'paid', 1, 'EUR', '{}', now() FROM many;
		INSERT INTO payments (merchant_id, id, order_id, status, amount, currency, payment_method, gateway_key, gateway_reference, metadata, created_at)
			SELECT merchant_id, id, other, 'succeeded', 1, 'EUR', 'pm_ok', 'x', 'x', '{}', now() FROM many;
		INSERT INTO refunds (merchant_id, id, payment_id, status, amount, currency, gateway_key, gateway_reference, created_at)
			SELECT merchant_id, id, other, 'succeeded', 1, 'EUR', 'x', 'x', now() FROM many;
		INSERT INTO idempotency_keys (merchant_id, key, route, resource_id, resource_path, recipe, fingerprint, mode, state, attempt, holder, request_id,
				outcome_uncertain, answer_status, answer_headers, answer_body, created_at, final_at, expires_at)
			SELECT merchant_id, 'many-' || i, '', id, '', 1, sha256('x'), 'sync', 'done', 1, '', '',
				false, 201, '{}', 'x', now(), now(), now() + interval '1 day' FROM many;
		INSERT INTO api_keys (merchant_id, id, secret_sha256) SELECT merchant_id, id, sha256(i::text::bytea) FROM many WHERE i <= 10000;
		ANALYZE`)
	require.NoError(t, err)
}

// explain plans a statement for any values and returns what the plan does to the tables.
func explain(t *testing.T, db *pgxpool.Pool, sql string) (scans []scan) {
	t.Helper()
	conn, err := db.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	prepared, err := conn.Conn().Prepare(t.Context(), "explained", sql)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Conn().Deallocate(t.Context(), "explained")) }()
	nulls := strings.TrimSuffix(strings.Repeat("NULL, ", len(prepared.ParamOIDs)), ", ")
	_, err = conn.Exec(t.Context(), "SET plan_cache_mode = force_generic_plan")
	require.NoError(t, err)
	execute := "EXPLAIN (FORMAT JSON) EXECUTE explained"
	if nulls != "" {
		execute += "(" + nulls + ")"
	}
	var text []byte
	require.NoError(t, conn.QueryRow(t.Context(), execute, pgx.QueryExecModeSimpleProtocol).Scan(&text))
	var plan []struct{ Plan json.RawMessage }
	require.NoError(t, json.Unmarshal(text, &plan))
	return scansOf(t, plan[0].Plan)
}

func scansOf(t *testing.T, raw json.RawMessage) (scans []scan) {
	t.Helper()
	var node struct {
		Type  string `json:"Node Type"`
		Table string `json:"Relation Name"`
		Index string `json:"Index Name"`
		Cond  string `json:"Index Cond"`
		Plans []json.RawMessage
	}
	require.NoError(t, json.Unmarshal(raw, &node))
	if (node.Table != "" || node.Index != "") && node.Type != "Bitmap Heap Scan" && node.Type != "ModifyTable" {
		scans = append(scans, scan{node.Table, node.Type, node.Index, node.Cond})
	}
	for _, child := range node.Plans {
		scans = append(scans, scansOf(t, child)...)
	}
	return scans
}
