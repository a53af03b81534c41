package payments

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/dbsqlc"
	"example.com/payments/internal/idempotency"
)

// Refund is captured money given back.
type Refund struct {
	ID               uuid.UUID
	PaymentID        uuid.UUID
	Status           string // processing, succeeded, declined, failed
	Amount           int64  // minor units
	Currency         string
	Reason           *string
	FailureCode      *string
	GatewayReference *string
	CreatedAt        time.Time

	orderID    uuid.UUID
	gatewayKey string
	chargeKey  string // the gateway key of the payment's charge
}

// RouteCreateRefund is the route as the keys of refunds carry it.
const RouteCreateRefund = "POST /v1/payments/{id}/refunds"

// NewRefund is a validated request for a refund.
type NewRefund struct {
	Claim     idempotency.Claim
	Wait      *time.Duration // how long a repeat waits for the answer; nil: not at all
	PaymentID uuid.UUID
	Amount    *int64 // minor units; nil: all that is left
	Reason    *string
}

// CreateRefund gives money back once and answers every request under its key with the one answer. See [Service.once] for the walk and
// what it returns; the rules of the payment add [ErrNotFound], [ErrPaymentNotRefundable] and [ErrRefundExceedsPayment].
func (s *Service) CreateRefund(ctx context.Context, req NewRefund) (idempotency.Answer, error) {
	id, createdAt := newID()
	return s.once(ctx, req.Claim, req.Wait, &refundStory{service: s, merchantID: req.Claim.MerchantID, amount: req.Amount, refund: Refund{
		ID: id, PaymentID: req.PaymentID, Status: StatusProcessing, Reason: req.Reason, CreatedAt: createdAt,
		gatewayKey: GatewayKey(IntentRefund, req.Claim.MerchantID, string(req.Claim.Key)),
	}})
}

// refundStory is what a refund does at each station of the walk.
type refundStory struct {
	service    *Service
	merchantID uuid.UUID
	amount     *int64 // what was asked for; nil: all that is left
	refund     Refund
}

// claim writes the key and the pending refund together and reserves the amount, if the payment allows it.
func (r *refundStory) claim(ctx context.Context, claim idempotency.Claim, lease idempotency.Lease) error {
	key, err := newKeyRow(claim)
	if err != nil {
		return err
	}
	if r.amount != nil {
		r.refund.Amount = *r.amount
	} else if r.refund.Amount, err = r.left(ctx); err != nil {
		return err
	}
	settings := r.service.settings
	row, err := r.service.queries.RefundClaim(ctx, r.service.db, dbsqlc.RefundClaimParams{
		MerchantID: r.merchantID, Key: string(claim.Key), Route: key.route, Recipe: key.recipe, Fingerprint: key.fingerprint,
		ResourcePath: r.subject().Path, Mode: string(claim.Mode),
		Holder: settings.Holder, RequestID: claim.RequestID, Traceparent: claim.TraceParent, LeaseID: lease.ID, LeaseTTL: settings.LeaseTTL,
		ID: r.refund.ID, PaymentID: r.refund.PaymentID, Amount: r.refund.Amount, Reason: r.refund.Reason,
		GatewayKey: r.refund.gatewayKey, CreatedAt: r.refund.CreatedAt,
	})
	if err != nil {
		return err
	}
	r.refund.orderID, r.refund.Currency, r.refund.chargeKey = row.OrderID, row.Currency, row.ChargeKey
	return nil
}

// left is what of the payment is neither refunded nor about to be, at the price of a round trip more. Another refund may take it before the claim does; then the claim
// is refused, and tried again with what is left by then. Nothing left is a claim that writes nothing.
func (r *refundStory) left(ctx context.Context) (int64, error) {
	row, err := r.payment(ctx)
	if err != nil {
		return 0, err
	}
	if row.Status != StatusSucceeded || row.AmountReserved == row.Amount {
		return 0, pgx.ErrNoRows
	}
	return row.Amount - row.AmountReserved, nil
}

func (r *refundStory) payment(ctx context.Context) (dbsqlc.Payment, error) {
	return r.service.queries.PaymentGet(ctx, r.service.db, dbsqlc.PaymentGetParams{MerchantID: r.merchantID, ID: r.refund.PaymentID})
}

// refusal says which rule of the payment the claim has met, in the order in which the rules are promised.
func (r *refundStory) refusal(ctx context.Context) error {
	row, err := r.payment(ctx)
	if err != nil {
		return notFound(err)
	}
	left := row.Amount - row.AmountReserved
	switch {
	case row.Status != StatusSucceeded:
		return ErrPaymentNotRefundable
	case left == 0, r.amount != nil && *r.amount > left:
		return ErrRefundExceedsPayment
	}
	return nil
}

func (r *refundStory) load(ctx context.Context, id uuid.UUID) (story, error) {
	row, err := r.service.queries.RefundGet(ctx, r.service.db, dbsqlc.RefundGetParams{MerchantID: r.merchantID, ID: id})
	if err != nil {
		return nil, notFound(err)
	}
	refund := refundFromRow(row.Refund)
	refund.orderID, refund.chargeKey = row.OrderID, row.ChargeKey
	return &refundStory{service: r.service, merchantID: r.merchantID, refund: refund}, nil
}

func (r *refundStory) subject() Subject {
	return Subject{Kind: KindRefund, ID: r.refund.ID, Path: r.service.answers.Path(KindRefund, r.refund.ID)}
}

func (r *refundStory) intent() Intent {
	return Intent{
		Kind: IntentRefund, Key: r.refund.gatewayKey,
		Amount: r.refund.Amount, Currency: r.refund.Currency, ChargeKey: r.refund.chargeKey,
	}
}

func (r *refundStory) describe() string {
	return fmt.Sprintf("refund %s of payment %s: %d %s, %s", r.refund.ID, r.refund.PaymentID, r.refund.Amount, r.refund.Currency, r.refund.Status)
}

func (r *refundStory) status() string { return r.refund.Status }

func (r *refundStory) accepted() idempotency.Answer {
	return r.service.answers.RefundAccepted(r.refund)
}

// record writes the outcome, the answer, the payment, the order and the event together, if the lease is still the present one.
func (r *refundStory) record(ctx context.Context, lease idempotency.Lease, requestID string, outcome Outcome) (idempotency.Answer, error) {
	final := r.refund.ended(outcome)
	answer := r.service.answers.RefundFinal(final, requestID)
	expiresAt, err := r.service.queries.RefundRecord(ctx, r.service.db, dbsqlc.RefundRecordParams{
		MerchantID: r.merchantID, Key: string(lease.Key), LeaseID: lease.ID, State: string(finalState(outcome)),
		AnswerStatus: int16(answer.Status), AnswerHeaders: mustJSON(answer.Headers), AnswerBody: answer.Body,
		Retention: r.service.settings.KeyRetention,
		ID:        final.ID, PaymentID: final.PaymentID, OrderID: final.orderID, Status: final.Status, Amount: final.Amount,
		GatewayReference: final.GatewayReference, FailureCode: final.FailureCode,
		EventType: "refund." + final.Status, EventPayload: mustJSON(refundEvent{
			PaymentID: final.PaymentID, Amount: final.Amount, Currency: final.Currency,
			GatewayReference: final.GatewayReference, FailureCode: final.FailureCode,
		}),
	})
	answer.ExpiresAt = expiresAt
	return answer, err
}

// refundEvent is what the audit trail keeps of a refund that has become final.
type refundEvent struct {
	PaymentID        uuid.UUID `json:"payment_id"`
	Amount           int64     `json:"amount"`
	Currency         string    `json:"currency"`
	GatewayReference *string   `json:"gateway_reference"`
	FailureCode      *string   `json:"failure_code"`
}

// ended is the refund after a final outcome. A decline's reason is its failure code.
func (r Refund) ended(outcome Outcome) Refund {
	switch outcome.Status {
	case OutcomeApproved:
		r.Status, r.GatewayReference = StatusSucceeded, &outcome.Reference
	case OutcomeDeclined:
		r.Status, r.GatewayReference, r.FailureCode = StatusDeclined, &outcome.Reference, &outcome.DeclineCode
	case OutcomeCanceled:
		code := NeverCharged
		r.Status, r.FailureCode = StatusFailed, &code
	default:
		panic(fmt.Sprintf("payments: outcome %q is not final", outcome.Status))
	}
	return r
}

// Refund returns [ErrNotFound] for a refund that is not there, and for another merchant's.
func (s *Service) Refund(ctx context.Context, merchantID, id uuid.UUID) (Refund, error) {
	row, err := s.queries.RefundGet(ctx, s.db, dbsqlc.RefundGetParams{MerchantID: merchantID, ID: id})
	if err != nil {
		return Refund{}, notFound(err)
	}
	return refundFromRow(row.Refund), nil
}

func refundFromRow(row dbsqlc.Refund) Refund {
	return Refund{
		ID: row.ID, PaymentID: row.PaymentID, Status: row.Status, Amount: row.Amount, Currency: row.Currency,
		Reason: row.Reason, FailureCode: row.FailureCode, GatewayReference: row.GatewayReference, CreatedAt: row.CreatedAt,
		gatewayKey: row.GatewayKey,
	}
}

// RefundsOfPayment lists a payment's refunds; see [Page]. It returns [ErrNotFound] for a payment that is not there, and for another
// merchant's.
func (s *Service) RefundsOfPayment(ctx context.Context, merchantID, paymentID uuid.UUID, page Page) ([]Refund, *uuid.UUID, error) {
	if _, err := s.Payment(ctx, merchantID, paymentID); err != nil {
		return nil, nil, err
	}
	rows, err := s.queries.RefundListOfPayment(ctx, s.db, dbsqlc.RefundListOfPaymentParams{
		MerchantID: merchantID, PaymentID: paymentID, Before: page.before(), Max: page.max(),
	})
	if err != nil {
		return nil, nil, storageError(err)
	}
	refunds, next := cut(page, rows, refundFromRow, func(r Refund) uuid.UUID { return r.ID })
	return refunds, next, nil
}
