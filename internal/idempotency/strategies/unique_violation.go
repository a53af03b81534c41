package strategies

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

// uniqueViolation lets the unique index say no, and reads the key's row once it has. The no ends its transaction: whatever else is sent in
// it fails with 25P02, so the loser reads in a second one. A loser that meets its winner's uncommitted row waits for it inside the INSERT.
//
// Each no costs what a yes costs until then: a row that is written and never seen, which vacuum collects, and a line in the server's log.
// And it costs pgx the statement, which it takes out of its cache after any error: two more round trips, one to close it and one to prepare it
// again, for whoever has the connection next. A statement prepared by name on each connection would survive its errors; this is left as one
// gets it, with an ORM or without, because that is what is to be measured.
type uniqueViolation struct {
	keys
}

func newUniqueViolation(parts Parts) (Strategy, error) {
	return &uniqueViolation{newKeys(parts)}, nil
}

func (s *uniqueViolation) Pay(ctx context.Context, req payments.NewPayment) (idempotency.Answer, error) {
	ctx = context.WithoutCancel(ctx) // The client's going away changes nothing from here on.
	c, err := s.claim(ctx, req)
	if err != nil || c.attempt == nil {
		return c.answer, storageError(err)
	}
	return s.finish(ctx, c.attempt)
}

const uniqueViolationInsert = `WITH o AS (
    ` + orderThatMayBePaid + `
), k AS (
    ` + insertKey + `
    FROM o
    RETURNING key
)
` + insertPayment + `
    FROM k
    RETURNING id`

func (s *uniqueViolation) claim(ctx context.Context, req payments.NewPayment) (claimed, error) {
	own := newAttempt(req)
	var err error
	for range claimTries {
		err = s.insert(ctx, s.db, uniqueViolationInsert, req, own)
		switch {
		case err == nil:
			return claimed{attempt: own}, nil
		case postgres.IsUniqueViolation(err, keysPrimaryKey), // by name: another index has another meaning
			postgres.IsUniqueViolation(err, oneLivePayment),
			errors.Is(err, pgx.ErrNoRows):
		default:
			return claimed{}, err
		}
		// The second transaction, with a snapshot that begins after the claim has lost.
		c, judged := s.judge(ctx, s.db, req, own)
		if !errors.Is(judged, idempotency.ErrNoRecord) {
			return c, judged
		}
		if !postgres.IsUniqueViolation(err, keysPrimaryKey) {
			return s.refused(ctx, req, own)
		}
		// The winner has rolled back after all, and the key is free again.
	}
	return claimed{}, err
}
