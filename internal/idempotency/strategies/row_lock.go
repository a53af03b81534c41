package strategies

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/dbsqlc"
	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

// rowLock lets one request at a time look. A key that does not exist yet has no row to lock, so it locks what does exist: the order. Two
// requests with one key for different orders do not meet there; the unique index is what keeps those apart.
//
// What stands under the lock must be read by a new statement: a sub-select in the locking statement would look at the time before the wait.
// And the claim must not wait for anything else while it has the lock. A record of the order's payment holds the payment and then wants the
// order, so an INSERT that waits for that payment's index entry is a deadlock; hence NOT EXISTS instead of the index's no.
type rowLock struct {
	keys
}

func newRowLock(parts Parts) (Strategy, error) {
	return &rowLock{newKeys(parts)}, nil
}

func (s *rowLock) Pay(ctx context.Context, req payments.NewPayment) (idempotency.Answer, error) {
	ctx = context.WithoutCancel(ctx)
	c, err := s.claim(ctx, req)
	if err != nil || c.attempt == nil {
		return c.answer, storageError(err)
	}
	return s.finish(ctx, c.attempt)
}

const rowLockInsert = `WITH k AS (
    ` + insertKey + `
    WHERE NOT EXISTS (
        SELECT
        FROM payments
        WHERE merchant_id = @merchant_id
            AND order_id = @order_id
            AND status IN ('processing', 'succeeded')
    )
    RETURNING key
)
` + insertPayment + `
    FROM k
    RETURNING id`

func (s *rowLock) claim(ctx context.Context, req payments.NewPayment) (c claimed, err error) {
	for range claimTries {
		err = s.db.BeginFunc(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
			c, err = s.claimLocked(ctx, tx, req)
			return err
		})
		// A twin for another order has committed between our look and our INSERT: look again.
		if !postgres.IsUniqueViolation(err, keysPrimaryKey) {
			break
		}
	}
	return c, err
}

// claimLocked is the claim inside its transaction. Until that ends, every other request for the order stands in a queue.
func (s *rowLock) claimLocked(ctx context.Context, tx pgx.Tx, req payments.NewPayment) (claimed, error) {
	own := newAttempt(req)
	order, orderErr := s.queries.OrderLock(ctx, tx, dbsqlc.OrderLockParams{MerchantID: req.Claim.MerchantID, ID: req.OrderID})
	if orderErr != nil && !errors.Is(orderErr, pgx.ErrNoRows) {
		return claimed{}, orderErr
	}
	c, err := s.judge(ctx, tx, req, own)
	if !errors.Is(err, idempotency.ErrNoRecord) {
		return c, err
	}
	if orderErr != nil {
		return claimed{}, payments.ErrOrderNotFound
	}
	if err := refusalOf(order, req); !errors.Is(err, payments.ErrOrderPaymentInProgress) {
		return claimed{}, err
	}
	err = s.insert(ctx, tx, rowLockInsert, req, own)
	if errors.Is(err, pgx.ErrNoRows) {
		return claimed{}, payments.ErrOrderPaymentInProgress
	}
	return claimed{attempt: own}, err
}
