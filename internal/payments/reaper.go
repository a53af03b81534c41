package payments

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"

	"example.com/payments/internal/dbsqlc"
	"example.com/payments/internal/idempotency"
)

const (
	// A round looks at a hundred keys, eight at a time. A gateway that has just come back is not met by everything at once, and a round
	// with a gateway that hangs ends within a minute or two.
	reapBatch       = 100
	reapConcurrency = 8
	// A payment that stays unclear is looked at less and less often, but at least every fifth round: once the gateway is back, nothing
	// waits longer than that for its end.
	reapBackOffRounds = 5
	// What `payments reap --once` looks at, back-off or not.
	reapOnceBatch = 10_000
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

// Run reaps every ReapInterval until ctx ends. Errors are logged and tried again in the next round.
func (r *Reaper) Run(ctx context.Context) error {
	for pauseFor(ctx, r.service.settings.ReapInterval) {
		if _, err := r.RunOnce(ctx, false); err != nil && ctx.Err() == nil {
			r.service.log.WarnContext(ctx, "reaper's round was cut short", "error", err)
		}
	}
	return nil
}

// RunOnce looks at one batch of the stale keys that are due, or of all of them when the back-off is to be ignored, and counts what became
// of them. The error is the first of those that the keys met.
func (r *Reaper) RunOnce(ctx context.Context, ignoreBackOff bool) (map[ReapEnding]int, error) {
	settings := r.service.settings
	batch := int32(reapBatch)
	if ignoreBackOff {
		batch = reapOnceBatch
	}
	keys, err := r.service.queries.IdempotencyKeyLook(ctx, r.service.db, dbsqlc.IdempotencyKeyLookParams{
		// If this process dies now, another looks again when a look would have ended.
		LookTimeout: settings.GatewayTimeout, IgnoreBackOff: ignoreBackOff, Max: batch,
	})
	if err != nil {
		return nil, fmt.Errorf("find stale keys: %w", storageError(err))
	}

	endings := make([]ReapEnding, len(keys))
	var group errgroup.Group
	group.SetLimit(reapConcurrency)
	for i, key := range keys {
		group.Go(func() (err error) {
			endings[i], err = r.reap(ctx, key)
			return err
		})
	}
	err = group.Wait()
	counts := make(map[ReapEnding]int)
	for _, ending := range endings {
		counts[ending]++
	}
	return counts, err
}

// reap looks at one stale key, and records the end if there is one.
func (r *Reaper) reap(ctx context.Context, key dbsqlc.IdempotencyKeyLookRow) (ReapEnding, error) {
	s := r.service
	ctx, cancel := context.WithTimeout(ctx, s.settings.GatewayTimeout)
	defer cancel()
	story, err := s.storyOf(ctx, key.Route, key.MerchantID, key.ResourceID)
	if err != nil {
		return ReapError, fmt.Errorf("load what key %s is for: %w", idempotency.Key(key.Key).Hash(), err)
	}

	ending := ReapRecorded
	outcome, err := s.gateway.LookUp(ctx, story.intent())
	if err == nil && outcome.Status == OutcomeNeverSeen {
		if key.AbandonedFor < s.settings.ReapAfter {
			return ReapLeftAlone, r.lookAgain(ctx, key)
		}
		outcome, err = s.gateway.Cancel(ctx, story.intent())
		if outcome.Status == OutcomeCanceled {
			ending = ReapCanceled
		}
	}
	if err != nil || !outcome.Final() {
		return ReapUnclear, r.lookAgain(ctx, key)
	}

	// The end is known, and is recorded even when the process is being stopped.
	ctx = context.WithoutCancel(ctx)
	lease := idempotency.Lease{MerchantID: key.MerchantID, Key: idempotency.Key(key.Key), ID: uuid.New(), Attempt: key.Attempt}
	lease, ok, err := idempotency.TakeOver(ctx, s.db, lease, s.settings.Holder, "", s.settings.LeaseTTL)
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
