package payments

import (
	"context"
	"errors"

	"github.com/google/uuid"

	"example.com/payments/internal/idempotency"
)

// KeyReport is what support wants to know of a key: where it stands, and what the gateway says.
type KeyReport struct {
	Record idempotency.Record
	// The payment or refund, as one line for people; empty for the key of an order.
	Resource string
	// What the gateway says of it now, or why it does not say anything, and the key that it is asked for; empty for the key of an order.
	Gateway, GatewayKey string
	// The gateway's word is not what has been recorded as final.
	Contradicted bool
}

// KeyReport looks a key up, here and at the gateway. It changes nothing. It returns [idempotency.ErrNoRecord] when the key was never used.
func (s *Service) KeyReport(ctx context.Context, merchantID uuid.UUID, key idempotency.Key) (KeyReport, error) {
	record, err := idempotency.Get(ctx, s.db, merchantID, key)
	if errors.Is(err, idempotency.ErrNoRecord) {
		return KeyReport{}, err
	}
	if err != nil {
		return KeyReport{}, storageError(err)
	}
	report := KeyReport{Record: record}
	if record.Route != RouteCreatePayment && record.Route != RouteCreateRefund {
		return report, nil
	}
	story, err := s.storyOf(ctx, record.Route, merchantID, record.ResourceID)
	if err != nil {
		return KeyReport{}, err
	}
	report.Resource, report.GatewayKey = story.describe(), story.intent().Key
	ctx, cancel := context.WithTimeout(ctx, s.settings.GatewayTimeout)
	defer cancel()
	outcome, err := s.gateway.LookUp(ctx, story.intent())
	if err != nil {
		report.Gateway = err.Error()
		return report, nil
	}
	report.Gateway = string(outcome.Status)
	if outcome.Reference != "" {
		report.Gateway += " " + outcome.Reference
	}
	recorded := map[string]OutcomeStatus{StatusSucceeded: OutcomeApproved, StatusDeclined: OutcomeDeclined, StatusFailed: OutcomeCanceled}
	if want, final := recorded[story.status()]; final {
		report.Contradicted = outcome.Status != want
	}
	return report, nil
}
