package idempotency

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/google/uuid"

	"example.com/payments/internal/dbsqlc"
)

const (
	// 100 ms with half of it as jitter: an answer that another replica stored is seen well within 250 ms, and the replicas do not
	// ask in step.
	pollInterval = 100 * time.Millisecond
	// While the database does not answer, asking faster than this helps nobody.
	pollBackOffMax = 2 * time.Second
)

// Waiters lets requests wait for the answer of a key that another request is working on, without a connection held by any of them.
// A neighbour in the same process wakes them at once; for the rest, one query asks for all waiting keys together, however many wait.
// LISTEN and NOTIFY would be quicker by some milliseconds, and would make every commit of the database queue for one lock.
type Waiters struct {
	db  dbsqlc.DBTX
	log *slog.Logger

	mu      sync.Mutex
	waiting map[waitedKey]*waitedFor
	arrival chan struct{} // a first waiter has come; the poller need not sleep on
	closed  chan struct{}
	close   sync.Once
}

type waitedKey struct {
	merchantID uuid.UUID
	key        Key
}

type waitedFor struct {
	waiters int
	woken   chan struct{}
}

// NewWaiters returns an empty waiting room. It needs Run to see what other processes store.
func NewWaiters(db dbsqlc.DBTX, log *slog.Logger) *Waiters {
	return &Waiters{
		db: db, log: log,
		waiting: make(map[waitedKey]*waitedFor),
		arrival: make(chan struct{}, 1),
		closed:  make(chan struct{}),
	}
}

// Wait returns true when the key is worth another look: it has become final, or stale. It returns false when ctx ended or Close was
// called. What happened to the key before Wait was called is seen by the next poll.
func (w *Waiters) Wait(ctx context.Context, merchantID uuid.UUID, key Key) bool {
	k := waitedKey{merchantID, key}
	entry := w.enter(k)
	defer w.leave(k, entry)
	select {
	case <-entry.woken:
		return true
	case <-ctx.Done():
		return false
	case <-w.closed:
		return false
	}
}

// Notify wakes the waiters of a key in this process.
func (w *Waiters) Notify(merchantID uuid.UUID, key Key) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.wake(waitedKey{merchantID, key})
}

// Close sends everybody away, now and from now on.
func (w *Waiters) Close() { w.close.Do(func() { close(w.closed) }) }

func (w *Waiters) enter(k waitedKey) *waitedFor {
	w.mu.Lock()
	defer w.mu.Unlock()
	entry, ok := w.waiting[k]
	if !ok {
		entry = &waitedFor{woken: make(chan struct{})}
		w.waiting[k] = entry
	}
	entry.waiters++
	select {
	case w.arrival <- struct{}{}:
	default:
	}
	return entry
}

func (w *Waiters) leave(k waitedKey, entry *waitedFor) {
	w.mu.Lock()
	defer w.mu.Unlock()
	entry.waiters--
	if entry.waiters == 0 && w.waiting[k] == entry {
		delete(w.waiting, k)
	}
}

// wake empties the key's entry, so that whoever comes back waits for the next event and not for this one.
func (w *Waiters) wake(k waitedKey) {
	if entry, ok := w.waiting[k]; ok {
		close(entry.woken)
		delete(w.waiting, k)
	}
}

// Run polls while anybody waits, until ctx ends.
func (w *Waiters) Run(ctx context.Context) error {
	backOff := time.Duration(0)
	for {
		if w.empty() {
			select {
			case <-ctx.Done():
				return nil
			case <-w.arrival:
			}
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(max(backOff, pollInterval) + rand.N(pollInterval/2)):
		}
		if err := w.RunOnce(ctx); err != nil && ctx.Err() == nil {
			backOff = min(max(2*backOff, pollInterval), pollBackOffMax)
			w.log.WarnContext(ctx, "waiting keys were not polled", "error", err)
			continue
		}
		backOff = 0
	}
}

// RunOnce asks for all waiting keys in one query and wakes those whose wait is over.
func (w *Waiters) RunOnce(ctx context.Context) error {
	var merchantIDs []uuid.UUID
	var keys []string
	w.mu.Lock()
	for k := range w.waiting {
		merchantIDs = append(merchantIDs, k.merchantID)
		keys = append(keys, string(k.key))
	}
	w.mu.Unlock()
	if len(keys) == 0 {
		return nil
	}
	rows, err := dbsqlc.New().IdempotencyKeyPoll(ctx, w.db, dbsqlc.IdempotencyKeyPollParams{MerchantIds: merchantIDs, Keys: keys})
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, row := range rows {
		w.wake(waitedKey{row.MerchantID, Key(row.Key)})
	}
	return nil
}

func (w *Waiters) empty() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.waiting) == 0
}
