package strategies

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
)

// checkThenAct looks whether there is a payment under the key, and makes one if there is none. Two requests that look at the same time both
// find nothing, and both charge. Nothing in the code looks wrong, and every test with one client passes.
//
// Its key is the payment's gateway key, which is the same for all requests with one idempotency key. See its Kind for the unique indexes
// that it does without.
type checkThenAct struct {
	rows
}

func newCheckThenAct(parts Parts) (Strategy, error) {
	return &checkThenAct{rows{parts.DB, parts.Gateway, parts.Settings, answers{}}}, nil
}

func (s *checkThenAct) Pay(ctx context.Context, req payments.NewPayment) (idempotency.Answer, error) {
	ctx = context.WithoutCancel(ctx)
	own := newAttempt(req)
	payment, err := s.find(ctx, req.Claim.MerchantID, own.gatewayKey)
	switch {
	case err == nil && payment.Status != payments.StatusProcessing:
		return s.rebuilt(payment, own.requestID), nil
	case err == nil:
		return idempotency.Answer{}, &idempotency.InFlightError{Record: idempotency.Record{ResourceID: payment.ID, StartedAt: payment.CreatedAt}}
	case !errors.Is(err, pgx.ErrNoRows):
		return idempotency.Answer{}, storageError(err)
	}
	// This is the gap.
	if err := s.insert(ctx, req, own); err != nil {
		if errors.Is(err, pgx.ErrNoRows) {
			err = payments.ErrOrderNotOpen
		}
		return idempotency.Answer{}, storageError(err)
	}
	outcome, err := charge(ctx, s.gateway, own, s.settings.GatewayTimeout)
	if err != nil {
		return idempotency.Answer{}, unfinished(own, err)
	}
	final := own.ended(outcome)
	if err := s.record(ctx, req.Claim.MerchantID, final); err != nil {
		return idempotency.Answer{}, unfinished(own, err)
	}
	return s.answers.PaymentFinal(final, own.requestID), nil
}

// Run renews nothing: there are no leases.
func (s *checkThenAct) Run(ctx context.Context) error { return untilDone(ctx) }
