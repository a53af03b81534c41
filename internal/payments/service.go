package payments

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"example.com/payments/internal/dbsqlc"
	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/postgres"
)

// Settings are the times the story runs by; see the settings table of the README for what each means and how they relate.
type Settings struct {
	Holder         string                // names this process in the keys it holds
	Metrics        prometheus.Registerer // where to count; nil: nowhere
	LeaseTTL       time.Duration
	GatewayTimeout time.Duration
	KeyRetention   time.Duration
	ReapInterval   time.Duration
	ReapAfter      time.Duration
}

// Answers puts into the client's words what has become of its request. What it returns is stored and sent, byte for byte, so it must
// depend on its arguments alone.
type Answers interface {
	// Path is where the resource is to be found.
	Path(kind Kind, id uuid.UUID) string
	OrderCreated(Order) idempotency.Answer
	OrderCanceled(Order) idempotency.Answer
	// PaymentFinal answers a payment whose status is final, and PaymentAccepted one that goes on in the background.
	PaymentFinal(payment Payment, requestID string) idempotency.Answer
	PaymentAccepted(Payment) idempotency.Answer
	RefundFinal(refund Refund, requestID string) idempotency.Answer
	RefundAccepted(Refund) idempotency.Answer
}

// Service takes payments. Its methods are safe for concurrent use, by any number of processes on one database.
type Service struct {
	db       *postgres.Pool
	gateway  Gateway
	answers  Answers
	settings Settings
	log      *slog.Logger
	queries  *dbsqlc.Queries
	leases   *idempotency.Leases
	waiters  *idempotency.Waiters
	purger   *idempotency.Purger
	metrics  *metrics
	turns    chan struct{}  // has room for as many attempts as may write their end at once
	attempts sync.WaitGroup // those running now, background ones included
}

// New builds a service. renewals is a pool of one connection beside db, for the leases alone.
func New(db, renewals *postgres.Pool, gateway Gateway, answers Answers, settings Settings, log *slog.Logger) *Service {
	s := &Service{
		db:       db,
		answers:  answers,
		settings: settings,
		log:      log,
		queries:  dbsqlc.New(),
		leases:   idempotency.NewLeases(renewals, settings.LeaseTTL, log),
		waiters:  idempotency.NewWaiters(db, log),
		purger:   idempotency.NewPurger(db, log),
	}
	conns := db.Stat().MaxConns()
	s.turns = make(chan struct{}, max(1, conns-max(1, conns/4)))
	s.metrics = newMetrics(s, settings.Metrics)
	s.gateway = countedGateway{gateway, s.metrics.gatewayCalls}
	return s
}

// Run does the work behind the requests until ctx ends: leases are renewed, waiting requests woken, stale payments ended. It must
// go on while requests are being drained, or they lose their leases.
func (s *Service) Run(ctx context.Context) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.leases.Run(ctx) })
	group.Go(func() error { return s.waiters.Run(ctx) })
	group.Go(func() error { return NewReaper(s).Run(ctx) })
	group.Go(func() error { return s.purger.Run(ctx) })
	return group.Wait()
}

// StopWaiting answers all requests that wait for another's answer, at once and from now on.
func (s *Service) StopWaiting() { s.waiters.Close() }

// Drain returns when the last attempt has ended, those of clients that hung up and those in the background included, or with ctx's
// error. New attempts must not begin any more.
func (s *Service) Drain(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		defer close(done)
		s.attempts.Wait()
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// newID returns the id of a new resource and the time it is created at, to the microsecond that PostgreSQL keeps.
func newID() (uuid.UUID, time.Time) {
	return newUUID(), now().UTC().Truncate(time.Microsecond)
}

// storageError says that the database did not do what it was asked to; err is its word, never nil. A broken constraint and a statement that it does not
// understand stay what they are, faults of ours, unless the schema is merely not migrated yet.
func storageError(err error) error {
	if postgres.IsFault(err) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrStorageUnavailable, err)
}

// notFound gives pgx's missing row the story's name.
func notFound(err error) error {
	if errors.Is(err, pgx.ErrNoRows) {
		return ErrNotFound
	}
	return storageError(err)
}

// mustJSON encodes what always can be encoded: maps and structs of strings and numbers.
func mustJSON(v any) []byte {
	encoded, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return encoded
}
