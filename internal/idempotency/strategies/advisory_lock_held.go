package strategies

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

// advisoryLockHeld is advisoryLock in one transaction from the look to the answer; see rowLockHeld. To it comes that a collision of two
// hashes makes a stranger wait for somebody else's gateway, and a hash of 32 bits, such as hashtext's, does collide.
type advisoryLockHeld struct {
	advisoryLock
}

func newAdvisoryLockHeld(parts Parts) (Strategy, error) {
	return &advisoryLockHeld{advisoryLock{newKeys(parts), hash64}}, nil
}

func (s *advisoryLockHeld) Pay(ctx context.Context, req payments.NewPayment) (answer idempotency.Answer, err error) {
	ctx = context.WithoutCancel(ctx)
	err = s.db.BeginFunc(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
		c, err := s.claimLocked(ctx, tx, req)
		answer, err = s.finishHeld(ctx, tx, c, err)
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) || postgres.IsUniqueViolation(err, oneLivePayment) {
		err = s.refusal(ctx, s.db, req)
	}
	return answer, storageError(err)
}
