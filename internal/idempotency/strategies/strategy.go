package strategies

import (
	"context"
	"fmt"
	"log/slog"

	"github.com/redis/go-redis/v9"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

// Strategy is one way to take a payment once. It owns its transactions and decides what is open while the gateway is called, because a claim
// in Redis cannot join a transaction of ours, and because just that is what the strategies differ in.
type Strategy interface {
	// Pay gives the request the one answer of its key. Whoever wins the key calls the gateway; the others get
	//   - the stored answer, with Replayed set;
	//   - [*idempotency.InFlightError], [idempotency.ErrKeyReused];
	//   - a refusal by the order's rules, which leaves the key free;
	//   - [payments.ErrStorageUnavailable] when nothing was begun, and a [*payments.UnfinishedError] when an attempt ended without an answer.
	Pay(ctx context.Context, req payments.NewPayment) (idempotency.Answer, error)
	// Run renews the leases of the payments that are being worked on, until ctx ends. A strategy without leases to renew waits for that.
	Run(ctx context.Context) error
}

// Parts are what a strategy is built of.
type Parts struct {
	DB       *postgres.Pool
	Renewals *postgres.Pool // of one connection, for the leases alone
	Redis    *redis.Client  // nil where Kind.Redis is false
	Gateway  payments.Gateway
	Settings payments.Settings
	Log      *slog.Logger
}

// Kind is a strategy that can be built.
type Kind struct {
	Name    string
	Summary string // one line
	// Prepare is what its database needs or must not have, beyond the service's schema.
	Prepare string
	Redis   bool // it needs one
	// MeasuredOnly marks what nobody should use: its promises are not in the suite.
	MeasuredOnly bool
	// Broken are the suite's promises that this kind cannot keep, and why.
	Broken map[string]string
	New    func(Parts) (Strategy, error)
}

// The names, as they are in reports.
const (
	NameOnConflict       = "on_conflict"
	NameUniqueViolation  = "unique_violation"
	NameRowLock          = "row_lock"
	NameAdvisoryLock     = "advisory_lock"
	NameRedisSetNX       = "redis_set_nx"
	NameCheckThenAct     = "check_then_act"
	NameRowLockHeld      = "row_lock_held"
	NameAdvisoryLockHeld = "advisory_lock_held"
)

// The promises that not every strategy keeps. They are names of sub-tests.
const (
	PromiseTogether = "ACrashBeforeTheWriteLeavesTheKeyFree"
	PromiseOneWrite = "NobodyElseHoldsTheKeyWhileTheWriteIsUnderWay"
	PromiseDurable  = "TheAnswerOutlivesARestartOfItsStore"
	PromiseSpent    = "AKeyPastItsRetentionIsSpentForEver"
	PromiseNamed    = "ATwinIsToldWhichPaymentIsInFlight"
)

// Kinds has every strategy, the default first, in the order of the package's comment.
func Kinds() []Kind {
	return []Kind{
		{
			Name: NameOnConflict, New: newOnConflict,
			Summary: "one statement: INSERT … ON CONFLICT DO NOTHING writes key and payment, or nothing (the service itself)",
		},
		{
			Name: NameUniqueViolation, New: newUniqueViolation,
			Summary: "one statement: INSERT writes key and payment, or fails with 23505; the loser reads in a second transaction",
		},
		{
			Name: NameRowLock, New: newRowLock,
			Summary: "a short transaction: SELECT … FOR UPDATE on the order, look, INSERT, COMMIT",
		},
		{
			Name: NameAdvisoryLock, New: newAdvisoryLock,
			Summary: "a short transaction: pg_advisory_xact_lock on a 64-bit hash of the key, look, INSERT, COMMIT",
		},
		{
			Name: NameRedisSetNX, New: newRedisSetNX, Redis: true,
			Summary: "SET NX PX in Redis, then the payment in PostgreSQL behind a unique index, then the answer in Redis",
			Prepare: "CREATE UNIQUE INDEX " + onePaymentPerKey + " ON payments (merchant_id, gateway_key)",
			Broken: map[string]string{
				PromiseTogether: "the claim is in Redis and the payment is not in PostgreSQL yet: until the TTL ends every repeat is told that it is in progress, and nobody is at work",
				PromiseOneWrite: "the check of the token is in Redis and the write in PostgreSQL: between the two the TTL can end and the key change hands",
				PromiseDurable:  "Redis comes back empty: the answer is made again from the payment's row, which does not know for whom it was made first, nor the fingerprint",
				PromiseSpent:    "the entry is gone when its retention ends, and nothing in PostgreSQL knows of that end: a repeat gets 201, made again from the payment's row, where it should get 410",
				PromiseNamed:    "the claim is made before there is a payment: an id that is put there with it may be of a payment that never comes to be, and one that is put there afterwards costs every payment one more round trip",
			},
		},
		{
			Name: NameCheckThenAct, New: newCheckThenAct, MeasuredOnly: true,
			Summary: "SELECT, and if there is nothing INSERT: no unique index, no lock",
			// Without these two the form would not be what it is: any unique index on its way would stop the twin.
			Prepare: "DROP INDEX one_live_payment_per_order; CREATE INDEX payments_by_gateway_key ON payments (merchant_id, gateway_key)",
		},
		{
			Name: NameRowLockHeld, New: newRowLockHeld, MeasuredOnly: true,
			Summary: "row_lock, with the transaction open until the gateway has answered",
		},
		{
			Name: NameAdvisoryLockHeld, New: newAdvisoryLockHeld, MeasuredOnly: true,
			Summary: "advisory_lock, with the transaction open until the gateway has answered",
		},
	}
}

// KindOf finds a kind by its name.
func KindOf(name string) (Kind, error) {
	for _, kind := range Kinds() {
		if kind.Name == name {
			return kind, nil
		}
	}
	return Kind{}, fmt.Errorf("there is no strategy %q", name)
}
