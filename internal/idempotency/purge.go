package idempotency

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"example.com/payments/internal/dbsqlc"
)

const (
	// A batch of 500 holds its rows for some milliseconds, and a request that meets one of them does not notice.
	purgeBatch = 500
	// Between two batches the database has the time to itself, so that catching up with a million keys slows nobody down.
	purgePause = 50 * time.Millisecond
	// How long the purge rests when nothing is due. It frees space and nothing else: an answer past its retention is not shown any more,
	// purged or not.
	purgeInterval = 10 * time.Second
)

// Purger strips the answers whose retention has passed. The keys stay, and stay spent.
type Purger struct {
	db        dbsqlc.DBTX
	log       *slog.Logger
	purged    atomic.Int64
	failed    atomic.Int64
	lastRound atomic.Pointer[time.Time]
}

// NewPurger returns a purger of the keys in db. Any number of replicas may run one.
func NewPurger(db dbsqlc.DBTX, log *slog.Logger) *Purger { return &Purger{db: db, log: log} }

// Purged is how many answers were stripped.
func (p *Purger) Purged() int64 { return p.purged.Load() }

// Failed is how many batches the database has refused.
func (p *Purger) Failed() int64 { return p.failed.Load() }

// LastRound is when a batch was last finished, however small; zero if never.
func (p *Purger) LastRound() time.Time {
	if last := p.lastRound.Load(); last != nil {
		return *last
	}
	return time.Time{}
}

// Run purges until ctx ends. Errors are logged and tried again.
func (p *Purger) Run(ctx context.Context) error {
	pause := purgeInterval // The first, too: what starts has clients to serve before.
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		purged, err := p.RunOnce(ctx)
		if err != nil && ctx.Err() == nil {
			p.log.WarnContext(ctx, "purge was cut short", "error", err)
		}
		pause = purgeInterval
		if purged == purgeBatch {
			pause = purgePause
		}
	}
}

// RunOnce strips one batch and returns its size.
func (p *Purger) RunOnce(ctx context.Context) (int64, error) {
	purged, err := dbsqlc.New().IdempotencyKeyPurge(ctx, p.db, purgeBatch)
	if err != nil {
		p.failed.Add(1)
		return 0, err
	}
	now := time.Now()
	p.lastRound.Store(&now)
	p.purged.Add(purged)
	return purged, nil
}

// Drain strips batch after batch until nothing is due, and returns how many answers it stripped.
func (p *Purger) Drain(ctx context.Context) (total int64, err error) {
	for {
		purged, err := p.RunOnce(ctx)
		total += purged
		if err != nil || purged < purgeBatch {
			return total, err
		}
	}
}
