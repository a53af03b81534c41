package strategies

import (
	"context"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
)

// onConflict is the service: there is nothing here to compare it with but itself. The claim is PaymentClaim in db/queries/payments.sql,
// the walk is internal/payments/once.go.
type onConflict struct {
	*payments.Service
}

func newOnConflict(parts Parts) (Strategy, error) {
	return onConflict{payments.New(parts.DB, parts.Renewals, parts.Gateway, answers{}, parts.Settings, parts.Log)}, nil
}

func (s onConflict) Pay(ctx context.Context, req payments.NewPayment) (idempotency.Answer, error) {
	return s.CreatePayment(ctx, req)
}
