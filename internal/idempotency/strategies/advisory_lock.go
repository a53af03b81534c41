package strategies

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

// advisoryLock lets one request at a time look, by a lock that has no row. The lock's name is a number, so the key is hashed, to all of the
// 64 bits that there are. Two keys with one number share a lock: one waits for the other's short transaction and then reads its own row, by
// its own name. So a collision costs a wait, and never an answer.
//
// The numbers are one space for all of a database's sessions, whatever they lock. The lock is the transaction's and ends with it; the
// session's kind would stay on a pooled connection when the process forgets it, and locks out nobody behind PgBouncer.
type advisoryLock struct {
	keys
	hash func(merchantID uuid.UUID, key idempotency.Key) int64 // hash64, but for the test of collisions
}

func newAdvisoryLock(parts Parts) (Strategy, error) {
	return &advisoryLock{newKeys(parts), hash64}, nil
}

func (s *advisoryLock) Pay(ctx context.Context, req payments.NewPayment) (idempotency.Answer, error) {
	ctx = context.WithoutCancel(ctx)
	c, err := s.claim(ctx, req)
	if err != nil || c.attempt == nil {
		return c.answer, storageError(err)
	}
	return s.finish(ctx, c.attempt)
}

// hash64 is the beginning of the SHA-256 of merchant and key. With four billion keys locked at once, two of them would share a number.
func hash64(merchantID uuid.UUID, key idempotency.Key) int64 {
	sum := sha256.Sum256([]byte(merchantID.String() + "\n" + string(key)))
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

// advisoryLockInsert is what unique_violation inserts too. Here the index has nothing to say, unless a program without the lock is about.
const advisoryLockInsert = uniqueViolationInsert

func (s *advisoryLock) claim(ctx context.Context, req payments.NewPayment) (c claimed, err error) {
	for range claimTries {
		err = s.db.BeginFunc(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
			c, err = s.claimLocked(ctx, tx, req)
			return err
		})
		switch {
		case postgres.IsUniqueViolation(err, keysPrimaryKey):
			continue // Somebody claims without the lock: an older build, another hash.
		case postgres.IsUniqueViolation(err, oneLivePayment), errors.Is(err, pgx.ErrNoRows):
			return s.refused(ctx, req, newAttempt(req))
		}
		break
	}
	return c, err
}

// claimLocked is the claim inside its transaction. Until that ends, every other request with the key stands in a queue.
func (s *advisoryLock) claimLocked(ctx context.Context, tx pgx.Tx, req payments.NewPayment) (claimed, error) {
	own := newAttempt(req)
	// A statement of its own: the look must have a snapshot that begins when the lock is ours.
	if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", s.hash(req.Claim.MerchantID, req.Claim.Key)); err != nil {
		return claimed{}, err
	}
	c, err := s.judge(ctx, tx, req, own)
	if !errors.Is(err, idempotency.ErrNoRecord) {
		return c, err
	}
	return claimed{attempt: own}, s.insert(ctx, tx, advisoryLockInsert, req, own)
}
