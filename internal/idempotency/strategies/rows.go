package strategies

import (
	"context"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/dbsqlc"
	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

// rows is what the two strategies share that have no row for a key in PostgreSQL, only the payment's.
type rows struct {
	db       *postgres.Pool
	gateway  payments.Gateway
	settings payments.Settings
	answers  answers
}

// find reads the payment of a gateway key. It returns [pgx.ErrNoRows] when there is none.
func (r *rows) find(ctx context.Context, merchantID uuid.UUID, gatewayKey string) (payments.Payment, error) {
	found, err := r.db.Query(ctx, `SELECT *
FROM payments
WHERE merchant_id = $1
    AND gateway_key = $2
ORDER BY status = 'processing'
LIMIT 1`, merchantID, gatewayKey)
	if err != nil {
		return payments.Payment{}, err
	}
	row, err := pgx.CollectExactlyOneRow(found, pgx.RowToStructByPos[dbsqlc.Payment])
	if err != nil {
		return payments.Payment{}, err
	}
	return payments.Payment{
		ID: row.ID, OrderID: row.OrderID, Status: row.Status, Amount: row.Amount, Currency: row.Currency,
		PaymentMethod: row.PaymentMethod, DeclineCode: row.DeclineCode, FailureCode: row.FailureCode,
		GatewayReference: row.GatewayReference, AmountRefunded: row.AmountRefunded, Metadata: row.Metadata, CreatedAt: row.CreatedAt,
	}, nil
}

const rowsInsert = `WITH o AS (
    ` + orderThatMayBePaid + `
)
` + insertPayment + `
    FROM o
    RETURNING id`

// insert writes the pending payment. It returns [pgx.ErrNoRows] when the order refuses.
func (r *rows) insert(ctx context.Context, req payments.NewPayment, a *attempt) error {
	var id uuid.UUID
	return r.db.QueryRow(ctx, rowsInsert, pgx.NamedArgs{
		"merchant_id": req.Claim.MerchantID, "id": a.payment.ID, "order_id": req.OrderID, "amount": req.Amount, "currency": req.Currency,
		"payment_method": req.PaymentMethod, "gateway_key": a.gatewayKey, "metadata": req.Metadata, "created_at": a.payment.CreatedAt,
	}).Scan(&id)
}

// rowsRecord is PaymentRecord without the key, and so without a lease to fence with. What it does not overwrite is a final status.
const rowsRecord = `WITH p AS (
    UPDATE payments
    SET status = @status,
        gateway_reference = @gateway_reference,
        decline_code = @decline_code,
        event_count = event_count + 1
    WHERE merchant_id = @merchant_id
        AND id = @id
        AND status = 'processing'
    RETURNING event_count
), o AS (
    UPDATE orders
    SET status = 'paid'
    WHERE merchant_id = @merchant_id
        AND id = @order_id
        AND @status = 'succeeded'
        AND EXISTS (SELECT FROM p)
), e AS (
    INSERT INTO events (merchant_id, subject_id, number, type, resource_id, payload)
    SELECT @merchant_id, @id, p.event_count, @event_type, @id, @event_payload
    FROM p
)
SELECT p.event_count
FROM p`

// record writes the outcome, the order and the event. It returns [pgx.ErrNoRows] when the payment is final already.
func (r *rows) record(ctx context.Context, merchantID uuid.UUID, final payments.Payment) error {
	var count int
	return r.db.QueryRow(ctx, rowsRecord, pgx.NamedArgs{
		"merchant_id": merchantID, "id": final.ID, "order_id": final.OrderID, "status": final.Status,
		"gateway_reference": final.GatewayReference, "decline_code": final.DeclineCode,
		"event_type": "payment." + final.Status, "event_payload": eventPayload(final),
	}).Scan(&count)
}

// rebuilt is the answer of a final payment, made again from its row.
func (r *rows) rebuilt(payment payments.Payment, requestID string) idempotency.Answer {
	answer := r.answers.PaymentFinal(payment, requestID)
	answer.Replayed = true
	return answer
}

func untilDone(ctx context.Context) error {
	<-ctx.Done()
	return nil
}
