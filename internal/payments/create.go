package payments

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/dbsqlc"
	"example.com/payments/internal/idempotency"
)

// Payment is our attempt to be paid for an order.
type Payment struct {
	ID               uuid.UUID
	OrderID          uuid.UUID
	Status           string // processing, succeeded, declined, failed
	Amount           int64  // minor units
	Currency         string
	PaymentMethod    string
	DeclineCode      *string
	FailureCode      *string
	GatewayReference *string
	AmountRefunded   int64
	Metadata         map[string]string
	CreatedAt        time.Time

	gatewayKey string
}

// The statuses of payments and refunds.
const (
	StatusProcessing = "processing"
	StatusSucceeded  = "succeeded"
	StatusDeclined   = "declined" // the issuer said no
	StatusFailed     = "failed"   // closed with the gateway's word that nothing was charged and nothing can be
)

// NeverCharged is the failure code of what was closed by a cancel at the gateway.
const NeverCharged = "never_charged"

// RouteCreatePayment is the route as the keys of payments carry it.
const RouteCreatePayment = "POST /v1/payments"

// oneLivePayment is the index that keeps two keys from paying one order.
const oneLivePayment = "one_live_payment_per_order"

// NewPayment is a validated request for a payment.
type NewPayment struct {
	Claim         idempotency.Claim
	Wait          *time.Duration // how long a repeat waits for the answer; nil: not at all
	OrderID       uuid.UUID
	Amount        int64
	Currency      string
	PaymentMethod string
	Metadata      map[string]string
}

// CreatePayment takes the payment once and answers every request under its key with the one answer. See [Service.once] for the walk
// and what it returns; the rules of the order add [ErrOrderNotFound], [ErrOrderNotOpen], [ErrAmountMismatch] and
// [ErrOrderPaymentInProgress].
func (s *Service) CreatePayment(ctx context.Context, req NewPayment) (idempotency.Answer, error) {
	id, createdAt := newID()
	return s.once(ctx, req.Claim, req.Wait, &paymentStory{service: s, merchantID: req.Claim.MerchantID, payment: Payment{
		ID: id, OrderID: req.OrderID, Status: StatusProcessing, Amount: req.Amount, Currency: req.Currency,
		PaymentMethod: req.PaymentMethod, Metadata: req.Metadata, CreatedAt: createdAt,
		gatewayKey: GatewayKey(IntentCharge, req.Claim.MerchantID, string(req.Claim.Key)),
	}})
}

// paymentStory is what a payment does at each station of the walk.
type paymentStory struct {
	service    *Service
	merchantID uuid.UUID
	payment    Payment
}

// claim writes the key and the pending payment together, if the order allows it.
func (p *paymentStory) claim(ctx context.Context, claim idempotency.Claim, lease idempotency.Lease) error {
	key, err := newKeyRow(claim)
	if err != nil {
		return err
	}
	settings := p.service.settings
	_, err = p.service.queries.PaymentClaim(ctx, p.service.db, dbsqlc.PaymentClaimParams{
		MerchantID: p.merchantID, Key: string(claim.Key), Route: key.route, Recipe: key.recipe, Fingerprint: key.fingerprint,
		ResourcePath: p.subject().Path, Mode: string(claim.Mode),
		Holder: settings.Holder, RequestID: claim.RequestID, Traceparent: claim.TraceParent, LeaseID: lease.ID, LeaseTTL: settings.LeaseTTL,
		ID: p.payment.ID, OrderID: p.payment.OrderID, Amount: p.payment.Amount, Currency: p.payment.Currency,
		PaymentMethod: p.payment.PaymentMethod, GatewayKey: p.payment.gatewayKey,
		Metadata: p.payment.Metadata, CreatedAt: p.payment.CreatedAt,
	})
	return err
}

// refusal says which rule of the order the claim has met, in the order in which the rules are promised.
func (p *paymentStory) refusal(ctx context.Context) error {
	order, err := p.service.Order(ctx, p.merchantID, p.payment.OrderID)
	switch {
	case errors.Is(err, ErrNotFound):
		return ErrOrderNotFound
	case err != nil:
		return err
	case order.Status != OrderOpen:
		return ErrOrderNotOpen
	case order.Amount != p.payment.Amount || order.Currency != p.payment.Currency:
		return ErrAmountMismatch
	}
	paid, err := p.service.beingPaid(ctx, p.service.db, p.merchantID, p.payment.OrderID)
	switch {
	case err != nil:
		return storageError(err)
	case paid:
		return ErrOrderPaymentInProgress
	}
	return nil
}

// beingPaid reports whether the order has a live payment.
func (s *Service) beingPaid(ctx context.Context, db dbsqlc.DBTX, merchantID, orderID uuid.UUID) (bool, error) {
	_, err := s.queries.PaymentLiveOfOrder(ctx, db, dbsqlc.PaymentLiveOfOrderParams{MerchantID: merchantID, OrderID: orderID})
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	return err == nil, err
}

func (p *paymentStory) load(ctx context.Context, id uuid.UUID) (story, error) {
	payment, err := p.service.Payment(ctx, p.merchantID, id)
	return &paymentStory{service: p.service, merchantID: p.merchantID, payment: payment}, err
}

func (p *paymentStory) subject() Subject {
	return Subject{Kind: KindPayment, ID: p.payment.ID, Path: p.service.answers.Path(KindPayment, p.payment.ID)}
}

func (p *paymentStory) intent() Intent {
	return Intent{
		Kind: IntentCharge, Key: p.payment.gatewayKey,
		Amount: p.payment.Amount, Currency: p.payment.Currency, PaymentMethod: p.payment.PaymentMethod,
	}
}

func (p *paymentStory) describe() string {
	return fmt.Sprintf("payment %s of order %s: %d %s, %s", p.payment.ID, p.payment.OrderID, p.payment.Amount, p.payment.Currency, p.payment.Status)
}

func (p *paymentStory) status() string { return p.payment.Status }

func (p *paymentStory) accepted() idempotency.Answer {
	return p.service.answers.PaymentAccepted(p.payment)
}

// record writes the outcome, the answer, the order and the event together, if the lease is still the present one.
func (p *paymentStory) record(ctx context.Context, lease idempotency.Lease, requestID string, outcome Outcome) (idempotency.Answer, error) {
	final := p.payment.ended(outcome)
	answer := p.service.answers.PaymentFinal(final, requestID)
	expiresAt, err := p.service.queries.PaymentRecord(ctx, p.service.db, dbsqlc.PaymentRecordParams{
		MerchantID: p.merchantID, Key: string(lease.Key), LeaseID: lease.ID, State: string(finalState(outcome)),
		AnswerStatus: int16(answer.Status), AnswerHeaders: mustJSON(answer.Headers), AnswerBody: answer.Body,
		Retention: p.service.settings.KeyRetention,
		ID:        final.ID, OrderID: final.OrderID, Status: final.Status,
		GatewayReference: final.GatewayReference, DeclineCode: final.DeclineCode, FailureCode: final.FailureCode,
		EventType: "payment." + final.Status, EventPayload: mustJSON(paymentEvent{
			OrderID: final.OrderID, Amount: final.Amount, Currency: final.Currency,
			GatewayReference: final.GatewayReference, DeclineCode: final.DeclineCode, FailureCode: final.FailureCode,
		}),
	})
	answer.ExpiresAt = expiresAt
	return answer, err
}

// paymentEvent is what the audit trail keeps of a payment that has become final.
type paymentEvent struct {
	OrderID          uuid.UUID `json:"order_id"`
	Amount           int64     `json:"amount"`
	Currency         string    `json:"currency"`
	GatewayReference *string   `json:"gateway_reference"`
	DeclineCode      *string   `json:"decline_code"`
	FailureCode      *string   `json:"failure_code"`
}

// ended is the payment after a final outcome.
func (p Payment) ended(outcome Outcome) Payment {
	switch outcome.Status {
	case OutcomeApproved:
		p.Status, p.GatewayReference = StatusSucceeded, &outcome.Reference
	case OutcomeDeclined:
		p.Status, p.GatewayReference, p.DeclineCode = StatusDeclined, &outcome.Reference, &outcome.DeclineCode
	case OutcomeCanceled:
		code := NeverCharged
		p.Status, p.FailureCode = StatusFailed, &code
	default:
		panic(fmt.Sprintf("payments: outcome %q is not final", outcome.Status))
	}
	return p
}

// finalState is the state of a key whose resource has met the outcome.
func finalState(outcome Outcome) idempotency.State {
	if outcome.Status == OutcomeCanceled {
		return idempotency.StateFailed
	}
	return idempotency.StateDone
}

// Payment returns [ErrNotFound] for a payment that is not there, and for another merchant's.
func (s *Service) Payment(ctx context.Context, merchantID, id uuid.UUID) (Payment, error) {
	row, err := s.queries.PaymentGet(ctx, s.db, dbsqlc.PaymentGetParams{MerchantID: merchantID, ID: id})
	if err != nil {
		return Payment{}, notFound(err)
	}
	return paymentFromRow(row), nil
}

func paymentFromRow(row dbsqlc.Payment) Payment {
	return Payment{
		ID: row.ID, OrderID: row.OrderID, Status: row.Status, Amount: row.Amount, Currency: row.Currency,
		PaymentMethod: row.PaymentMethod, DeclineCode: row.DeclineCode, FailureCode: row.FailureCode,
		GatewayReference: row.GatewayReference, AmountRefunded: row.AmountRefunded, Metadata: row.Metadata, CreatedAt: row.CreatedAt,
		gatewayKey: row.GatewayKey,
	}
}
