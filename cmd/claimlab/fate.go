package main

import (
	"context"
	"errors"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5/pgconn"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

// fate is how a request has ended.
type fate string

const (
	fatePaid         fate = "paid"          // it won: its own call of the gateway led to its answer
	fateReplayed     fate = "replayed"      // it got the stored answer
	fateInFlight     fate = "in flight"     // it was told that another request is at work
	fateRefused      fate = "refused"       // the order's rules, or another request under the key
	fateNoConnection fate = "no connection" // the pool had none within its limit
	fateTimedOut     fate = "timed out"     // it waited for a lock until its time was over
	fateDeadlock     fate = "deadlock"      // PostgreSQL ended it
	fateFailed       fate = "failed"        // anything else
)

// fates has all but the winner's, in the order in which they are shown.
var fates = []fate{fateReplayed, fateInFlight, fateRefused, fateNoConnection, fateTimedOut, fateDeadlock, fateFailed}

func fateOf(answer idempotency.Answer, err error) fate {
	pgErr, isPgErr := errors.AsType[*pgconn.PgError](err)
	_, inFlight := errors.AsType[*idempotency.InFlightError](err)
	switch {
	case err == nil && !answer.Replayed:
		return fatePaid
	case err == nil:
		return fateReplayed
	case inFlight:
		return fateInFlight
	case errors.Is(err, postgres.ErrNoConnection):
		return fateNoConnection
	case postgres.IsDeadlock(err):
		return fateDeadlock
	case errors.Is(err, context.DeadlineExceeded),
		isPgErr && (pgErr.Code == pgerrcode.LockNotAvailable || pgErr.Code == pgerrcode.QueryCanceled || pgErr.Code == pgerrcode.IdleInTransactionSessionTimeout):
		return fateTimedOut
	case errors.Is(err, idempotency.ErrKeyReused), errors.Is(err, payments.ErrOrderNotOpen), errors.Is(err, payments.ErrOrderPaymentInProgress),
		errors.Is(err, payments.ErrAmountMismatch), errors.Is(err, payments.ErrOrderNotFound):
		return fateRefused
	}
	return fateFailed
}
