package api_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"example.com/payments/internal/servicetest"
)

// What is said of payments alone: the rules of their order (CONTRACT §1), and what one slow payment may cost the others.

func TestPaymentOfAnOrder(t *testing.T) {
	t.Parallel()
	facts(t, []fact{
		{"OrderMustBeThere", func(t *testing.T) {
			w := setup(t, options{})
			w.Pay(uuid.NewString(), "k", "pm_ok").Is(404, "order-not-found")
			refusedWithoutATrace(t, w, "k")
		}},
		{"OrderMustBeOpen", func(t *testing.T) {
			w := setup(t, options{})
			paid, canceled := w.NewOrder(), w.NewOrder()
			w.Pay(paid, "first", "pm_ok").Is(201)
			w.Do("POST", "/v1/orders/"+canceled+"/cancel", "cancel", "").Is(200)
			for _, order := range []string{paid, canceled} {
				w.Pay(order, "k", "pm_ok").Is(409, "order-not-open").Has("Retry-After", "")
				require.False(t, w.HasKey("k"))
			}
			require.Equal(t, 1, w.Gateway.Calls(servicetest.PostCharge))
		}},
		{"AmountAndCurrencyMustBeTheOrders", func(t *testing.T) {
			w := setup(t, options{})
			body := servicetest.PayBody(w.NewOrder(), "pm_ok")
			w.Do("POST", "/v1/payments", "k", with(body, map[string]any{"amount": 1998})).Is(400, "amount-mismatch")
			w.Do("POST", "/v1/payments", "k", with(body, map[string]any{"currency": "USD"})).Is(400, "amount-mismatch")
			refusedWithoutATrace(t, w, "k")
			w.Do("POST", "/v1/payments", "k", body).Is(201).Fresh()
		}},
		{"NoOtherPaymentOfItMayBeInProgress", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			gateway := w.Gateway.HoldBefore(servicetest.PostCharge, 1)
			first := servicetest.Go(func() answer { return w.Pay(order, "first", "pm_ok") })
			gateway.Arrived()
			w.Pay(order, "k", "pm_ok").Is(409, "order-payment-in-progress").Has("Retry-After", "1")
			require.False(t, w.HasKey("k"))
			gateway.Release()
			first().Is(201)
			w.Pay(order, "k", "pm_ok").Is(409, "order-not-open")
			require.Equal(t, 1, w.Gateway.Calls(servicetest.PostCharge))
		}},
		{"RulesAreJudgedInTheirOrder", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			body := servicetest.PayBody(order, "pm_ok")
			mismatch := with(body, map[string]any{"amount": 7})
			gateway := w.Gateway.HoldBefore(servicetest.PostCharge, 1)
			first := servicetest.Go(func() answer { return w.Pay(order, "first", "pm_ok") })
			gateway.Arrived()
			w.Do("POST", "/v1/payments", "k", mismatch).Is(400, "amount-mismatch") // and in progress
			gateway.Release()
			first().Is(201)
			w.Do("POST", "/v1/payments", "k", mismatch).Is(409, "order-not-open") // and mismatched
		}},
		{"OrderMayBePaidAfterADeclineWithAnotherKey", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			w.Pay(order, "first", "pm_declined").Is(402, "payment-declined").Says("decline_code", "generic_decline")
			w.Pay(order, "second", "pm_insufficient_funds").Is(402, "payment-declined")
			w.Pay(order, "third", "pm_ok").Is(201)
			w.Do("GET", "/v1/orders/"+order, "", "").Is(200).Says("status", "paid")
		}},
		{"TwoKeysAtTheSameMomentChargeOnce", func(t *testing.T) {
			w := setup(t, options{})
			orders := w.NewOrders(50)
			servicetest.Rounds(t, len(orders), func(i int) error {
				counts := servicetest.Count(servicetest.Race(4, func(int) answer { return w.Pay(orders[i], w.NewKey(), "pm_ok") }))
				if counts["201 fresh"] != 1 || counts["409 order-payment-in-progress"]+counts["409 order-not-open"] != 3 {
					return fmt.Errorf("not once: %v", counts)
				}
				return nil
			})
			require.Len(t, w.Gateway.Charges(), 50)
			require.Equal(t, 50, w.Rows("payments"))
		}},
		{"ReplayWinsOverAnOrderThatHasChangedSince", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			first := w.Pay(order, "k", "pm_ok").Is(201)
			w.Do("POST", first.Header.Get("Location")+"/refunds", "r", "").Is(201)
			w.Do("GET", "/v1/orders/"+order, "", "").Says("status", "refunded")
			w.Do("GET", first.Header.Get("Location"), "", "").Says("amount_refunded", "1999")
			w.Pay(order, "k", "pm_ok").Same(first).Replayed().Says("amount_refunded", "0")
		}},
		{"EveryDifferentValueIsAnotherRequest", everyValueCounts},
		{"NothingSaidTwiceMeansTwice", sameMeaning},
		{"WhatWasSentIsKeptAsItWas", func(t *testing.T) {
			w := setup(t, options{})
			// Twice the same letter to the eye; two names and two requests to us.
			metadata := map[string]any{"caf\u00e9": "\u00e9", "cafe\u0301": "e\u0301", "": nil}
			delete(metadata, "")
			body := with(servicetest.PayBody(w.NewOrder(), "pm_never_heard_of_1"), map[string]any{"metadata": metadata})
			a := w.Do("POST", "/v1/payments", "k", body).Is(201).Says("payment_method", "pm_never_heard_of_1")
			require.JSONEq(t, `{"caf\u00e9":"\u00e9","cafe\u0301":"e\u0301"}`, a.Member("metadata"))
			require.Equal(t, a.Member("metadata"), w.Do("GET", a.Header.Get("Location"), "", "").Member("metadata"))
			w.Do("POST", "/v1/payments", "k", strings.Replace(body, "caf\u00e9", "caf\u00e8", 1)).Is(422)
		}},
		{"EventIsWrittenWithTheEnd", func(t *testing.T) {
			w := setup(t, options{})
			a := w.Pay(w.NewOrder(), "k", "pm_ok").Is(201)
			require.Equal(t, 1, w.Rows(`events WHERE merchant_id = $1 AND subject_id = $2 AND resource_id = $2 AND number = 1
				AND type = 'payment.succeeded' AND payload ->> 'gateway_reference' = $3`, w.Merchant.ID, a.Member("id"), a.Member("gateway_reference")))
			for _, sql := range []string{"UPDATE events SET number = 2", "DELETE FROM events", "TRUNCATE events"} {
				_, err := w.DB.Exec(t.Context(), sql)
				require.ErrorContains(t, err, "append-only")
			}
		}},
		{"GatewayKeyIsDerivedSoALostClaimMeetsItsCharge", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			first := w.Pay(order, "k", "pm_ok").Is(201)
			sum := sha256.Sum256([]byte("charge\n" + w.Merchant.ID.String() + "\nk"))
			require.Equal(t, hex.EncodeToString(sum[:]), w.Gateway.Charges()[0].Key)
			// An old backup: the order is there, and nothing of its payment.
			w.Exec("ALTER TABLE events DISABLE TRIGGER events_are_append_only")
			w.Exec("DELETE FROM events")
			w.Exec("DELETE FROM idempotency_keys WHERE key = 'k'")
			w.Exec("DELETE FROM payments")
			w.Exec("UPDATE orders SET status = 'open'")
			second := w.Pay(order, "k", "pm_ok").Is(201).Fresh().Says("gateway_reference", first.Member("gateway_reference"))
			require.NotEqual(t, first.Member("id"), second.Member("id"))
			require.Len(t, w.Gateway.Charges(), 1)
		}},
		{"HoldsNoConnectionWhileTheGatewayIsSlow", holdsNoConnection},
		{"HoldsItsBodysDeadlineOnlyForItsBody", deadlineIsForTheBody},
		{"ManyKeysAndOrdersAtOnceDeadlockNobody", nobodyDeadlocks},
	})
}

func refusedWithoutATrace(t *testing.T, w *world, key string) {
	t.Helper()
	require.False(t, w.HasKey(key), "the key is free")
	require.Zero(t, w.Rows("payments"))
	require.Zero(t, w.Rows("events"))
	require.Zero(t, w.Gateway.Calls(servicetest.PostCharge))
}

func everyValueCounts(t *testing.T) {
	w := setup(t, options{})
	body := with(servicetest.PayBody(w.NewOrder(), "pm_ok"), map[string]any{"metadata": map[string]string{"a": "b", "c": ""}})
	first := w.Do("POST", "/v1/payments", "k", body).Is(201)
	for _, change := range []map[string]any{
		{"order_id": w.NewOrder()}, {"amount": 19990}, {"currency": "USD"}, {"payment_method": "pm_declined"}, {"metadata": nil},
		{"metadata": map[string]string{"a": "b"}}, {"metadata": map[string]string{"a": "", "c": "b"}}, {"metadata": map[string]string{"A": "b", "c": ""}},
		{"metadata": map[string]string{"a": "b ", "c": ""}}, {"metadata": map[string]string{"a": "b", "c": "", "d": ""}},
	} {
		w.Do("POST", "/v1/payments", "k", with(body, change)).Is(422, "idempotency-key-reused")
	}
	// The route and its parameters belong to it, and so does the method, of which there is only one.
	w.Do("POST", "/v1/orders", "k", `{"amount":1999,"currency":"EUR"}`).Is(422, "idempotency-key-reused")
	w.Do("POST", first.Header.Get("Location")+"/refunds", "k", "").Is(422, "idempotency-key-reused")
	order := w.NewOrder()
	w.Do("POST", "/v1/orders/"+order+"/cancel", "k", "").Is(422, "idempotency-key-reused")
	w.Do("POST", "/v1/orders/"+order+"/cancel", "c", "").Is(200)
	w.Do("POST", "/v1/orders/"+w.NewOrder()+"/cancel", "c", "").Is(422, "idempotency-key-reused")
	w.Do("POST", "/v1/payments", "k", body).Same(first).Replayed()
}

func sameMeaning(t *testing.T) {
	w := setup(t, options{})
	order := w.NewOrder()
	body := servicetest.PayBody(order, "pm_ok")
	first := w.Do("POST", "/v1/payments", "k", body).Is(201)
	for _, same := range []string{
		with(body, map[string]any{"metadata": map[string]string{}}),
		strings.Replace(body, order, strings.ToUpper(order), 1),
		strings.Replace(body, "pm_ok", `pm\u005fok`, 1),
	} {
		w.Do("POST", "/v1/payments", "k", same).Same(first).Replayed()
	}
}

func holdsNoConnection(t *testing.T) {
	w := setup(t, options{DBMaxConns: 2, Background: true})
	orders := w.NewOrders(20)
	gateway := w.Gateway.HoldBefore(servicetest.PostCharge, len(orders))
	paid := servicetest.Go(func() []answer {
		return servicetest.Race(len(orders), func(i int) answer { return w.Pay(orders[i], "pay-"+orders[i], "pm_ok") })
	})
	for range orders {
		gateway.Arrived()
	}
	// All are in flight, on one connection, and it is free.
	w.Do("GET", "/v1/orders/"+orders[0], "", "").Is(200).Says("status", "open")
	w.Do("GET", "/v1/payments?status=processing&limit=100", "", "").Is(200)
	require.Zero(t, w.Rows("pg_stat_activity WHERE datname = current_database() AND application_name = 'payments' AND state <> 'idle'"))
	require.LessOrEqual(t, w.Rows("pg_stat_activity WHERE datname = current_database() AND application_name = 'payments'"), 2)
	gateway.Release()
	require.Equal(t, map[string]int{"201 fresh": len(orders)}, servicetest.Count(paid()))
}

// deadlineRecorder is a connection that remembers until when it may be read.
type deadlineRecorder struct {
	*httptest.ResponseRecorder
	mu       sync.Mutex
	deadline time.Time
}

func (r *deadlineRecorder) SetReadDeadline(deadline time.Time) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.deadline = deadline
	return nil
}

// A deadline that outlives the body would pass for the client's hanging up, and end its wait.
func deadlineIsForTheBody(t *testing.T) {
	w := setup(t, options{})
	r := httptest.NewRequest(http.MethodPost, "/v1/payments", strings.NewReader(servicetest.PayBody(w.NewOrder(), "pm_ok")))
	r.Header.Set("Authorization", "Bearer "+w.Merchant.APIKey)
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Idempotency-Key", "k")
	connection := &deadlineRecorder{ResponseRecorder: httptest.NewRecorder()}
	gateway := w.Gateway.HoldBefore(servicetest.PostCharge, 1)
	done := servicetest.Go(func() int {
		w.API.ServeHTTP(connection, r)
		return connection.Code
	})
	gateway.Arrived()
	connection.mu.Lock()
	deadline := connection.deadline
	connection.mu.Unlock()
	gateway.Release()
	require.Equal(t, 201, done())
	require.True(t, deadline.IsZero(), "while the gateway works the connection is still under the deadline of the body")
}

// Claims, records, take-overs, renewals, releases, refunds, cancels and the reaper, of the same and of different keys on the same
// orders, all at once: nobody meets a deadlock, and the invariants of servicetest hold afterwards.
func nobodyDeadlocks(t *testing.T) {
	o := options{LeaseTTL: 600 * time.Millisecond, ReapInterval: 100 * time.Millisecond, ReapAfter: time.Minute, Background: true}
	w := setup(t, o)
	clients := []*client{w.Client, w.NewReplica(o).As(w.Merchant)}
	const orders, rounds = 4, 10
	var group sync.WaitGroup
	statuses := map[int]int{}
	var mu sync.Mutex
	note := func(a answer) {
		mu.Lock()
		defer mu.Unlock()
		statuses[a.Status]++
	}
	for round := range rounds {
		for i, id := range w.NewOrders(orders) {
			for n := range 6 {
				group.Go(func() {
					c := clients[n%2]
					key := fmt.Sprintf("%d-%d-%d", round, i, n/2) // every key is used by two
					if i == 0 && n == 5 {
						note(c.Do("POST", "/v1/orders/"+id+"/cancel", key, ""))
						return
					}
					a := c.Pay(id, key, []string{"pm_ok", "pm_declined", "pm_refund_ok"}[n/2])
					note(a)
					if a.Status == 201 {
						note(c.Do("POST", a.Header.Get("Location")+"/refunds", "r-"+key, `{"amount":1000}`))
						note(c.Do("POST", a.Header.Get("Location")+"/refunds", "r-"+key+"-rest", ""))
					}
				})
			}
		}
		// Some of the leases are gone while their holders work.
		w.Exec(`UPDATE idempotency_keys SET lease_expires_at = clock_timestamp() - interval '1 ms', next_look_at = clock_timestamp()
			WHERE (merchant_id, key) IN (SELECT merchant_id, key FROM idempotency_keys WHERE state = 'in_progress' ORDER BY merchant_id, key LIMIT 5 FOR UPDATE SKIP LOCKED)`)
		group.Wait()
	}
	require.Zero(t, w.Rows("pg_stat_database WHERE datname = current_database() AND deadlocks > 0"))
	for status, n := range statuses {
		require.Less(t, status, 500, "%d times", n)
	}
}
