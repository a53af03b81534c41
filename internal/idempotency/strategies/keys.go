package strategies

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/dbsqlc"
	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

const (
	// A claim is tried three times, as the service does: the ground may shift under a loser, but not for ever.
	claimTries = 3

	keysPrimaryKey = "idempotency_keys_pkey"
	oneLivePayment = "one_live_payment_per_order"
)

// insertKey and insertPayment are the two writes of a claim. What they select from, and under which lock, is each strategy's own.
const (
	insertKey = `INSERT INTO idempotency_keys (
        merchant_id, key, route, resource_id, resource_path, recipe, fingerprint, mode,
        state, attempt, holder, request_id, lease_id, lease_expires_at, next_look_at, outcome_uncertain, created_at
    )
    SELECT
        @merchant_id, @key, @route, @id, @resource_path, @recipe, @fingerprint, 'sync',
        'in_progress', 1, @holder, @request_id, @lease_id::uuid,
        clock_timestamp() + @lease_ttl::interval, clock_timestamp() + @lease_ttl::interval, true, @created_at`

	insertPayment = `INSERT INTO payments (
        merchant_id, id, order_id, status, amount, currency, payment_method, gateway_key, metadata, created_at
    )
    SELECT
        @merchant_id, @id, @order_id, 'processing', @amount, @currency, @payment_method, @gateway_key, @metadata, @created_at`

	// The order's rules, with the order kept open until the transaction ends. For the strength of the lock see PaymentClaim.
	orderThatMayBePaid = `SELECT id
    FROM orders
    WHERE merchant_id = @merchant_id
        AND id = @order_id
        AND status = 'open'
        AND amount = @amount
        AND currency = @currency
    FOR KEY SHARE`
)

// keys is what the strategies share that keep their claims in the service's own table: everything but the claim. Its statements are the
// service's own, from db/queries.
type keys struct {
	db       *postgres.Pool
	gateway  payments.Gateway
	settings payments.Settings
	answers  answers
	queries  *dbsqlc.Queries
	leases   *idempotency.Leases
}

func newKeys(parts Parts) keys {
	return keys{
		db: parts.DB, gateway: parts.Gateway, settings: parts.Settings, queries: dbsqlc.New(),
		leases: idempotency.NewLeases(parts.Renewals, parts.Settings.LeaseTTL, parts.Log),
	}
}

// Run renews the leases of the attempts between claim and record.
func (k *keys) Run(ctx context.Context) error { return k.leases.Run(ctx) }

// attempt is one holder's turn at giving a key its answer.
type attempt struct {
	lease      idempotency.Lease
	payment    payments.Payment
	gatewayKey string
	requestID  string
	resumed    bool // another attempt came before, so the gateway is asked before it is sent anything
}

// claimed is what a claim ends with that does not end with an error: the key is the caller's, or it has an answer.
type claimed struct {
	attempt *attempt
	answer  idempotency.Answer // if attempt is nil
}

// newAttempt is the first attempt at the request's key.
func newAttempt(req payments.NewPayment) *attempt {
	return &attempt{
		lease: idempotency.Lease{MerchantID: req.Claim.MerchantID, Key: req.Claim.Key, ID: uuid.New(), Attempt: 1},
		payment: payments.Payment{
			ID: uuid.Must(uuid.NewV7()), OrderID: req.OrderID, Status: payments.StatusProcessing, Amount: req.Amount, Currency: req.Currency,
			PaymentMethod: req.PaymentMethod, Metadata: req.Metadata, CreatedAt: time.Now().UTC().Truncate(time.Microsecond),
		},
		gatewayKey: payments.GatewayKey(payments.IntentCharge, req.Claim.MerchantID, string(req.Claim.Key)),
		requestID:  req.Claim.RequestID,
	}
}

func (a *attempt) intent() payments.Intent {
	return payments.Intent{
		Kind: payments.IntentCharge, Key: a.gatewayKey,
		Amount: a.payment.Amount, Currency: a.payment.Currency, PaymentMethod: a.payment.PaymentMethod,
	}
}

// ended is the payment after the gateway's last word.
func (a *attempt) ended(outcome payments.Outcome) payments.Payment {
	payment := a.payment
	payment.Status, payment.GatewayReference = payments.StatusSucceeded, &outcome.Reference
	if outcome.Status == payments.OutcomeDeclined {
		payment.Status, payment.DeclineCode = payments.StatusDeclined, &outcome.DeclineCode
	}
	return payment
}

func (a *attempt) subject() payments.Subject {
	return payments.Subject{Kind: payments.KindPayment, ID: a.payment.ID, Path: answers{}.Path(payments.KindPayment, a.payment.ID)}
}

// insert runs a claim's writing statement, which has the arguments of insertKey and insertPayment. It returns [pgx.ErrNoRows] when it wrote
// nothing.
func (k *keys) insert(ctx context.Context, db dbsqlc.DBTX, statement string, req payments.NewPayment, a *attempt) error {
	fingerprint, err := idempotency.Fingerprint(idempotency.CurrentRecipe, req.Claim.Request)
	if err != nil {
		return err
	}
	var id uuid.UUID
	return db.QueryRow(ctx, statement, pgx.NamedArgs{
		"merchant_id": req.Claim.MerchantID, "key": string(req.Claim.Key), "route": payments.RouteCreatePayment,
		"id": a.payment.ID, "resource_path": a.subject().Path, "recipe": idempotency.CurrentRecipe, "fingerprint": fingerprint,
		"holder": k.settings.Holder, "request_id": req.Claim.RequestID, "lease_id": a.lease.ID, "lease_ttl": k.settings.LeaseTTL,
		"order_id": req.OrderID, "amount": req.Amount, "currency": req.Currency, "payment_method": req.PaymentMethod,
		"gateway_key": a.gatewayKey, "metadata": req.Metadata, "created_at": a.payment.CreatedAt,
	}).Scan(&id)
}

// judge says what a request gets whose key has a row, from that row: its answer, an error, or, if it is stale, the next attempt. It
// returns [idempotency.ErrNoRecord] when there is none.
func (k *keys) judge(ctx context.Context, db dbsqlc.DBTX, req payments.NewPayment, own *attempt) (claimed, error) {
	record, err := idempotency.Get(ctx, db, req.Claim.MerchantID, req.Claim.Key)
	if err != nil {
		return claimed{}, err
	}
	if err := record.Judge(req.Claim.Request); err != nil {
		return claimed{}, err
	}
	if record.Final() {
		return claimed{answer: record.Answer()}, nil
	}
	if !record.Stale() {
		return claimed{}, &idempotency.InFlightError{Record: record}
	}
	own.lease.Attempt = record.Attempt
	next, ok, err := idempotency.TakeOver(ctx, db, own.lease, k.settings.Holder, &req.Claim, k.settings.LeaseTTL)
	if err != nil {
		return claimed{}, err
	}
	if !ok { // Somebody was quicker.
		return claimed{}, &idempotency.InFlightError{Record: record}
	}
	// The same request as the first, by its fingerprint, so the same payment but for these two.
	own.payment.ID, own.payment.CreatedAt = record.ResourceID, record.StartedAt
	own.lease, own.resumed = next, true
	return claimed{attempt: own}, nil
}

// refusal says which rule of the order a claim has met that wrote nothing although nobody has the key.
func (k *keys) refusal(ctx context.Context, db dbsqlc.DBTX, req payments.NewPayment) error {
	order, err := k.queries.OrderGet(ctx, db, dbsqlc.OrderGetParams{MerchantID: req.Claim.MerchantID, ID: req.OrderID})
	if errors.Is(err, pgx.ErrNoRows) {
		return payments.ErrOrderNotFound
	}
	if err != nil {
		return err
	}
	return refusalOf(order, req)
}

// refused ends a claim that wrote nothing although nobody has the key: with the rule of the order that it has met, unless a twin was let in
// since, whose answer comes before what the rules say now.
func (k *keys) refused(ctx context.Context, req payments.NewPayment, own *attempt) (claimed, error) {
	refusal := k.refusal(ctx, k.db, req)
	c, err := k.judge(ctx, k.db, req, own)
	if !errors.Is(err, idempotency.ErrNoRecord) {
		return c, err
	}
	return claimed{}, refusal
}

// refusalOf is the rule of the order that forbids the payment, or that somebody else's is in progress.
func refusalOf(order dbsqlc.Order, req payments.NewPayment) error {
	switch {
	case order.Status != payments.OrderOpen:
		return payments.ErrOrderNotOpen
	case order.Amount != req.Amount || order.Currency != req.Currency:
		return payments.ErrAmountMismatch
	}
	return payments.ErrOrderPaymentInProgress
}

// finish is what comes after the claim, the same for a first attempt and for a later one: charge, then record or release. No transaction is
// open and no connection held.
func (k *keys) finish(ctx context.Context, a *attempt) (idempotency.Answer, error) {
	drop := k.leases.Hold(a.lease.ID)
	defer drop()
	outcome, err := charge(ctx, k.gateway, a, k.settings.GatewayTimeout)
	if err != nil {
		return idempotency.Answer{}, k.release(ctx, a, err)
	}
	return k.record(ctx, k.db, a, outcome)
}

// charge asks the gateway once. An attempt that was resumed finds out first.
func charge(ctx context.Context, gateway payments.Gateway, a *attempt, budget time.Duration) (payments.Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	if a.resumed {
		outcome, err := gateway.LookUp(ctx, a.intent())
		if err != nil || outcome.Final() {
			return outcome, err
		}
		if outcome.Status != payments.OutcomeNeverSeen {
			return payments.Outcome{}, fmt.Errorf("%w: it is still at work", payments.ErrUnclear)
		}
	}
	return gateway.Charge(ctx, a.intent())
}

// record writes the outcome, the answer, the order and the event, if the lease is still the present one; else it answers with what the
// present holder has stored, or with that it is at work.
func (k *keys) record(ctx context.Context, db dbsqlc.DBTX, a *attempt, outcome payments.Outcome) (idempotency.Answer, error) {
	final := a.ended(outcome)
	answer := k.answers.PaymentFinal(final, a.requestID)
	expiresAt, err := k.queries.PaymentRecord(ctx, db, dbsqlc.PaymentRecordParams{
		MerchantID: a.lease.MerchantID, Key: string(a.lease.Key), LeaseID: a.lease.ID, State: string(idempotency.StateDone),
		AnswerStatus: int16(answer.Status), AnswerHeaders: mustJSON(answer.Headers), AnswerBody: answer.Body,
		Retention: k.settings.KeyRetention,
		ID:        final.ID, OrderID: final.OrderID, Status: final.Status,
		GatewayReference: final.GatewayReference, DeclineCode: final.DeclineCode, FailureCode: final.FailureCode,
		EventType: "payment." + final.Status, EventPayload: eventPayload(final),
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return k.present(ctx, db, a)
	}
	if err != nil {
		return idempotency.Answer{}, unfinished(a, err)
	}
	answer.ExpiresAt = expiresAt
	return answer, nil
}

// present answers for an attempt that finds its lease gone.
func (k *keys) present(ctx context.Context, db dbsqlc.DBTX, a *attempt) (idempotency.Answer, error) {
	record, err := idempotency.Get(ctx, db, a.lease.MerchantID, a.lease.Key)
	if err != nil {
		return idempotency.Answer{}, unfinished(a, err)
	}
	if record.Final() {
		return record.Answer(), nil
	}
	return idempotency.Answer{}, &idempotency.InFlightError{Record: record}
}

// release gives the key back without an answer, and returns cause as the reason.
func (k *keys) release(ctx context.Context, a *attempt, cause error) error {
	_, err := idempotency.Release(ctx, k.db, a.lease, a.resumed || !errors.Is(cause, payments.ErrNotSent))
	return unfinished(a, errors.Join(cause, err))
}

// unfinished says that an attempt has ended without an answer. The lease's end, or its release, lets a repeat go on with it.
func unfinished(a *attempt, cause error) error {
	return &payments.UnfinishedError{Subject: a.subject(), Cause: fmt.Errorf("%w: %w", payments.ErrOutcomeUnknown, cause)}
}

// storageError gives trouble with the database, or with Redis, the name that the service has for it, unless it is one of the answers that a
// claim ends with.
func storageError(err error) error {
	var inFlight *idempotency.InFlightError
	var expired *idempotency.ExpiredError
	switch {
	case err == nil, errors.As(err, &inFlight), errors.As(err, &expired),
		errors.Is(err, idempotency.ErrKeyReused), errors.Is(err, idempotency.ErrRecipeUnknown),
		errors.Is(err, payments.ErrOrderNotFound), errors.Is(err, payments.ErrOrderNotOpen), errors.Is(err, payments.ErrAmountMismatch),
		errors.Is(err, payments.ErrOrderPaymentInProgress), postgres.IsFault(err):
		return err
	}
	return fmt.Errorf("%w: %w", payments.ErrStorageUnavailable, err)
}

// eventPayload is what the audit trail keeps of a payment that has become final.
func eventPayload(final payments.Payment) []byte {
	return mustJSON(map[string]any{
		"order_id": final.OrderID, "amount": final.Amount, "currency": final.Currency,
		"gateway_reference": final.GatewayReference, "decline_code": final.DeclineCode, "failure_code": final.FailureCode,
	})
}
