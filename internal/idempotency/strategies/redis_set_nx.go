package strategies

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

// onePaymentPerKey is the last line of defence: whatever Redis forgets, and however late a holder is, a key has one payment.
const onePaymentPerKey = "one_payment_per_gateway_key"

// redisSetNX claims in Redis and pays in PostgreSQL. Neither can roll the other back, so there are moments between the two, and each has to
// be answered for:
//
//	SET NX ──▶ INSERT payment ──▶ gateway ──▶ token? ──▶ UPDATE payment ──▶ SET answer
//	       (1)                (2)         (3)        (4)                (5)
//
//	killed at 1   a claim without a payment: repeats are told "in progress" until the TTL ends
//	killed at 2, 3 the TTL ends; the next claim meets the unique index, finds the payment, and asks the gateway
//	paused at 4   the TTL ends and somebody else claims: two holders, of whom the first to write wins
//	killed at 5   the next claim meets the unique index and makes the answer again from the payment
//	Redis emptied at any of them: as if the TTL had ended, with the holder alive
//
// Later, when the retention of the answer has ended, Redis has no entry again, and it is as if it had been killed at 5: a spent key and a
// lost answer are one and the same here.
//
// The TTL is a promise that nothing takes longer. It is checked against what may take long, when the strategy is built; a pause of the
// process is not on that list and cannot be.
type redisSetNX struct {
	rows
	redis *redis.Client
}

// newRedisSetNX refuses a TTL that the work could outlast.
func newRedisSetNX(parts Parts) (Strategy, error) {
	// The gateway's whole budget, the two writes, and the waits for their connections.
	if longest := parts.Settings.GatewayTimeout + 2*postgres.StatementTimeout; parts.Settings.LeaseTTL <= longest {
		return nil, fmt.Errorf("LEASE_TTL (%s) must exceed GATEWAY_TIMEOUT (%s) and two statements of %s: a claim in Redis that ends before its work lets a second request charge",
			parts.Settings.LeaseTTL, parts.Settings.GatewayTimeout, postgres.StatementTimeout)
	}
	return &redisSetNX{rows{parts.DB, parts.Gateway, parts.Settings, answers{}}, parts.Redis}, nil
}

func (s *redisSetNX) Pay(ctx context.Context, req payments.NewPayment) (idempotency.Answer, error) {
	ctx = context.WithoutCancel(ctx)
	c, held, err := s.claim(ctx, req)
	if err != nil || c.attempt == nil {
		return c.answer, storageError(err)
	}
	c, err = s.write(ctx, req, c.attempt, held)
	if err != nil || c.attempt == nil {
		return c.answer, storageError(err)
	}
	outcome, err := charge(ctx, s.gateway, c.attempt, s.settings.GatewayTimeout)
	if err != nil {
		return idempotency.Answer{}, unfinished(c.attempt, errors.Join(err, s.release(ctx, held)))
	}
	return s.record(ctx, c.attempt, held, outcome)
}

// Run renews nothing: the TTL was chosen so that nothing has to be renewed.
func (s *redisSetNX) Run(ctx context.Context) error { return untilDone(ctx) }

// entry is what Redis keeps under a key. The token makes each claim's bytes different from every other's.
type entry struct {
	Token       uuid.UUID           `json:"token"`
	Recipe      int16               `json:"recipe"`
	Fingerprint []byte              `json:"fingerprint"`
	StartedAt   time.Time           `json:"started_at"`
	Answer      *idempotency.Answer `json:"answer,omitempty"`
}

// held is a claim in Redis: where it is and what it says. Whoever finds something else there has lost it.
type held struct {
	name  string
	entry entry
	value []byte
}

// claim sets the key if it is not set, and reads it if it is: two commands, so the reader may find that it has just expired.
func (s *redisSetNX) claim(ctx context.Context, req payments.NewPayment) (claimed, held, error) {
	own := newAttempt(req)
	fingerprint, err := idempotency.Fingerprint(idempotency.CurrentRecipe, req.Claim.Request)
	if err != nil {
		return claimed{}, held{}, err
	}
	mine := held{
		name:  redisName(req.Claim.MerchantID, req.Claim.Key),
		entry: entry{Token: own.lease.ID, Recipe: idempotency.CurrentRecipe, Fingerprint: fingerprint, StartedAt: own.payment.CreatedAt},
	}
	mine.value = mustJSON(mine.entry)
	for range claimTries {
		err := s.redis.SetArgs(ctx, mine.name, mine.value, redis.SetArgs{Mode: "NX", TTL: s.settings.LeaseTTL}).Err()
		if err == nil {
			return claimed{attempt: own}, mine, nil
		}
		if !errors.Is(err, redis.Nil) {
			return claimed{}, held{}, fmt.Errorf("claim in Redis: %w", err)
		}
		c, err := s.judge(ctx, req, mine)
		if !errors.Is(err, idempotency.ErrNoRecord) {
			return c, held{}, err
		}
	}
	return claimed{}, held{}, errors.New("claim in Redis: the key keeps expiring")
}

func redisName(merchantID uuid.UUID, key idempotency.Key) string {
	return "idempotency:" + merchantID.String() + ":" + string(key)
}

// judge says what a request gets whose key is set. It returns [idempotency.ErrNoRecord] when it is not.
func (s *redisSetNX) judge(ctx context.Context, req payments.NewPayment, mine held) (claimed, error) {
	pipe := s.redis.Pipeline() // One round trip for the two.
	get, left := pipe.Get(ctx, mine.name), pipe.PTTL(ctx, mine.name)
	if _, err := pipe.Exec(ctx); errors.Is(err, redis.Nil) {
		return claimed{}, idempotency.ErrNoRecord
	} else if err != nil {
		return claimed{}, fmt.Errorf("read the claim in Redis: %w", err)
	}
	var found entry
	if err := json.Unmarshal([]byte(get.Val()), &found); err != nil {
		return claimed{}, fmt.Errorf("read the claim in Redis: %w", err)
	}
	fingerprint, err := idempotency.Fingerprint(found.Recipe, req.Claim.Request)
	if err != nil {
		return claimed{}, err
	}
	if !bytes.Equal(fingerprint, found.Fingerprint) {
		return claimed{}, idempotency.ErrKeyReused
	}
	if found.Answer != nil {
		answer := *found.Answer
		answer.Replayed = true
		return claimed{answer: answer}, nil
	}
	return claimed{}, &idempotency.InFlightError{Record: idempotency.Record{
		State: idempotency.StateInProgress, Attempt: 1, StartedAt: found.StartedAt, LeaseLeft: left.Val(),
	}}
}

// write puts the pending payment into PostgreSQL. The key's payment may be there already: the TTL of whoever wrote it has ended, or Redis
// has forgotten it. Then this attempt goes on with it.
func (s *redisSetNX) write(ctx context.Context, req payments.NewPayment, a *attempt, mine held) (claimed, error) {
	err := s.insert(ctx, req, a)
	switch {
	case err == nil:
		return claimed{attempt: a}, nil
	case postgres.IsUniqueViolation(err, onePaymentPerKey), postgres.IsUniqueViolation(err, oneLivePayment), errors.Is(err, pgx.ErrNoRows):
	case postgres.IsAmbiguous(err):
		return claimed{}, err // It may have been written. The claim stays, and the TTL ends it.
	default:
		return claimed{}, errors.Join(err, s.release(ctx, mine))
	}

	// The key's own payment comes first: the order may refuse because of it.
	payment, findErr := s.find(ctx, req.Claim.MerchantID, a.gatewayKey)
	switch {
	case findErr == nil && !sameRequest(payment, req):
		return claimed{}, errors.Join(idempotency.ErrKeyReused, s.release(ctx, mine))
	case findErr == nil && payment.Status != payments.StatusProcessing:
		answer := s.rebuilt(payment, a.requestID)
		return claimed{answer: answer}, s.store(ctx, mine, answer)
	case findErr == nil:
		a.payment, a.resumed = payment, true
		return claimed{attempt: a}, nil
	case !errors.Is(findErr, pgx.ErrNoRows):
		return claimed{}, errors.Join(findErr, s.release(ctx, mine))
	}
	keys := keys{db: s.db}
	return claimed{}, errors.Join(keys.refusal(ctx, s.db, req), s.release(ctx, mine))
}

// sameRequest compares what the payment's row still knows of the first request. The fingerprint was in Redis.
func sameRequest(payment payments.Payment, req payments.NewPayment) bool {
	return payment.OrderID == req.OrderID && payment.Amount == req.Amount && payment.Currency == req.Currency &&
		payment.PaymentMethod == req.PaymentMethod && maps.Equal(payment.Metadata, req.Metadata)
}

// extendIfMine renews a claim that still says what its holder wrote. GET and then PEXPIRE from here would renew somebody else's.
var extendIfMine = redis.NewScript(`
if redis.call('GET', KEYS[1]) == ARGV[1] then
	return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0`)

// record writes the outcome if the claim is still this holder's, and then the answer. The TTL starts anew in between, which makes moment 4
// short and does not end it.
func (s *redisSetNX) record(ctx context.Context, a *attempt, mine held, outcome payments.Outcome) (idempotency.Answer, error) {
	still, err := extendIfMine.Run(ctx, s.redis, []string{mine.name}, mine.value, s.settings.LeaseTTL.Milliseconds()).Int()
	if err != nil {
		return idempotency.Answer{}, unfinished(a, fmt.Errorf("renew the claim in Redis: %w", err))
	}
	if still == 0 {
		return s.present(ctx, a)
	}
	final := a.ended(outcome)
	answer := s.answers.PaymentFinal(final, a.requestID)
	err = s.rows.record(ctx, a.lease.MerchantID, final)
	if errors.Is(err, pgx.ErrNoRows) { // An earlier holder was late and quicker.
		return s.present(ctx, a)
	}
	if err != nil {
		return idempotency.Answer{}, unfinished(a, err)
	}
	answer.ExpiresAt = time.Now().Add(s.settings.KeyRetention).UTC()
	// What was recorded is so, whether or not Redis hears of it: the next claim would find it.
	_ = s.store(ctx, mine, answer)
	return answer, nil
}

// present answers for an attempt that finds its claim gone, or its payment final.
func (s *redisSetNX) present(ctx context.Context, a *attempt) (idempotency.Answer, error) {
	payment, err := s.find(ctx, a.lease.MerchantID, a.gatewayKey)
	if err != nil {
		return idempotency.Answer{}, unfinished(a, err)
	}
	if payment.Status != payments.StatusProcessing {
		return s.rebuilt(payment, a.requestID), nil
	}
	return idempotency.Answer{}, &idempotency.InFlightError{Record: idempotency.Record{ResourceID: payment.ID, StartedAt: payment.CreatedAt}}
}

// storeIfMine keeps the answer where the claim was, unless somebody else has claimed meanwhile. That the claim has expired is no reason not
// to: what is stored is in PostgreSQL and final.
var storeIfMine = redis.NewScript(`
local now = redis.call('GET', KEYS[1])
if not now or now == ARGV[1] then
	redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
	return 1
end
return 0`)

// store puts the answer of a final payment in the claim's place.
func (s *redisSetNX) store(ctx context.Context, mine held, answer idempotency.Answer) error {
	done := mine.entry
	done.Answer = &answer
	err := storeIfMine.Run(ctx, s.redis, []string{mine.name}, mine.value, mustJSON(done), s.settings.KeyRetention.Milliseconds()).Err()
	if err != nil {
		return fmt.Errorf("store the answer in Redis: %w", err)
	}
	return nil
}

// releaseIfMine deletes a claim that still says what its holder wrote. A plain DEL would delete the claim of whoever came after.
var releaseIfMine = redis.NewScript(`
if redis.call('GET', KEYS[1]) == ARGV[1] then
	return redis.call('DEL', KEYS[1])
end
return 0`)

// release gives the key back without an answer.
func (s *redisSetNX) release(ctx context.Context, mine held) error {
	if err := releaseIfMine.Run(ctx, s.redis, []string{mine.name}, mine.value).Err(); err != nil {
		return fmt.Errorf("release the claim in Redis: %w", err)
	}
	return nil
}
