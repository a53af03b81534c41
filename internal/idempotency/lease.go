package idempotency

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"example.com/payments/internal/dbsqlc"
)

// A thousand leases are renewed in some tens of milliseconds. In one statement with all of them, a slow moment would cost them all.
const renewBatch = 1000

// Leases renews the leases of what this process is working on now: those between Hold and the function it returns. Not "all rows
// that bear our name": that would keep alive what a panicked request has left behind.
//
// A lease is renewed when a third of its time has gone, so a fast payment renews nothing, and there is time for two more tries before
// it expires. All that are due go in one statement, or a few when thousands are, on a connection kept for it: a full pool must not cost
// anybody a lease.
type Leases struct {
	db   dbsqlc.DBTX
	ttl  time.Duration
	log  *slog.Logger
	mu   sync.Mutex
	held map[uuid.UUID]time.Time // when each was claimed or last renewed, by this process's clock

	renewed atomic.Int64
	failed  atomic.Int64
}

// NewLeases returns a registry that renews through db, which should be a pool of one connection that nobody else uses.
func NewLeases(db dbsqlc.DBTX, ttl time.Duration, log *slog.Logger) *Leases {
	return &Leases{db: db, ttl: ttl, log: log, held: make(map[uuid.UUID]time.Time)}
}

// Hold keeps the lease renewed until drop is called. drop may be called more than once.
func (l *Leases) Hold(id uuid.UUID) (drop func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held[id] = time.Now()
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.held, id)
	}
}

// Renewed is how many renewals there have been.
func (l *Leases) Renewed() int64 { return l.renewed.Load() }

// Failed is how many renewals, of one lease or of many, the database has not carried out.
func (l *Leases) Failed() int64 { return l.failed.Load() }

// Run renews until ctx ends. An error is logged and tried again at the next tick: there is nothing better to do, and the lease id
// protects what matters.
func (l *Leases) Run(ctx context.Context) error {
	ticker := time.NewTicker(l.ttl / 12)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C:
			if _, err := l.RunOnce(ctx); err != nil && ctx.Err() == nil {
				l.log.WarnContext(ctx, "leases were not renewed", "error", err)
			}
		}
	}
}

// RunOnce renews what is due and returns how many leases it renewed. A lease that is due and not renewed was lost, or is being
// recorded at this moment; either way its attempt will find out when it records.
func (l *Leases) RunOnce(ctx context.Context) (renewed int, err error) {
	due := l.due(time.Now())
	if len(due) == 0 {
		return 0, nil
	}
	for chunk := range slices.Chunk(due, renewBatch) {
		n, chunkErr := l.renew(ctx, chunk)
		renewed += n
		err = errors.Join(err, chunkErr)
	}
	return renewed, err
}

func (l *Leases) renew(ctx context.Context, due []uuid.UUID) (int, error) {
	// A statement that takes longer than this would be in the way of the next try.
	ctx, cancel := context.WithTimeout(ctx, l.ttl/4)
	defer cancel()
	started := time.Now()
	ids, err := dbsqlc.New().IdempotencyKeyRenew(ctx, l.db, dbsqlc.IdempotencyKeyRenewParams{
		LeaseIds: due, LeaseTTL: l.ttl, TwoThirds: l.ttl * 2 / 3,
	})
	if err != nil {
		l.failed.Add(1)
		return 0, err
	}
	l.renewed.Add(int64(len(ids)))
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, id := range ids {
		if _, still := l.held[id]; still {
			l.held[id] = started
		}
	}
	return len(ids), nil
}

func (l *Leases) due(now time.Time) []uuid.UUID {
	l.mu.Lock()
	defer l.mu.Unlock()
	var due []uuid.UUID
	for id, since := range l.held {
		if now.Sub(since) >= l.ttl/3 {
			due = append(due, id)
		}
	}
	return due
}
