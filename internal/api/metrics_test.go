package api_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/servicetest"
)

type counts = map[string]int

// What the service counts. The numbers are those that an operator divides: see deploy/observability/rules.
func TestMetrics(t *testing.T) {
	t.Parallel()
	facts(t, []fact{
		{"ClaimsAreCountedByResultSoTheShareOfLosersIsOneDivision", claimsAreCounted},
		{"ClaimChargeAndRecordAreMeasuredApart", verbsAreMeasuredApart},
		{"AttemptsAreMeasuredByTheirEnding", attemptsAreMeasured},
		{"GatewayCallsAreCountedByCallAndEnding", gatewayCallsAreCounted},
		{"ReaperCountsWhatBecameOfEachKey", reaperCounts},
		{"LeasesRenewedAndLostAreCounted", leasesAreCounted},
		{"KeysInProgressAndTheAgeOfTheOldestStaleOneAreRead", backlogIsRead},
		{"PurgeCountsWhatItStripsAndHowOftenItFails", purgeIsCounted},
		{"RequestsAreCountedByMethodRouteAndStatus", requestsAreCounted},
		{"NoLabelHasAKeyAnIDOrAMerchant", labelsAreBounded},
	})
}

func claimsAreCounted(t *testing.T) {
	w := setup(t, options{})
	order := w.NewOrder()
	first := w.Gateway.HoldBefore(servicetest.PostCharge, 1)
	winner := servicetest.Go(func() answer { return w.Pay(order, "hot", "pm_ok") })
	first.Arrived()
	w.Pay(order, "hot", "pm_ok").Is(409, "idempotency-in-progress")
	w.Pay(order, "hot", "pm_other").Is(422)
	first.Release()
	winner().Is(201)
	for range 3 {
		w.Pay(order, "hot", "pm_ok").Is(201).Replayed()
	}
	w.MoveBack("hot", *w.Key("hot").ExpiresIn)
	w.Pay(order, "hot", "pm_ok").Is(410)
	w.Pay(order, "another", "pm_ok").Is(409, "order-not-open") // no claim has come of it
	const route = " /v1/payments"
	want := counts{"won /v1/orders": 1, "won" + route: 1, "in_flight" + route: 1, "mismatch" + route: 1, "replayed" + route: 3, "expired" + route: 1}
	require.Equal(t, want, w.Counted("payments_claims_total"))

	stale := payment.leaveBehind(w, "ok", true)
	stale.from(w.Client).Is(201)
	want["won /v1/orders"]++
	want["taken_over"+route]++ // the claim was the dead replica's
	require.Equal(t, want, w.Counted("payments_claims_total"))
	for _, result := range idempotency.ClaimResults {
		require.Positive(t, w.Metric("payments_claims_total", "result="+string(result)), result)
	}

	w.Do("POST", "/v1/orders/"+w.NewOrder()+"/cancel", w.NewKey(), "").Is(200)
	w.Do("POST", "/v1/payments/"+w.NewPayment("pm_ok")+"/refunds", w.NewKey(), "").Is(201)
	want["won /v1/orders"] += 2
	want["won"+route]++
	want["won /v1/orders/{id}/cancel"]++
	want["won /v1/payments/{id}/refunds"]++
	require.Equal(t, want, w.Counted("payments_claims_total"))
}

func verbsAreMeasuredApart(t *testing.T) {
	w := setup(t, options{})
	order := w.NewOrders(1)[0]
	measured := func() []float64 {
		return []float64{
			w.Metric("payments_claim_duration_seconds"), w.Metric("payments_charge_duration_seconds"), w.Metric("payments_record_duration_seconds"),
		}
	}
	gateway := w.Gateway.HoldBefore(servicetest.PostCharge, 1)
	first := servicetest.Go(func() answer { return w.Pay(order, w.NewKey(), "pm_ok") })
	gateway.Arrived()
	require.Equal(t, []float64{1, 0, 0}, measured(), "the claim does not wait for the gateway")
	record := w.Queries.HoldBefore("PaymentRecord", 1)
	gateway.Release()
	record.Arrived()
	require.Equal(t, []float64{1, 1, 0}, measured(), "nor the charge for the record")
	record.Release()
	first().Is(201)
	require.Equal(t, []float64{1, 1, 1}, measured())
}

func attemptsAreMeasured(t *testing.T) {
	w := setup(t, options{GatewayTimeout: time.Second})
	measured := func(ending string) float64 { return w.Metric("payments_charge_duration_seconds", "ending="+ending) }
	for _, attempt := range []struct {
		token, ending string
		status        int
	}{{"ok", "approved", 201}, {"declined", "declined", 402}, {"hang_after", "approved", 201}, {"error_before", "not_charged", 503}} {
		before := measured(attempt.ending)
		w.Pay(w.NewOrder(), w.NewKey(), "pm_"+attempt.token).Is(attempt.status)
		require.InDelta(t, before+1, measured(attempt.ending), 0, attempt.token)
	}
	off := w.Gateway.On(servicetest.PostCharge, servicetest.Always, servicetest.Cuts)
	defer off()
	defer w.Gateway.On(servicetest.GetCharge, servicetest.Always, servicetest.Cuts)()
	w.Pay(w.NewOrder(), w.NewKey(), "pm_ok").Is(504)
	require.InDelta(t, 1, measured("unknown"), 0)
}

func gatewayCallsAreCounted(t *testing.T) {
	w := setup(t, options{GatewayTimeout: 2 * time.Second})
	calls := func() counts { return w.Counted("payments_gateway_calls_total") }
	w.Pay(w.NewOrder(), w.NewKey(), "pm_ok").Is(201)
	w.Pay(w.NewOrder(), w.NewKey(), "pm_declined").Is(402)
	require.Equal(t, counts{"charge approved": 1, "charge declined": 1}, calls())

	w.Pay(w.NewOrder(), w.NewKey(), "pm_error_after").Is(201)
	require.Equal(t, counts{"charge approved": 1, "charge declined": 1, "charge refused": 1, "look_up approved": 1}, calls())

	w.Pay(w.NewOrder(), w.NewKey(), "pm_drop_after").Is(201)
	require.Equal(t, counts{"charge approved": 1, "charge declined": 1, "charge refused": 1, "charge unclear": 1, "look_up approved": 2}, calls())

	w.Gateway.Down()
	w.Pay(w.NewOrder(), w.NewKey(), "pm_ok").Is(503, "gateway-unavailable")
	w.Gateway.Up()
	require.Equal(t, 3, calls()["charge not_sent"])
}

func reaperCounts(t *testing.T) {
	w := setup(t, options{ReapAfter: time.Hour})
	found, early, never := payment.leaveBehind(w, "ok", true), payment.leaveBehind(w, "ok", false), payment.leaveBehind(w, "ok", false)
	w.MoveBack(never.key, 2*time.Hour)
	require.Zero(t, w.Metric("payments_reaper_last_round_timestamp_seconds"))
	_, err := w.Reaper.RunOnce(t.Context())
	require.NoError(t, err)
	require.Equal(t, counts{"recorded": 1, "left_alone": 1, "canceled": 1}, w.Counted("payments_reaper_keys_total"))
	require.InDelta(t, time.Now().Unix(), w.Metric("payments_reaper_last_round_timestamp_seconds"), 60)

	w.Gateway.Down()
	w.MoveBack(early.key, time.Hour)
	_, err = w.Reaper.RunOnce(t.Context())
	require.NoError(t, err)
	w.Gateway.Up()
	require.Equal(t, counts{"recorded": 1, "left_alone": 1, "canceled": 1, "unclear": 1}, w.Counted("payments_reaper_keys_total"))
	found.from(w.Client).Is(201).Replayed()
	never.from(w.Client).Is(402, "payment-failed").Replayed()
	early.from(w.Client).Is(201)
}

func leasesAreCounted(t *testing.T) {
	w := setup(t, options{LeaseTTL: 600 * time.Millisecond, Background: true, Link: true})
	order := w.NewOrder()
	gateway := w.Gateway.HoldAfter(servicetest.PostCharge, 1)
	first := servicetest.Go(func() answer { return w.Pay(order, "slow", "pm_ok") })
	gateway.Arrived()
	w.Eventually("the lease is renewed", func() bool { return w.Metric("payments_leases_renewed_total") > 0 })
	require.Zero(t, w.Metric("payments_leases_lost_total"))
	w.Link.Cut()
	w.Eventually("a renewal fails", func() bool { return w.Metric("payments_lease_renewal_failures_total") > 0 })
	w.Link.Restore()
	// Its renewals do not come through any more, somebody else takes over and answers, and the first attempt finds out when it records.
	renewal := w.Queries.HoldBefore("IdempotencyKeyRenew", 1)
	renewal.Arrived()
	w.ExpireLease("slow")
	w.NewReplica(options{}).As(w.Merchant).Pay(order, "slow", "pm_ok").Is(201)
	gateway.Release()
	renewal.Release()
	first().Is(201).Replayed()
	require.InDelta(t, 1, w.Metric("payments_leases_lost_total"), 0)
}

func backlogIsRead(t *testing.T) {
	w := setup(t, options{Link: true})
	require.Zero(t, w.Metric("payments_keys_in_progress"))
	require.Zero(t, w.Metric("payments_oldest_stale_key_age_seconds"))
	require.Zero(t, w.Metric("payments_oldest_unpurged_answer_age_seconds"))

	payment.leaveBehind(w, "ok", true)
	old := payment.leaveBehind(w, "ok", true)
	w.MoveBack(old.key, time.Hour)
	require.InDelta(t, 2, w.Metric("payments_keys_in_progress"), 0)
	require.InDelta(t, 3600, w.Metric("payments_oldest_stale_key_age_seconds"), 60)

	spent := w.NewKey()
	w.Pay(w.NewOrder(), spent, "pm_ok").Is(201)
	w.MoveBack(spent, *w.Key(spent).ExpiresIn+2*time.Hour)
	require.InDelta(t, 7200, w.Metric("payments_oldest_unpurged_answer_age_seconds"), 60)

	// While the database is away they are absent, and not zero.
	w.Link.Cut()
	families, err := w.Metrics.Gather()
	require.NoError(t, err)
	for _, family := range families {
		require.NotEqual(t, "payments_keys_in_progress", family.GetName())
	}
	w.Link.Restore()
}

func purgeIsCounted(t *testing.T) {
	w := setup(t, options{})
	keys := []string{w.NewKey(), w.NewKey()}
	for _, key := range keys {
		w.Pay(w.NewOrder(), key, "pm_ok").Is(201)
		w.MoveBack(key, *w.Key(key).ExpiresIn)
	}
	r := w.NewReplica(options{Background: true})
	w.Eventually("both are stripped", func() bool { return r.Metric("payments_purged_answers_total") == 2 })
	require.InDelta(t, time.Now().Unix(), r.Metric("payments_purge_last_round_timestamp_seconds"), 60)
	require.Zero(t, r.Metric("payments_purge_failures_total"))

	third := w.NewKey()
	w.Pay(w.NewOrder(), third, "pm_ok").Is(201)
	w.MoveBack(third, *w.Key(third).ExpiresIn)
	mend := w.Breaks("UPDATE", "idempotency_keys", "58030")
	refused := w.NewReplica(options{Background: true})
	w.Eventually("a batch is refused", func() bool { return refused.Metric("payments_purge_failures_total") == 1 })
	mend()
}

func requestsAreCounted(t *testing.T) {
	w := setup(t, options{})
	order := w.NewOrder()
	w.Pay(order, w.NewKey(), "pm_ok").Is(201)
	w.Pay(w.NewOrder(), w.NewKey(), "pm_declined").Is(402)
	w.Do("GET", "/v1/orders/"+order, "", "").Is(200)
	w.Do("HEAD", "/v1/orders/"+order, "", "").Is(200)
	w.Do("GET", "/v1/orders/"+order+"/"+order, "", "").Is(404)
	w.Do("DELETE", "/v1/orders/"+order, "", "").Is(405)
	counted := w.Counted("payments_http_requests_total")
	delete(counted, "GET /openapi.yaml 200") // The first client of all reads it.
	require.Equal(t, counts{
		"POST /v1/orders 201": 2, "POST /v1/payments 201": 1, "POST /v1/payments 402": 1,
		"GET /v1/orders/{id} 200": 1, "HEAD /v1/orders/{id} 200": 1, "GET unmatched 404": 1, "DELETE /v1/orders/{id} 405": 1,
	}, counted)
	require.InDelta(t, 2, w.Metric("payments_http_request_duration_seconds", "method=POST", "route=/v1/payments"), 0)
}

func labelsAreBounded(t *testing.T) {
	w := setup(t, options{})
	paid := w.NewPayment("pm_ok")
	w.Do("POST", "/v1/payments/"+paid+"/refunds", "a-key", "").Is(201)
	w.Pay(w.NewOrder(), "another-key", "pm_declined").Is(402)
	payment.leaveBehind(w, "ok", true)
	_, err := w.Reaper.RunOnce(t.Context())
	require.NoError(t, err)
	for i := range 20 {
		w.Do("GET", fmt.Sprintf("/v1/nothing-%d?idempotency_key=a-key", i), "a-key", "").Is(404)
		w.Do(fmt.Sprintf("METHOD%d", i), "/v1/orders", "", "")
	}
	families, err := w.Metrics.Gather()
	require.NoError(t, err)
	// Every value of a label is a word of ours, a route or a status.
	value := regexp.MustCompile(`^([a-z_]+|(/[a-z0-9_.{}-]+)+|[A-Z]+|[1-5][0-9][0-9])$`)
	for _, family := range families {
		require.True(t, strings.HasPrefix(family.GetName(), "payments_"), family.GetName())
		for _, metric := range family.Metric {
			for _, label := range metric.Label {
				require.Contains(t, []string{"result", "ending", "call", "method", "route", "status"}, label.GetName(), family.GetName())
				require.Regexp(t, value, label.GetValue(), family.GetName())
				for _, unbounded := range []string{paid, w.Merchant.ID.String(), "a-key", "another-key", "nothing", "METHOD"} {
					require.NotContains(t, label.GetValue(), unbounded, family.GetName())
				}
			}
		}
	}
	require.Len(t, w.Counted("payments_reaper_keys_total"), 1)
	require.Equal(t, 1, w.Counted("payments_reaper_keys_total")[string(payments.ReapRecorded)])
}
