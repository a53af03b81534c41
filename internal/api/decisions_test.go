package api_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"example.com/payments/internal/servicetest"
)

// The order of decisions, CONTRACT §3. Each decision is one thing that is wrong with a good request.
type decision struct {
	name   string
	status int
	slug   string
	spoil  func(s *shot)
}

// shot is a request that is about to be spoiled.
type shot struct {
	draining, limited bool // sent to a replica that drains, or at which the merchant has had its share
	method, path, key string
	body              string
	headers           []string
}

var decisions = []decision{
	{"Draining", 503, "shutting-down", func(s *shot) { s.draining = true }},
	{"Route", 404, "not-found", func(s *shot) { s.path = "/v1/paymentz" }},
	{"Method", 405, "method-not-allowed", func(s *shot) { s.method = "DELETE" }},
	{"Credentials", 401, "unauthorized", func(s *shot) { s.headers = append(s.headers, "Authorization: Bearer sk_live_nobodys") }},
	{"Rate", 429, "rate-limited", func(s *shot) { s.limited = true }},
	{"MediaType", 415, "unsupported-media-type", func(s *shot) { s.headers = append(s.headers, "Content-Type: text/plain") }},
	{"Size", 413, "content-too-large", func(s *shot) { s.body += strings.Repeat(" ", 64<<10) }},
	{"Key", 400, "idempotency-key-missing", func(s *shot) { s.key = "" }},
	{"JSON", 400, "request-malformed", func(s *shot) { s.body = "[" + s.body }},
	{"Fields", 400, "validation-failed", func(s *shot) { s.body = strings.Replace(s.body, `"EUR"`, `"EURO"`, 1) }},
	{"SpentKey", 410, "idempotency-key-expired", func(s *shot) {
		if s.key != "" {
			s.key = "spent"
		}
	}},
	{"OtherRequest", 422, "idempotency-key-reused", func(s *shot) {
		switch s.key {
		case "spent": // by another request, which is as good
		case "good":
			s.key = "used"
		}
	}},
}

func TestDecisionsAreTakenInOneOrder(t *testing.T) {
	t.Parallel()
	w := setup(t, options{})
	clients := map[[2]bool]*client{}
	for _, draining := range []bool{false, true} {
		for _, limited := range []bool{false, true} {
			o := options{}
			if limited {
				o.RateLimit = 1e-6
			}
			r := w.NewReplica(o)
			c := r.As(w.Merchant)
			c.Do("GET", "/v1/orders", "", "").Is(200)
			if draining {
				r.API.Drain()
			}
			clients[[2]bool{draining, limited}] = c
		}
	}
	body := servicetest.PayBody(w.NewOrder(), "pm_ok")
	for _, key := range []string{"spent", "used"} {
		w.Pay(w.NewOrder(), key, "pm_ok").Is(201)
	}
	w.MoveBack("spent", 25*time.Hour)
	send := func(spoil ...func(*shot)) answer {
		s := shot{method: "POST", path: "/v1/payments", key: "good", body: body}
		for _, f := range spoil {
			f(&s)
		}
		return clients[[2]bool{s.draining, s.limited}].Do(s.method, s.path, s.key, s.body, s.headers...)
	}
	charged := w.Gateway.Calls(servicetest.PostCharge)
	for i, first := range decisions {
		t.Run(first.name, func(t *testing.T) {
			send(first.spoil).Is(first.status, first.slug)
		})
		for _, later := range decisions[i+1:] {
			t.Run(first.name+"Before"+later.name, func(t *testing.T) {
				a := send(first.spoil, later.spoil)
				require.Equal(t, fmt.Sprint(first.status, " ", first.slug), fmt.Sprint(a.Status, " ", a.Slug()))
			})
		}
	}
	require.False(t, w.HasKey("good"), "an invalid request never burns a key")
	require.Equal(t, charged, w.Gateway.Calls(servicetest.PostCharge))
	send().Is(201).Fresh()
}

// What comes after the look-up: what a key stands for decides before the rules of the order do.
func TestKeyDecidesBeforeTheRules(t *testing.T) {
	t.Parallel()
	facts(t, []fact{
		{"SpentKeyBeforeMismatchAndRules", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			w.Pay(order, "k", "pm_ok").Is(201)
			w.MoveBack("k", 25*time.Hour)
			w.Pay(order, "k", "pm_other").Is(410, "idempotency-key-expired")
			w.Do("POST", "/v1/orders/"+order+"/cancel", "k", "").Is(410, "idempotency-key-expired")
			w.Do("POST", "/v1/orders", "k", `{"amount":1,"currency":"EUR"}`).Is(410, "idempotency-key-expired")
		}},
		{"MismatchBeforeReplayFlightStalenessAndRules", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			gateway := w.Gateway.HoldBefore(servicetest.PostCharge, 1)
			first := servicetest.Go(func() answer { return w.Pay(order, "k", "pm_ok") })
			gateway.Arrived()
			mismatched := func() { w.Pay(order, "k", "pm_other").Is(422, "idempotency-key-reused") } // and the order is being paid
			mismatched()
			w.ExpireLease("k")
			mismatched()
			gateway.Release()
			first().Is(201)
			mismatched() // and the order is paid
		}},
		{"ReplayBeforeTheRules", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			first := w.Pay(order, "k", "pm_declined").Is(402)
			w.Do("POST", "/v1/orders/"+order+"/cancel", "c", "").Is(200)
			w.Pay(order, "k", "pm_declined").Same(first).Replayed()
			id := w.NewPayment("pm_ok")
			refund := refundOf(w.Client, id, "r", "").Is(201)
			refundOf(w.Client, id, "r", "").Same(refund).Replayed()
			// Not even an order that is gone is asked for.
			w.Exec("DELETE FROM payments WHERE order_id = $1", order)
			w.Exec("DELETE FROM orders WHERE id = $1", order)
			w.Pay(order, "k", "pm_declined").Same(first).Replayed()
			w.Exec("DELETE FROM idempotency_keys WHERE key = 'k'")
			w.Exec("DELETE FROM idempotency_keys WHERE key = 'c'")
		}},
		{"FlightBeforeTheRules", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			gateway := w.Gateway.HoldBefore(servicetest.PostCharge, 1)
			first := servicetest.Go(func() answer { return w.Pay(order, "k", "pm_ok") })
			gateway.Arrived()
			w.Pay(order, "k", "pm_ok").Is(409, "idempotency-in-progress") // not order-payment-in-progress
			gateway.Release()
			first().Is(201)
		}},
		{"StaleKeyIsResumedBeforeTheRules", func(t *testing.T) {
			w := setup(t, options{})
			req := payment.leaveBehind(w, "ok", true)
			req.from(w.Client).Is(201).Fresh() // not order-payment-in-progress, of which it is the payment itself
		}},
		{"KeyOfABuildToComeIs503AndNever422", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			first := w.Pay(order, "k", "pm_ok").Is(201)
			w.Exec("UPDATE idempotency_keys SET recipe = 32000 WHERE key = 'k'")
			w.Pay(order, "k", "pm_ok").Is(503, "fingerprint-recipe-unknown").Has("Retry-After", "1")
			w.Pay(order, "k", "pm_other").Is(503, "fingerprint-recipe-unknown")
			w.Exec("UPDATE idempotency_keys SET recipe = 1 WHERE key = 'k'")
			w.Pay(order, "k", "pm_ok").Same(first).Replayed()
		}},
	})
}
