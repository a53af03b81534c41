package idempotency

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/dbsqlc"
)

// State is where a key stands.
type State string

const (
	StateInProgress State = "in_progress"
	StateDone       State = "done"   // the answer is the gateway's last word
	StateFailed     State = "failed" // closed after the gateway's cancel; nothing was done
)

// Mode says what the first request asked for: to be answered when the work is done, or at once. It is the key's for ever, whatever
// later repeats ask for.
type Mode string

const (
	ModeSync  Mode = "sync"
	ModeAsync Mode = "async"
)

// Claim is what a request wants a key for.
type Claim struct {
	MerchantID  uuid.UUID
	Key         Key
	Request     Request
	RequestID   string
	TraceParent *string // the request's W3C trace context; nil when it is not traced
	Mode        Mode
	Report      *Report // is told what became of the claim; may be nil
}

// ClaimResult is what became of a request's claim.
type ClaimResult string

const (
	ClaimWon       ClaimResult = "won"
	ClaimReplayed  ClaimResult = "replayed"
	ClaimInFlight  ClaimResult = "in_flight"
	ClaimMismatch  ClaimResult = "mismatch"
	ClaimExpired   ClaimResult = "expired"
	ClaimTakenOver ClaimResult = "taken_over" // the key was stale, and this request is its next attempt
)

// ClaimResults are all of them.
var ClaimResults = []ClaimResult{ClaimWon, ClaimReplayed, ClaimInFlight, ClaimMismatch, ClaimExpired, ClaimTakenOver}

// Report tells a request what became of its claim, for its line of log and its trace. It is empty when the request was refused.
type Report struct {
	Result       ClaimResult
	ResourcePath string
}

// Answer is what a client is told under a key. The first request and every repeat send the same Body, and they send it from here.
type Answer struct {
	Status      int
	Headers     map[string]string // those that belong to the answer, such as Location; not those of its delivery
	Body        []byte
	RequestID   string    // the request that the answer was made for
	TraceParent string    // that request's W3C trace context; empty when it was not traced
	ExpiresAt   time.Time // end of retention by the database's clock; zero while the key is in progress
	Replayed    bool      // it was made for another request than the one that gets it now
	Waited      bool      // the request waited for it, as it had asked to
}

// Record is the row of a key as one statement found it.
type Record struct {
	Route            string
	ResourceID       uuid.UUID
	ResourcePath     string
	Mode             Mode
	State            State
	Attempt          int32
	RequestID        string        // the request that the answer will be, or was, made for
	Holder           string        // who has, or had, the lease
	LeaseID          uuid.UUID     // zero when the lease was released
	LeaseLeft        time.Duration // by the database's clock; not positive when stale
	OutcomeUncertain bool
	TraceParent      *string   // of the request that RequestID names
	StartedAt        time.Time // of the claim
	Expired          bool

	recipe      int16
	fingerprint []byte
	answer      Answer
}

// Get reads a key's row. It returns ErrNoRecord when there is none.
func Get(ctx context.Context, db dbsqlc.DBTX, merchantID uuid.UUID, key Key) (Record, error) {
	row, err := dbsqlc.New().IdempotencyKeyGet(ctx, db, dbsqlc.IdempotencyKeyGetParams{MerchantID: merchantID, Key: string(key)})
	if errors.Is(err, pgx.ErrNoRows) {
		return Record{}, ErrNoRecord
	}
	if err != nil {
		return Record{}, fmt.Errorf("read idempotency key: %w", err)
	}
	record := Record{
		Route:            row.Route,
		ResourceID:       row.ResourceID,
		ResourcePath:     row.ResourcePath,
		Mode:             Mode(row.Mode),
		State:            State(row.State),
		Attempt:          row.Attempt,
		RequestID:        row.RequestID,
		Holder:           row.Holder,
		LeaseLeft:        row.LeaseLeft,
		OutcomeUncertain: row.OutcomeUncertain,
		TraceParent:      row.Traceparent,
		StartedAt:        row.CreatedAt,
		Expired:          row.Expired,
		recipe:           row.Recipe,
		fingerprint:      row.Fingerprint,
	}
	if row.LeaseID != nil {
		record.LeaseID = *row.LeaseID
	}
	if row.ExpiresAt != nil {
		record.answer.ExpiresAt = *row.ExpiresAt
	}
	if row.AnswerStatus != nil {
		record.answer.Status = int(*row.AnswerStatus)
		record.answer.Body = row.AnswerBody
		record.answer.RequestID = row.RequestID
		if row.Traceparent != nil {
			record.answer.TraceParent = *row.Traceparent
		}
		if err := json.Unmarshal(row.AnswerHeaders, &record.answer.Headers); err != nil {
			return Record{}, fmt.Errorf("read idempotency key: stored headers: %w", err)
		}
	}
	return record, nil
}

// Judge says whether a request may have what the record stands for. It returns nil when it may, an [*ExpiredError], [ErrKeyReused],
// or [ErrRecipeUnknown], in this order of precedence: a key that is spent is spent for every request.
func (r Record) Judge(request Request) error {
	if r.Expired {
		return &ExpiredError{ResourcePath: r.ResourcePath}
	}
	fingerprint, err := Fingerprint(r.recipe, request)
	if err != nil {
		return err
	}
	if !bytes.Equal(fingerprint, r.fingerprint) {
		return ErrKeyReused
	}
	return nil
}

// Final reports whether the answer is stored.
func (r Record) Final() bool { return r.State != StateInProgress }

// Stale reports whether nobody can be trusted to be working on the key any more.
func (r Record) Stale() bool {
	return r.State == StateInProgress && (r.LeaseID == uuid.Nil || r.LeaseLeft <= 0)
}

// Answer is the stored answer of a final record, as a replay.
func (r Record) Answer() Answer {
	answer := r.answer
	answer.Replayed = true
	return answer
}

// Lease is one attempt's right to answer a key. Whoever holds an older one changes nothing.
type Lease struct {
	MerchantID uuid.UUID
	Key        Key
	ID         uuid.UUID
	Attempt    int32
}

// TakeOver makes the caller the next attempt at a key that its record showed to be stale. The claim is that of a client's own repeat, and
// nil for the reaper, whose visit does not count as the client's return. ok is false when somebody else was quicker; then read again.
func TakeOver(ctx context.Context, db dbsqlc.DBTX, lease Lease, holder string, claim *Claim, ttl time.Duration) (next Lease, ok bool, err error) {
	params := dbsqlc.IdempotencyKeyTakeOverParams{
		MerchantID: lease.MerchantID, Key: string(lease.Key), Attempt: lease.Attempt, LeaseID: lease.ID, LeaseTTL: ttl, Holder: holder,
	}
	if claim != nil {
		params.RequestID, params.Traceparent = &claim.RequestID, claim.TraceParent
	}
	attempt, err := dbsqlc.New().IdempotencyKeyTakeOver(ctx, db, params)
	if errors.Is(err, pgx.ErrNoRows) {
		return Lease{}, false, nil
	}
	if err != nil {
		return Lease{}, false, fmt.Errorf("take over idempotency key: %w", err)
	}
	lease.Attempt = attempt
	return lease, true, nil
}

// Release lets go of a key without an answer. uncertain is remembered: once money may have moved without our knowing, no later attempt
// may say that nothing was charged. ok is false when the lease was no longer ours.
func Release(ctx context.Context, db dbsqlc.DBTX, lease Lease, uncertain bool) (ok bool, err error) {
	rows, err := dbsqlc.New().IdempotencyKeyRelease(ctx, db, dbsqlc.IdempotencyKeyReleaseParams{
		MerchantID: lease.MerchantID, Key: string(lease.Key), LeaseID: lease.ID, OutcomeUncertain: uncertain,
	})
	if err != nil {
		return false, fmt.Errorf("release idempotency key: %w", err)
	}
	return rows == 1, nil
}
