package api_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/google/uuid"

	"example.com/payments/internal/api"
	"example.com/payments/internal/gateway"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
	"example.com/payments/internal/servicetest"
)

// BenchmarkIdempotency tells what idempotency costs: payments per second of POST /v1/payments, and of its twin that has none of it. The two
// take turns, so that whatever else the machine does meets both.
func BenchmarkIdempotency(b *testing.B) {
	const (
		budget  = 0.80 // DESIGN §6
		clients = 40   // twice the connections, so that the pool is never idle
		turns   = 30   // of each
		turn    = 500  // payments: half a second, and a hundred times as long as one payment takes
	)
	w := servicetest.New(b, options{DBMaxConns: 20, LeaseTTL: 5 * time.Second, Background: true, Quiet: true})
	client, err := gateway.New(w.Gateway.URL)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(client.CloseIdleConnections)
	w.API.ServeTwin(twin{w.Pool, client}.pay)
	callers := servicetest.NewCallers(b, clients, w.Replica.URL, w.Merchant.APIKey)
	// A turn returns payments per second.
	take := func(path string, n int) float64 {
		orders := w.NewOrders(n)
		return servicetest.AllOf(b, callers, n, func(c *servicetest.Caller, i int) error {
			return c.Send(http.StatusCreated, http.MethodPost, path, "bench-"+orders[i], servicetest.PayBody(orders[i], "pm_ok"))
		})
	}
	for b.Loop() {
		for range 3 { // connections are made, statements are planned
			take("/v1/payments", turn)
			take(api.TwinPath, turn)
		}
		rate, twinRate, ratio := servicetest.TakeTurns(turns,
			func() float64 { return take("/v1/payments", turn) },
			func() float64 { return take(api.TwinPath, turn) })
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(rate, "payments/s")
		b.ReportMetric(twinRate, "twin-payments/s")
		b.ReportMetric(ratio, "ratio")
		if ratio < budget {
			b.Errorf("%.0f payments/s with idempotency, %.0f without: a ratio of %.2f, and the budget is %.2f", rate, twinRate, ratio, budget)
		}
	}

	// Looking for each charge's payment, and for each payment's event, would take minutes.
	w.Exec("CREATE INDEX ON payments (gateway_key)")
	w.Exec("CREATE INDEX ON events (resource_id)")
	w.Exec("ANALYZE")
	// The key is all that the twin leaves out. With keys for its payments, whatever holds in every world has to hold; see [servicetest.New].
	twins := w.Exec(`
		INSERT INTO idempotency_keys (merchant_id, key, route, resource_id, resource_path, recipe, fingerprint, mode, state, attempt, holder, request_id,
			outcome_uncertain, created_at, final_at, expires_at)
		SELECT merchant_id, id::text, 'POST /v1/payments', id, '', 1, sha256(''), 'sync', 'done', 1, '', '', false, now(), now(), now()
		FROM payments AS p WHERE NOT EXISTS (SELECT FROM idempotency_keys AS k WHERE k.merchant_id = p.merchant_id AND k.resource_id = p.id)`)
	if want := (3 + turns) * turn; twins != want {
		b.Errorf("%d payments without a key, want %d", twins, want)
	}
}

// twin is the business of a payment without its key: the order is checked, the charge made, and payment, order and event are written, in two
// statements that are those of the service less the key.
type twin struct {
	db      *postgres.Pool
	gateway payments.Gateway
}

const (
	twinClaim = `
WITH o AS (
    SELECT orders.id
    FROM orders
    WHERE orders.merchant_id = $1
        AND orders.id = $8
        AND orders.status = 'open'
        AND orders.amount = $3
        AND orders.currency = $4
    FOR KEY SHARE
)
INSERT INTO payments (
    merchant_id, id, order_id, status, amount, currency, payment_method, gateway_key, metadata, created_at
)
SELECT
    $1, $2, o.id, 'processing', $3, $4, $5, $6, $7, $9
FROM o
RETURNING id`

	twinRecord = `
WITH p AS (
    UPDATE payments
    SET status = $1,
        gateway_reference = $2,
        decline_code = $3,
        failure_code = $4,
        event_count = event_count + 1
    WHERE payments.merchant_id = $5
        AND payments.id = $6
        AND payments.status = 'processing'
    RETURNING event_count
), o AS (
    UPDATE orders
    SET status = 'paid'
    WHERE orders.merchant_id = $5
        AND orders.id = $7
        AND $1 = 'succeeded'
        AND EXISTS (SELECT FROM p)
), e AS (
    INSERT INTO events (merchant_id, subject_id, number, type, resource_id, payload)
    SELECT $5, $6, p.event_count, $8, $6, $9
    FROM p
)
SELECT p.event_count
FROM p`
)

func (t twin) pay(ctx context.Context, merchantID uuid.UUID, request payments.NewPayment) (payments.Payment, error) {
	ctx = context.WithoutCancel(ctx)
	payment := payments.Payment{
		ID: uuid.Must(uuid.NewV7()), OrderID: request.OrderID, Status: payments.StatusProcessing, Amount: request.Amount, Currency: request.Currency,
		PaymentMethod: request.PaymentMethod, Metadata: request.Metadata, CreatedAt: time.Now().UTC().Truncate(time.Microsecond),
	}
	gatewayKey := payments.GatewayKey(payments.IntentCharge, merchantID, payment.ID.String())
	var id uuid.UUID
	err := t.db.QueryRow(ctx, twinClaim, merchantID, payment.ID, payment.Amount, payment.Currency, payment.PaymentMethod, gatewayKey,
		payment.Metadata, payment.OrderID, payment.CreatedAt).Scan(&id)
	if err != nil {
		return payments.Payment{}, fmt.Errorf("write the pending payment: %w", err)
	}
	outcome, err := t.charge(ctx, payments.Intent{
		Kind: payments.IntentCharge, Key: gatewayKey, Amount: payment.Amount, Currency: payment.Currency, PaymentMethod: payment.PaymentMethod,
	})
	if err != nil {
		return payments.Payment{}, err
	}
	payment.Status, payment.GatewayReference = payments.StatusSucceeded, &outcome.Reference
	payload, err := json.Marshal(map[string]any{
		"order_id": payment.OrderID, "amount": payment.Amount, "currency": payment.Currency,
		"gateway_reference": payment.GatewayReference, "decline_code": payment.DeclineCode, "failure_code": payment.FailureCode,
	})
	if err != nil {
		return payments.Payment{}, err
	}
	var number int
	err = t.db.QueryRow(ctx, twinRecord, payment.Status, payment.GatewayReference, payment.DeclineCode, payment.FailureCode, merchantID, payment.ID,
		payment.OrderID, "payment."+payment.Status, payload).Scan(&number)
	if err != nil {
		return payments.Payment{}, fmt.Errorf("write the end: %w", err)
	}
	return payment, nil
}

// charge is once, with a limit, as the service's first try is.
func (t twin) charge(ctx context.Context, intent payments.Intent) (payments.Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	outcome, err := t.gateway.Charge(ctx, intent)
	if err == nil && outcome.Status != payments.OutcomeApproved {
		err = fmt.Errorf("the gateway has %s it", outcome.Status)
	}
	return outcome, err
}
