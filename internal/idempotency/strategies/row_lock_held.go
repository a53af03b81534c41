package strategies

import (
	"context"

	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
)

// rowLockHeld is rowLock in one transaction from the look to the answer. It looks safer, and is how it is often written: nobody else can
// get in while the gateway works. Each payment then holds a connection and a lock for as long as the gateway takes, twins hold theirs while
// they wait, and a process that dies after the charge takes the only trace of it along, by rollback.
type rowLockHeld struct {
	rowLock
}

func newRowLockHeld(parts Parts) (Strategy, error) {
	return &rowLockHeld{rowLock{newKeys(parts)}}, nil
}

func (s *rowLockHeld) Pay(ctx context.Context, req payments.NewPayment) (answer idempotency.Answer, err error) {
	err = s.db.BeginFunc(context.WithoutCancel(ctx), func(ctx context.Context, tx pgx.Tx) (err error) {
		c, err := s.claimLocked(ctx, tx, req)
		answer, err = s.finishHeld(ctx, tx, c, err)
		return err
	})
	return answer, storageError(err)
}

// finishHeld is finish with the transaction open.
func (k *keys) finishHeld(ctx context.Context, tx pgx.Tx, c claimed, err error) (idempotency.Answer, error) {
	if err != nil || c.attempt == nil {
		return c.answer, err
	}
	outcome, err := charge(ctx, k.gateway, c.attempt, k.settings.GatewayTimeout)
	if err != nil {
		return idempotency.Answer{}, unfinished(c.attempt, err)
	}
	return k.record(ctx, tx, c.attempt, outcome)
}
