package payments

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime/debug"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"example.com/payments/internal/dbsqlc"
	"example.com/payments/internal/idempotency"
)

const (
	// Eight keys are looked at side by side, and no key is taken before there is somebody to look at it: a gateway that hangs makes the round
	// slow, and the looks not old.
	reapBatch = 8
	// A round ends after a hundred looks, so that a gateway that has just come back is not met by everything at once.
	reapRound = 100
	// A payment that stays unclear is looked at less and less often, but at least every fifth round: once the gateway is back, nothing
	// waits longer than that for its end.
	reapBackOffRounds = 5
)

// Reaper ends the stale payments and refunds whose clients do not come back. It finds out; it never charges.
//
// It looks at the gateway without taking the key over, so a client's repeat is never kept waiting by it. It takes over only to record an
// end that it knows: the charge it has found, or, when the gateway has never seen it and no client has come back within ReapAfter, the
// cancel that it has just obtained. Time alone decides nothing: while the gateway cannot be reached, everything stays as it is.
//
// Any number of replicas may run one. They share the work through next_look_at, and should two meet all the same, the lease fences.
type Reaper struct {
	service *Service
}

// NewReaper returns the reaper of a service's database and gateway.
func NewReaper(service *Service) *Reaper { return &Reaper{service: service} }

// ReapEnding is what became of one key that the reaper looked at.
type ReapEnding string

const (
	ReapRecorded  ReapEnding = "recorded"   // the gateway had an outcome, and now so has the key
	ReapCanceled  ReapEnding = "canceled"   // closed by the cancel that was obtained for it
	ReapLeftAlone ReapEnding = "left_alone" // the gateway has never seen it, and its client may still come back
	ReapUnclear   ReapEnding = "unclear"    // the gateway could not say, or could not be asked
	ReapOvertaken ReapEnding = "overtaken"  // a client came back, or another replica was quicker
	ReapError     ReapEnding = "error"      // the database did not do its part
)

var reapEndings = []ReapEnding{ReapRecorded, ReapCanceled, ReapLeftAlone, ReapUnclear, ReapOvertaken, ReapError}

// Run reaps every ReapInterval until ctx ends. Errors are logged and tried again in the next round.
func (r *Reaper) Run(ctx context.Context) error {
	for pauseFor(ctx, r.service.settings.ReapInterval) {
		if _, err := r.RunOnce(ctx); err != nil && ctx.Err() == nil {
			r.service.log.WarnContext(ctx, "reaper's round was cut short", "error", err)
		}
	}
	return nil
}

// RunOnce is one round: it looks at the stale keys that are due, reapRound of them at most, and counts what became of them. The error is
// the first that was met.
func (r *Reaper) RunOnce(ctx context.Context) (map[ReapEnding]int, error) {
	counts, err := r.round(ctx, nil, reapRound)
	if err == nil {
		r.service.metrics.reaperRound.SetToCurrentTime()
	}
	return counts, err
}

// RunAll looks at every stale key once, whatever its back-off.
func (r *Reaper) RunAll(ctx context.Context) (map[ReapEnding]int, error) {
	dueBy, err := r.service.queries.IdempotencyKeyMakeDue(ctx, r.service.db)
	if err != nil {
		return nil, fmt.Errorf("find stale keys: %w", storageError(err))
	}
	return r.round(ctx, &dueBy, math.MaxInt)
}

// RunKey does the reaper's step for one key, now: for an operator who does not want to wait for its turn. It returns [ErrNotFound] when the
// key is not stale, so that there is nothing to end.
func (r *Reaper) RunKey(ctx context.Context, merchantID uuid.UUID, key idempotency.Key) (ReapEnding, error) {
	row, err := r.service.queries.IdempotencyKeyLookOne(ctx, r.service.db, dbsqlc.IdempotencyKeyLookOneParams{MerchantID: merchantID, Key: string(key)})
	if err != nil {
		return ReapError, notFound(err)
	}
	return r.reap(ctx, dbsqlc.IdempotencyKeyLookRow(row))
}

func (r *Reaper) round(ctx context.Context, dueBy *time.Time, most int) (map[ReapEnding]int, error) {
	counts := make(map[ReapEnding]int)
	for looked := 0; looked < most; {
		keys, err := r.service.queries.IdempotencyKeyLook(ctx, r.service.db, dbsqlc.IdempotencyKeyLookParams{
			// If this process dies now, another looks again when these looks would have ended.
			LookTimeout: r.service.settings.GatewayTimeout, DueBy: dueBy, Max: reapBatch,
		})
		if err != nil {
			return counts, fmt.Errorf("find stale keys: %w", storageError(err))
		}
		endings := make([]ReapEnding, len(keys))
		var group errgroup.Group
		for i, key := range keys {
			group.Go(func() (err error) {
				endings[i], err = r.reap(ctx, key)
				return err
			})
		}
		err = group.Wait()
		for _, ending := range endings {
			counts[ending]++
			r.service.metrics.reaped.WithLabelValues(string(ending)).Inc()
		}
		if looked += len(keys); err != nil || len(keys) < reapBatch {
			return counts, err
		}
	}
	return counts, nil
}

// reap looks at one stale key, and records the end if there is one.
func (r *Reaper) reap(ctx context.Context, key dbsqlc.IdempotencyKeyLookRow) (ending ReapEnding, err error) {
	defer func() {
		if value := recover(); value != nil {
			ending, err = ReapError, &PanicError{Value: value, Stack: debug.Stack()}
		}
	}()
	s := r.service
	lookCtx, cancel := context.WithTimeout(ctx, s.settings.GatewayTimeout)
	defer cancel()
	story, err := s.storyOf(ctx, key.Route, key.MerchantID, key.ResourceID)
	if err != nil {
		return ReapError, fmt.Errorf("load what key %s is for: %w", idempotency.Key(key.Key).Hash(), err)
	}

	ending = ReapRecorded
	outcome, err := s.gateway.LookUp(lookCtx, story.intent())
	if err == nil && !outcome.Final() && outcome.Status != OutcomeProcessing {
		// A look may take long, and the client may have come and gone meanwhile: its time is counted now.
		abandonedFor, err := s.queries.IdempotencyKeyAbandoned(ctx, s.db, dbsqlc.IdempotencyKeyAbandonedParams{
			MerchantID: key.MerchantID, Key: key.Key, Attempt: key.Attempt,
		})
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return ReapOvertaken, nil
		case err != nil:
			return ReapError, storageError(err)
		case abandonedFor < s.settings.ReapAfter:
			return ReapLeftAlone, r.lookAgain(ctx, key)
		}
		ending = ReapCanceled
		if outcome, err = s.gateway.Cancel(lookCtx, story.intent()); err != nil {
			return ReapUnclear, r.lookAgain(ctx, key)
		}
		if outcome.Status != OutcomeCanceled {
			ending = ReapRecorded
		}
	}
	if err != nil || !outcome.Final() {
		return ReapUnclear, r.lookAgain(ctx, key)
	}

	// The end is known, and is recorded even when the process is being stopped.
	ctx = context.WithoutCancel(ctx)
	lease := idempotency.Lease{MerchantID: key.MerchantID, Key: idempotency.Key(key.Key), ID: uuid.New(), Attempt: key.Attempt}
	lease, ok, err := idempotency.TakeOver(ctx, s.db, lease, s.settings.Holder, nil, s.settings.LeaseTTL)
	if err != nil {
		return ReapError, storageError(err)
	}
	if !ok {
		return ReapOvertaken, nil
	}
	defer s.waiters.Notify(lease.MerchantID, lease.Key)
	_, err = s.record(ctx, attempt{lease: lease, requestID: key.RequestID, story: story}, outcome)
	if _, lost := errors.AsType[*idempotency.InFlightError](err); lost {
		return ReapOvertaken, nil
	}
	if err != nil {
		return ReapError, err
	}
	return ending, nil
}

// lookAgain puts the next look off by a quarter of the time that the key has been stale, within the bounds of one round and a few.
func (r *Reaper) lookAgain(ctx context.Context, key dbsqlc.IdempotencyKeyLookRow) error {
	settings := r.service.settings
	delay := min(max(key.AbandonedFor/4, settings.ReapInterval), reapBackOffRounds*settings.ReapInterval)
	if wait := settings.ReapAfter - key.AbandonedFor; wait > 0 {
		delay = min(delay, wait)
	}
	err := r.service.queries.IdempotencyKeyLookAgain(context.WithoutCancel(ctx), r.service.db, dbsqlc.IdempotencyKeyLookAgainParams{
		MerchantID: key.MerchantID, Key: key.Key, Attempt: key.Attempt, Delay: delay,
	})
	if err != nil {
		return fmt.Errorf("put off the next look: %w", storageError(err))
	}
	return nil
}

// storyOf finds the story that a key of the given route was claimed for.
func (s *Service) storyOf(ctx context.Context, route string, merchantID, id uuid.UUID) (story, error) {
	switch route {
	case RouteCreatePayment:
		return (&paymentStory{service: s, merchantID: merchantID}).load(ctx, id)
	case RouteCreateRefund:
		return (&refundStory{service: s, merchantID: merchantID}).load(ctx, id)
	}
	return nil, fmt.Errorf("no story for route %q", route)
}
