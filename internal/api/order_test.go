package api_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"example.com/payments/internal/servicetest"
)

func cancel(c *client, order, key string) answer {
	return c.Do("POST", "/v1/orders/"+order+"/cancel", key, "")
}

func TestOrder(t *testing.T) {
	t.Parallel()
	const body = `{"amount":1999,"currency":"EUR","reference":"cart 7","metadata":{"a":"b"}}`
	facts(t, []fact{
		{"IsCreatedOnceAndAnsweredWith201", func(t *testing.T) {
			w := setup(t, options{})
			a := w.Do("POST", "/v1/orders", "k", body).Is(201).Fresh().Has("Idempotency-Key", `"k"`).
				Says("status", "open").Says("amount", "1999").Says("currency", "EUR").Says("reference", "cart 7").Says("metadata", `{"a":"b"}`)
			a.Has("Location", "/v1/orders/"+a.Member("id"))
			require.WithinDuration(t, time.Now().Add(servicetest.Day), a.HTTPDate("Idempotency-Expires"), time.Minute)
			require.JSONEq(t, string(a.Body), string(w.Do("GET", a.Header.Get("Location"), "", "").Is(200).Body))
			w.Do("POST", "/v1/orders", "k", body).Same(a).Replayed().Has("Original-Request-Id", a.Header.Get("X-Request-Id"))
			w.Do("POST", "/v1/orders", "k", with(body, map[string]any{"reference": nil})).Is(422, "idempotency-key-reused")
		}},
		{"NeedsAnAmountAndACurrencyAndNothingElse", func(t *testing.T) {
			w := setup(t, options{})
			a := w.Do("POST", "/v1/orders", "k", `{"amount":1,"currency":"JPY"}`).Is(201)
			require.Contains(t, string(a.Body), `"reference":null`)
			a.Says("metadata", "{}")
			w.Do("POST", "/v1/orders", "most", `{"amount":999999999999,"currency":"KWD"}`).Is(201).Says("amount", "999999999999")
		}},
		{"TwinsMakeOne", func(t *testing.T) {
			w := setup(t, options{})
			servicetest.Rounds(t, 30, func(int) error {
				key := w.NewKey()
				return exactly(servicetest.Race(6, func(int) answer { return w.Do("POST", "/v1/orders", key, body) }),
					map[string]int{"201 fresh": 1, "201 replay": 5})
			})
			require.Equal(t, 30, w.Rows("orders"))
		}},
		{"ReplayIsWhatItWasThen", func(t *testing.T) {
			w := setup(t, options{})
			first := w.Do("POST", "/v1/orders", "k", body).Is(201)
			cancel(w.Client, first.Member("id"), "c").Is(200)
			w.Do("POST", "/v1/orders", "k", body).Same(first).Says("status", "open")
		}},
		{"LostAnswersAreNoLostOrders", func(t *testing.T) {
			w := setup(t, options{Link: true})
			w.Link.LoseAnswer(w.Replica, "OrderCreate")
			a := w.Do("POST", "/v1/orders", "k", body).Is(201).Fresh()
			w.Do("POST", "/v1/orders", "k", body).Same(a).Replayed()
			w.Link.LoseAnswer(w.Replica, "commit")
			b := cancel(w.Client, a.Member("id"), "c").Is(200).Fresh()
			cancel(w.Client, a.Member("id"), "c").Same(b).Replayed()
			require.Equal(t, 1, w.Rows("orders"))
		}},
		{"DatabaseAwayIs503AndBurnsNoKey", func(t *testing.T) {
			w := setup(t, options{Link: true})
			order := w.NewOrder()
			w.Link.Cut()
			w.Do("POST", "/v1/orders", "k", body).Is(503, "storage-unavailable").Has("Retry-After", "1")
			cancel(w.Client, order, "c").Is(503, "storage-unavailable")
			w.Do("GET", "/v1/orders/"+order, "", "").Is(503, "storage-unavailable")
			w.Do("GET", "/v1/orders", "", "").Is(503, "storage-unavailable")
			w.Link.Restore()
			w.Do("POST", "/v1/orders", "k", body).Is(201).Fresh()
			cancel(w.Client, order, "c").Is(200).Fresh()
		}},
	})
}

func TestCancelOfAnOrder(t *testing.T) {
	t.Parallel()
	facts(t, []fact{
		{"ClosesItAndIsAnsweredWith200", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			a := cancel(w.Client, order, "k").Is(200).Fresh().Has("Location", "/v1/orders/"+order).Has("Idempotency-Key", `"k"`).
				Says("id", order).Says("status", "canceled")
			require.NotEmpty(t, a.Header.Get("Idempotency-Expires"))
			w.Do("GET", "/v1/orders/"+order, "", "").Says("status", "canceled")
			cancel(w.Client, order, "k").Same(a).Replayed()
			w.Do("POST", "/v1/orders/"+order+"/cancel", "k", "{}").Same(a).Replayed()
			require.Equal(t, 1, w.Rows("events WHERE subject_id = $1 AND type = 'order.canceled' AND number = 1", order))
		}},
		{"OrderMustBeThere", func(t *testing.T) {
			w := setup(t, options{})
			cancel(w.Client, uuid.NewString(), "k").Is(404, "not-found")
			cancel(w.Client, "no-uuid", "k").Is(404, "not-found")
			require.False(t, w.HasKey("k"))
		}},
		{"OrderMustBeOpen", func(t *testing.T) {
			w := setup(t, options{})
			canceled, paid := w.NewOrder(), w.NewOrder()
			cancel(w.Client, canceled, "first").Is(200)
			w.Pay(paid, "pay", "pm_ok").Is(201)
			for _, order := range []string{canceled, paid} {
				cancel(w.Client, order, "k").Is(409, "order-not-open").Has("Retry-After", "")
			}
			require.False(t, w.HasKey("k"))
		}},
		{"OrderMustNotBeBeingPaid", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			gateway := w.Gateway.HoldBefore(servicetest.PostCharge, 1)
			paid := servicetest.Go(func() answer { return w.Pay(order, "pay", "pm_declined") })
			gateway.Arrived()
			cancel(w.Client, order, "k").Is(409, "order-payment-in-progress").Has("Retry-After", "1")
			require.False(t, w.HasKey("k"))
			gateway.Release()
			paid().Is(402)
			cancel(w.Client, order, "k").Is(200).Fresh()
		}},
		{"TwinsCancelOnceAndAllAreTold", func(t *testing.T) {
			w := setup(t, options{})
			orders := w.NewOrders(20)
			servicetest.Rounds(t, len(orders), func(i int) error {
				order, key := orders[i], w.NewKey()
				return exactly(servicetest.Race(6, func(int) answer { return cancel(w.Client, order, key) }),
					map[string]int{"200 fresh": 1, "200 replay": 5})
			})
		}},
		{"NeverCancelsWhatIsPaid", func(t *testing.T) {
			w := setup(t, options{})
			orders := w.NewOrders(300)
			servicetest.Rounds(t, len(orders), func(i int) error {
				order := orders[i]
				answers := servicetest.Race(2, func(i int) answer {
					if i == 0 {
						return w.Pay(order, w.NewKey(), "pm_ok")
					}
					return cancel(w.Client, order, w.NewKey())
				})
				paid, canceled := answers[0].Status == 201, answers[1].Status == 200
				loser := answers[0].Slug() + answers[1].Slug()
				if paid == canceled || loser != "order-not-open" && loser != "order-payment-in-progress" {
					return fmt.Errorf("not one of the two: %s\n%s", answers[0], answers[1])
				}
				return nil
			})
			require.Len(t, w.Gateway.Charges(), w.Rows("orders WHERE status = 'paid'"))
		}},
		{"DatabaseThatRefusesForNowIs503", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			// A lock that cannot be had in time, a server that shuts down: nothing is wrong with the request or with us.
			for _, sqlstate := range []string{"55P03", "57014", "57P01", "53300"} {
				mend := w.Breaks("INSERT", "events", sqlstate)
				cancel(w.Client, order, "k").Is(503, "storage-unavailable").Has("Retry-After", "1")
				mend()
				require.False(t, w.HasKey("k"))
			}
			cancel(w.Client, order, "k").Is(200).Fresh()
		}},
	})
}
