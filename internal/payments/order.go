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
	"example.com/payments/internal/postgres"
)

// Order is what is bought.
type Order struct {
	ID        uuid.UUID
	Status    string // open, paid, canceled, refunded
	Amount    int64  // minor units
	Currency  string
	Reference *string
	Metadata  map[string]string
	CreatedAt time.Time
}

const (
	OrderOpen     = "open"
	OrderPaid     = "paid"
	OrderCanceled = "canceled"
	OrderRefunded = "refunded"
)

// NewOrder is a validated request for an order.
type NewOrder struct {
	Claim     idempotency.Claim
	Amount    int64
	Currency  string
	Reference *string
	Metadata  map[string]string
}

// CreateOrder writes the order, its key and its answer in one statement: nothing outside the database has to happen, so the claim is
// the record too. The errors are those of a key (see package idempotency) and [ErrStorageUnavailable].
func (s *Service) CreateOrder(ctx context.Context, req NewOrder) (idempotency.Answer, error) {
	ctx = context.WithoutCancel(ctx)
	id, createdAt := newID()
	order := Order{
		ID: id, Status: OrderOpen, Amount: req.Amount, Currency: req.Currency,
		Reference: req.Reference, Metadata: req.Metadata, CreatedAt: createdAt,
	}
	answer := s.answers.OrderCreated(order)
	key, err := newKeyRow(req.Claim)
	if err != nil {
		return idempotency.Answer{}, err
	}
	for range claimTries {
		answer.ExpiresAt, err = s.queries.OrderCreate(ctx, s.db, dbsqlc.OrderCreateParams{
			MerchantID: req.Claim.MerchantID, Key: string(req.Claim.Key), Route: key.route, Recipe: key.recipe, Fingerprint: key.fingerprint,
			ID: order.ID, ResourcePath: answer.Headers["Location"], Holder: s.settings.Holder, RequestID: req.Claim.RequestID, Traceparent: req.Claim.TraceParent,
			AnswerStatus: int16(answer.Status), AnswerHeaders: mustJSON(answer.Headers), AnswerBody: answer.Body,
			Retention: s.settings.KeyRetention,
			Amount:    order.Amount, Currency: order.Currency, Reference: order.Reference,
			Metadata: order.Metadata, CreatedAt: order.CreatedAt,
		})
		if err == nil {
			s.decided(req.Claim, idempotency.ClaimWon, Subject{Path: answer.Headers["Location"]})
			return answer, nil
		}
		if !lost(err) {
			return idempotency.Answer{}, storageError(err)
		}
		stored, storedErr := s.stored(ctx, req.Claim)
		if !errors.Is(storedErr, idempotency.ErrNoRecord) {
			return stored, storedErr
		}
	}
	return idempotency.Answer{}, fmt.Errorf("%w: the claim was lost %d times: %w", ErrStorageUnavailable, claimTries, err)
}

// CancelOrder closes an open order against payment. The errors are those of a key, [ErrNotFound], [ErrOrderNotOpen],
// [ErrOrderPaymentInProgress] and [ErrStorageUnavailable].
func (s *Service) CancelOrder(ctx context.Context, claim idempotency.Claim, orderID uuid.UUID) (idempotency.Answer, error) {
	ctx = context.WithoutCancel(ctx)
	key, err := newKeyRow(claim)
	if err != nil {
		return idempotency.Answer{}, err
	}
	for range claimTries {
		// A repeat gets its answer whatever has become of the order since, and locks nothing.
		stored, storedErr := s.stored(ctx, claim)
		if !errors.Is(storedErr, idempotency.ErrNoRecord) {
			return stored, storedErr
		}
		var answer idempotency.Answer
		var refusal error
		answer, refusal, err = s.cancelOrder(ctx, claim, key, orderID)
		switch {
		case refusal != nil:
			// A twin may have canceled the order a moment ago, and its answer is this request's too.
			stored, storedErr := s.stored(ctx, claim)
			if !errors.Is(storedErr, idempotency.ErrNoRecord) {
				return stored, storedErr
			}
			return idempotency.Answer{}, refusal
		case err == nil:
			s.decided(claim, idempotency.ClaimWon, Subject{Path: answer.Headers["Location"]})
			return answer, nil
		case !lost(err):
			return idempotency.Answer{}, storageError(err)
		}
	}
	return idempotency.Answer{}, fmt.Errorf("%w: the claim was lost %d times: %w", ErrStorageUnavailable, claimTries, err)
}

// cancelOrder locks the order, looks for a live payment in a new statement, and only then cancels. In one statement the look would be
// older than the lock, and would miss the payment whose claim the lock has waited for.
func (s *Service) cancelOrder(ctx context.Context, claim idempotency.Claim, key keyRow, orderID uuid.UUID) (answer idempotency.Answer, refusal, err error) {
	err = s.db.BeginFunc(ctx, func(ctx context.Context, tx pgx.Tx) error {
		row, err := s.queries.OrderLock(ctx, tx, dbsqlc.OrderLockParams{MerchantID: claim.MerchantID, ID: orderID})
		if errors.Is(err, pgx.ErrNoRows) {
			refusal = ErrNotFound
			return nil
		}
		if err != nil {
			return err
		}
		if row.Status != OrderOpen {
			refusal = ErrOrderNotOpen
			return nil
		}
		paid, err := s.beingPaid(ctx, tx, claim.MerchantID, orderID)
		if err != nil {
			return err
		}
		if paid {
			refusal = ErrOrderPaymentInProgress
			return nil
		}
		order := orderFromRow(row)
		order.Status = OrderCanceled
		answer = s.answers.OrderCanceled(order)
		answer.ExpiresAt, err = s.queries.OrderCancel(ctx, tx, dbsqlc.OrderCancelParams{
			MerchantID: claim.MerchantID, Key: string(claim.Key), Route: key.route, Recipe: key.recipe, Fingerprint: key.fingerprint,
			ID: order.ID, ResourcePath: answer.Headers["Location"], Holder: s.settings.Holder, RequestID: claim.RequestID, Traceparent: claim.TraceParent,
			AnswerStatus: int16(answer.Status), AnswerHeaders: mustJSON(answer.Headers), AnswerBody: answer.Body,
			Retention: s.settings.KeyRetention, CreatedAt: now().UTC().Truncate(time.Microsecond),
			EventPayload: mustJSON(orderEvent{Amount: order.Amount, Currency: order.Currency}),
		})
		return err
	})
	return answer, refusal, err
}

// orderEvent is what the audit trail keeps of an order that was canceled.
type orderEvent struct {
	Amount   int64  `json:"amount"`
	Currency string `json:"currency"`
}

// stored answers from a key's record, for the routes whose keys are final from the start. It returns [idempotency.ErrNoRecord] when
// there is none. The record may be the caller's own, written by a statement whose call had failed.
func (s *Service) stored(ctx context.Context, claim idempotency.Claim) (idempotency.Answer, error) {
	record, err := idempotency.Get(ctx, s.db, claim.MerchantID, claim.Key)
	switch {
	case errors.Is(err, idempotency.ErrNoRecord):
		return idempotency.Answer{}, err
	case err != nil:
		return idempotency.Answer{}, storageError(err)
	}
	if err := s.judge(claim, record); err != nil {
		return idempotency.Answer{}, err
	}
	answer := record.Answer()
	result := idempotency.ClaimReplayed
	if answer.Replayed = answer.RequestID != claim.RequestID; !answer.Replayed {
		result = idempotency.ClaimWon
	}
	s.decided(claim, result, Subject{Path: record.ResourcePath})
	return answer, nil
}

// Order returns [ErrNotFound] for an order that is not there, and for another merchant's.
func (s *Service) Order(ctx context.Context, merchantID, id uuid.UUID) (Order, error) {
	row, err := s.queries.OrderGet(ctx, s.db, dbsqlc.OrderGetParams{MerchantID: merchantID, ID: id})
	if err != nil {
		return Order{}, notFound(err)
	}
	return orderFromRow(row), nil
}

func orderFromRow(row dbsqlc.Order) Order {
	return Order{
		ID: row.ID, Status: row.Status, Amount: row.Amount, Currency: row.Currency,
		Reference: row.Reference, Metadata: row.Metadata, CreatedAt: row.CreatedAt,
	}
}

// keyRow is what every claim writes of the request.
type keyRow struct {
	route       string
	recipe      int16
	fingerprint []byte
}

func newKeyRow(claim idempotency.Claim) (keyRow, error) {
	fingerprint, err := idempotency.Fingerprint(idempotency.CurrentRecipe, claim.Request)
	if err != nil {
		return keyRow{}, err
	}
	return keyRow{
		route:       claim.Request.Method + " " + claim.Request.Route,
		recipe:      idempotency.CurrentRecipe,
		fingerprint: fingerprint,
	}, nil
}

// lost reports whether a claim has to look at what is there now: no row came back, a unique index or a deadlock refused it, or its
// call failed and nobody can say whether it went through.
func lost(err error) bool {
	return errors.Is(err, pgx.ErrNoRows) ||
		postgres.IsUniqueViolation(err, oneLivePayment) ||
		postgres.IsNotNullViolation(err, "refunds", "payment_id") ||
		postgres.IsDeadlock(err) ||
		postgres.IsAmbiguous(err)
}
