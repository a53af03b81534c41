package api_test

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"example.com/payments/internal/servicetest"
)

// What is said of refunds alone: the rules of their payment (CONTRACT §1).

func refundOf(c *client, paymentID, key, body string) answer {
	return c.Do("POST", "/v1/payments/"+paymentID+"/refunds", key, body)
}

func TestRefundOfAPayment(t *testing.T) {
	t.Parallel()
	facts(t, []fact{
		{"PaymentMustBeThere", func(t *testing.T) {
			w := setup(t, options{})
			for _, id := range []string{uuid.NewString(), "no-uuid", w.NewOrder()} {
				refundOf(w.Client, id, "k", "").Is(404, "not-found")
			}
			require.False(t, w.HasKey("k"))
		}},
		{"PaymentMustHaveSucceeded", func(t *testing.T) {
			w := setup(t, options{})
			declined := w.Pay(w.NewOrder(), "declined", "pm_declined").Is(402).Member("payment_id")
			gateway := w.Gateway.HoldBefore(servicetest.PostCharge, 1)
			order := w.NewOrder()
			first := servicetest.Go(func() answer { return w.Pay(order, "first", "pm_ok") })
			gateway.Arrived()
			processing := w.Pay(order, "first", "pm_ok").Is(409).Member("payment_id")
			for _, id := range []string{declined, processing} {
				refundOf(w.Client, id, "k", "").Is(409, "payment-not-refundable")
				refundOf(w.Client, id, "k", `{"amount":99999}`).Is(409, "payment-not-refundable")
			}
			require.False(t, w.HasKey("k"))
			gateway.Release()
			first().Is(201)
		}},
		{"RefundsNeverExceedThePaymentUnderAnyConcurrency", func(t *testing.T) {
			w := setup(t, options{})
			orders := w.NewOrders(100)
			servicetest.Rounds(t, len(orders), func(i int) error {
				id := w.Pay(orders[i], w.NewKey(), "pm_ok").Member("id")
				return exactly(servicetest.Race(4, func(int) answer { return refundOf(w.Client, id, w.NewKey(), `{"amount":800}`) }),
					map[string]int{"201 fresh": 2, "409 refund-exceeds-payment": 2})
			})
			require.Equal(t, 100, w.Rows("payments WHERE amount_refunded = 1600"))
		}},
		{"RefusedRefundWritesNothingAndLeavesTheKeyFree", func(t *testing.T) {
			w := setup(t, options{})
			id := w.NewPayment("pm_ok")
			refundOf(w.Client, id, "k", `{"amount":2000}`).Is(409, "refund-exceeds-payment").Has("Retry-After", "")
			require.False(t, w.HasKey("k"))
			require.Zero(t, w.Rows("refunds"))
			refundOf(w.Client, id, "k", `{"amount":1999}`).Is(201).Fresh()
			refundOf(w.Client, id, "more", `{"amount":1}`).Is(409, "refund-exceeds-payment")
		}},
		{"WithoutAnAmountItTakesAllThatIsLeft", func(t *testing.T) {
			w := setup(t, options{})
			id := w.NewPayment("pm_ok")
			refundOf(w.Client, id, "part", `{"amount":500}`).Is(201).Says("amount", "500")
			rest := refundOf(w.Client, id, "rest", "").Is(201).Says("amount", "1499").Says("currency", "EUR")
			refundOf(w.Client, id, "more", "").Is(409, "refund-exceeds-payment")
			// An amount that is said is another request, even if it is the same amount.
			refundOf(w.Client, id, "rest", `{"amount":1499}`).Is(422)
			refundOf(w.Client, id, "rest", "").Same(rest).Replayed()
		}},
		{"OneOfManyThatTakeTheRestGetsIt", func(t *testing.T) {
			w := setup(t, options{})
			orders := w.NewOrders(30)
			servicetest.Rounds(t, len(orders), func(i int) error {
				id := w.Pay(orders[i], w.NewKey(), "pm_ok").Member("id")
				counts := servicetest.Count(servicetest.Race(4, func(i int) answer {
					return refundOf(w.Client, id, w.NewKey(), []string{"", `{"amount":1000}`}[i%2])
				}))
				if counts["201 fresh"] < 1 || counts["201 fresh"]+counts["409 refund-exceeds-payment"] != 4 {
					return fmt.Errorf("not the rest: %v", counts)
				}
				return nil
			})
			require.Equal(t, 30, w.Rows("payments WHERE amount_refunded = 1999"))
		}},
		{"AbsentBodyIsTheEmptyObject", func(t *testing.T) {
			w := setup(t, options{})
			id := w.NewPayment("pm_ok")
			first := refundOf(w.Client, id, "k", "").Is(201)
			refundOf(w.Client, id, "k", "{}").Same(first).Replayed()
			refundOf(w.Client, id, "k", " { } ").Same(first).Replayed()
		}},
		{"WhatIsInProgressIsReservedAndWhatFailsIsFreeAgain", func(t *testing.T) {
			w := setup(t, options{ReapAfter: 1})
			id := w.NewPayment("pm_refund_declined")
			gateway := w.Gateway.HoldBefore(servicetest.PostRefund, 1)
			first := servicetest.Go(func() answer { return refundOf(w.Client, id, "first", "") })
			gateway.Arrived()
			refundOf(w.Client, id, "second", `{"amount":1}`).Is(409, "refund-exceeds-payment")
			w.Do("GET", "/v1/payments/"+id, "", "").Says("amount_refunded", "0")
			gateway.Release()
			a := first().Is(402, "refund-declined")
			w.Do("GET", a.Header.Get("Location"), "", "").Says("failure_code", "generic_decline").Says("status", "declined")
			refundOf(w.Client, id, "second", "").Is(402, "refund-declined").Says("decline_code", "generic_decline")

			id = w.NewPayment("pm_ok")
			dead := w.NewReplica(options{Gateway: servicetest.Dies(false)})
			_, err := dead.As(w.Merchant).Try(t.Context(), "POST", "/v1/payments/"+id+"/refunds", "dies", "")
			require.Error(t, err)
			refundOf(w.Client, id, "third", `{"amount":1}`).Is(409, "refund-exceeds-payment")
			w.ExpireLease("dies")
			_, err = w.Reaper.RunOnce(t.Context())
			require.NoError(t, err)
			refundOf(w.Client, id, "dies", "").Is(402, "refund-failed").Replayed()
			refundOf(w.Client, id, "third", "").Is(201).Says("amount", "1999")
		}},
		{"OrderIsRefundedWhenNothingIsLeft", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			id := w.Pay(order, "pay", "pm_ok").Is(201).Member("id")
			refundOf(w.Client, id, "part", `{"amount":1998,"reason":"returned"}`).Is(201).Says("reason", "returned")
			w.Do("GET", "/v1/orders/"+order, "", "").Says("status", "paid")
			refundOf(w.Client, id, "rest", `{"amount":1}`).Is(201).Says("reason", "")
			w.Do("GET", "/v1/orders/"+order, "", "").Says("status", "refunded")
			w.Do("GET", "/v1/payments/"+id, "", "").Says("status", "succeeded").Says("amount_refunded", "1999")
			w.Pay(order, "again", "pm_ok").Is(409, "order-not-open")
		}},
		{"EventsAreNumberedWithinThePayment", func(t *testing.T) {
			w := setup(t, options{})
			id := w.NewPayment("pm_ok")
			servicetest.Race(5, func(int) answer { return refundOf(w.Client, id, w.NewKey(), `{"amount":100}`) })
			require.Equal(t, 1, w.Rows(`(SELECT FROM events WHERE subject_id = $1 HAVING array_agg(number ORDER BY number) = '{1,2,3,4,5,6}'
				AND array_agg(DISTINCT type) = '{payment.succeeded,refund.succeeded}') x`, id))
		}},
		{"GatewayKeyIsDerivedFromItsOwnIntent", func(t *testing.T) {
			w := setup(t, options{})
			refundOf(w.Client, w.NewPayment("pm_ok"), "k", "").Is(201)
			sum := sha256.Sum256([]byte("refund\n" + w.Merchant.ID.String() + "\nk"))
			require.Equal(t, hex.EncodeToString(sum[:]), w.Gateway.Refunds()[0].Key)
			require.Equal(t, w.Gateway.Charges()[0].Key, w.Gateway.Refunds()[0].ChargeKey)
		}},
		{"ReasonBelongsToTheRequest", func(t *testing.T) {
			w := setup(t, options{})
			id := w.NewPayment("pm_ok")
			first := refundOf(w.Client, id, "k", `{"amount":5,"reason":"a"}`).Is(201)
			for _, body := range []string{`{"amount":5}`, `{"amount":5,"reason":"b"}`, `{"reason":"a"}`} {
				refundOf(w.Client, id, "k", body).Is(422)
			}
			refundOf(w.Client, strings.ToUpper(id), "k", `{"reason":"a","amount":5}`).Same(first).Replayed()
		}},
	})
}
