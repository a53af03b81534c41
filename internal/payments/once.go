package payments

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/postgres"
)

// A claim is tried three times: the ground may shift under a loser (a twin rolls back, an order opens), but not for ever.
const claimTries = 3

// RecordBudget is how long the database gets to keep what is known, after the gateway's budget has ended. Longer, and the client would
// have gone.
const RecordBudget = 5 * time.Second

// story is what differs between a payment and a refund on the one walk that both take.
type story interface {
	// claim writes key and resource together. It returns [pgx.ErrNoRows] when it wrote nothing.
	claim(ctx context.Context, claim idempotency.Claim, lease idempotency.Lease) error
	// refusal says why the claim wrote nothing although nobody has the key; nil when there is no reason any more.
	refusal(ctx context.Context) error
	// load returns the story of the resource that a key was claimed for before.
	load(ctx context.Context, id uuid.UUID) (story, error)
	subject() Subject
	intent() Intent
	// describe is the resource in one line, for an operator.
	describe() string
	// status is the resource's, which is the same for payments and refunds.
	status() string
	// accepted answers for a resource that goes on in the background.
	accepted() idempotency.Answer
	// record writes the outcome and its answer together. It returns [pgx.ErrNoRows] when the lease was not the present one.
	record(ctx context.Context, lease idempotency.Lease, requestID string, outcome Outcome) (idempotency.Answer, error)
}

// attempt is one holder's turn at giving a key its answer.
type attempt struct {
	lease     idempotency.Lease
	requestID string // the request that the answer will be made for
	story     story
	history   history
}

// once gives the request the one answer of its key: claim, charge, record for whoever wins the key, the stored answer or the reason
// to wait for everybody else. It returns
//   - an answer, fresh or replayed;
//   - [*idempotency.ExpiredError], [idempotency.ErrKeyReused], [idempotency.ErrRecipeUnknown], [*idempotency.InFlightError];
//   - the story's own refusals, which leave the key free;
//   - [ErrStorageUnavailable] when nothing was begun;
//   - an [*UnfinishedError] when an attempt has ended without an answer.
//
// The client's going away changes nothing from here on; it only ends a wait.
func (s *Service) once(ctx context.Context, claim idempotency.Claim, wait *time.Duration, story story) (idempotency.Answer, error) {
	clientCtx, ctx := ctx, context.WithoutCancel(ctx)
	lease := idempotency.Lease{MerchantID: claim.MerchantID, Key: claim.Key, ID: uuid.New(), Attempt: 1}

	var err error
	for range claimTries {
		started := time.Now()
		err = story.claim(ctx, claim, lease)
		s.metrics.claimSeconds.Observe(time.Since(started).Seconds())
		if err == nil {
			s.decided(claim, idempotency.ClaimWon, story.subject())
			return s.begin(ctx, claim.Mode, attempt{lease: lease, requestID: claim.RequestID, story: story})
		}
		if !lost(err) {
			return idempotency.Answer{}, storageError(err)
		}
		answer, judgedErr := s.judged(clientCtx, claim, wait, lease, story)
		if !errors.Is(judgedErr, idempotency.ErrNoRecord) {
			return answer, judgedErr
		}
		if refusal := story.refusal(ctx); refusal != nil {
			// A twin may have been let in since, and its answer comes before what the rules say now.
			answer, judgedErr := s.judged(clientCtx, claim, wait, lease, story)
			if !errors.Is(judgedErr, idempotency.ErrNoRecord) {
				return answer, judgedErr
			}
			return idempotency.Answer{}, refusal
		}
	}
	return idempotency.Answer{}, fmt.Errorf("%w: the claim was lost %d times: %w", ErrStorageUnavailable, claimTries, err)
}

// judged answers a request that did not win its key, from the key's row. It returns [idempotency.ErrNoRecord] when there is none.
func (s *Service) judged(clientCtx context.Context, claim idempotency.Claim, wait *time.Duration, lease idempotency.Lease, own story) (idempotency.Answer, error) {
	ctx := context.WithoutCancel(clientCtx)
	if wait != nil {
		var cancel context.CancelFunc
		clientCtx, cancel = context.WithTimeout(clientCtx, *wait)
		defer cancel()
	}
	waited, waitIsOver := false, wait == nil
	resumed := false // by this request, in the background
	for takeOvers := 0; ; {
		record, err := idempotency.Get(ctx, s.db, claim.MerchantID, claim.Key)
		switch {
		case errors.Is(err, idempotency.ErrNoRecord):
			return idempotency.Answer{}, err
		case err != nil:
			return idempotency.Answer{}, storageError(err)
		}
		if err := s.judge(claim, record); err != nil {
			return idempotency.Answer{}, err
		}
		if record.Final() {
			if !resumed {
				s.decided(claim, idempotency.ClaimReplayed, Subject{Path: record.ResourcePath})
			}
			answer := record.Answer()
			// Whoever would wait for what goes on in the background has what it wished for, even if it came at once.
			answer.Waited = waited || wait != nil && record.Mode == idempotency.ModeAsync
			return answer, nil
		}

		if record.LeaseID == lease.ID || record.Stale() {
			takeOvers++
			if takeOvers > claimTries {
				return idempotency.Answer{}, fmt.Errorf("%w: the take-over was lost %d times", ErrStorageUnavailable, claimTries)
			}
			a, ok, err := s.resume(ctx, claim, record, lease, own)
			if err != nil {
				return idempotency.Answer{}, err
			}
			if !ok {
				continue // Somebody was quicker, or it was us and the call failed: the row says which.
			}
			result := idempotency.ClaimWon
			if a.history.resumed {
				result = idempotency.ClaimTakenOver
			}
			s.decided(claim, result, a.story.subject())
			answer, err := s.begin(ctx, record.Mode, a)
			if record.Mode == idempotency.ModeSync || !a.history.resumed {
				answer.Waited = waited
				return answer, err
			}
			// The attempt goes on in the background, and this request is from here on one that meets it there, like any other.
			lease.ID, resumed = uuid.New(), true
			continue
		}

		if !waitIsOver {
			waited = true
			waitIsOver = !s.waiters.Wait(clientCtx, claim.MerchantID, claim.Key)
			continue // One last look, also when the wait was in vain.
		}
		if record.Mode == idempotency.ModeAsync {
			stored, err := own.load(ctx, record.ResourceID)
			if err != nil {
				return idempotency.Answer{}, err
			}
			if stored.status() != StatusProcessing {
				continue // It has become final since the look, and so has its key.
			}
			if !resumed {
				s.decided(claim, idempotency.ClaimInFlight, stored.subject())
			}
			answer := stored.accepted()
			answer.Replayed, answer.Waited = true, waited
			return answer, nil
		}
		s.decided(claim, idempotency.ClaimInFlight, Subject{Path: record.ResourcePath})
		return idempotency.Answer{}, &idempotency.InFlightError{Record: record, Waited: waited}
	}
}

// judge is [idempotency.Record.Judge], counted.
func (s *Service) judge(claim idempotency.Claim, record idempotency.Record) error {
	err := record.Judge(claim.Request)
	if _, expired := errors.AsType[*idempotency.ExpiredError](err); expired {
		s.decided(claim, idempotency.ClaimExpired, Subject{Path: record.ResourcePath})
	} else if errors.Is(err, idempotency.ErrKeyReused) {
		// Not the path: what the key was first used for is no business of this request's, nor of its log line.
		s.decided(claim, idempotency.ClaimMismatch, Subject{})
	}
	return err
}

// resume makes the request the next attempt at a stale key, or recognises an attempt as its own whose claim or take-over went through
// although its call failed. The story is that of the row, never the request's own: that one may have been filled by half.
func (s *Service) resume(ctx context.Context, claim idempotency.Claim, record idempotency.Record, lease idempotency.Lease, own story) (attempt, bool, error) {
	stored, err := own.load(ctx, record.ResourceID)
	if err != nil {
		return attempt{}, false, err
	}
	if record.Mode == idempotency.ModeAsync {
		// This request gets a 202. The answer to come is still that of the one which claimed the key.
		claim.RequestID, claim.TraceParent = record.RequestID, record.TraceParent
	}
	a := attempt{lease: lease, requestID: claim.RequestID, story: stored}
	a.lease.Attempt = record.Attempt
	if record.LeaseID == lease.ID {
		resumed := record.Attempt > 1
		a.history = history{resumed: resumed, uncertain: resumed}
		return a, true, nil
	}
	next, ok, err := idempotency.TakeOver(ctx, s.db, a.lease, s.settings.Holder, &claim, s.settings.LeaseTTL)
	if err != nil && !postgres.IsAmbiguous(err) {
		return attempt{}, false, storageError(err)
	}
	a.lease = next
	a.history = history{resumed: true, uncertain: record.OutcomeUncertain}
	return a, ok, nil
}

// begin starts an attempt: at once for a client that waits for the answer, in the background for one that does not.
func (s *Service) begin(ctx context.Context, mode idempotency.Mode, a attempt) (idempotency.Answer, error) {
	s.attempts.Add(1)
	if mode == idempotency.ModeSync {
		defer s.attempts.Done()
		return s.finish(ctx, a)
	}
	go func() {
		defer s.attempts.Done()
		_, err := s.finish(ctx, a)
		if panicked, ok := errors.AsType[*PanicError](err); ok {
			s.log.ErrorContext(ctx, "background attempt has panicked", "key", a.lease.Key, "error", err, "stack", string(panicked.Stack))
		} else if err != nil {
			s.log.WarnContext(ctx, "background attempt has ended without an answer", "key", a.lease.Key, "error", err)
		}
	}()
	return a.story.accepted(), nil
}

// finish is the rest of the walk, the same for a first attempt and for every later one: charge, then record or release. Money may
// move from here on, so ctx must not be one that a client can end.
func (s *Service) finish(ctx context.Context, a attempt) (answer idempotency.Answer, err error) {
	drop := s.leases.Hold(a.lease.ID)
	defer drop()
	defer s.waiters.Notify(a.lease.MerchantID, a.lease.Key)
	defer func() {
		if value := recover(); value != nil {
			answer, err = s.release(ctx, a, &PanicError{Value: value, Stack: debug.Stack()})
		}
	}()
	started := time.Now()
	outcome, err := charge(ctx, s.gateway, a.story.intent(), a.history, s.settings.GatewayTimeout)
	s.metrics.chargeTime.WithLabelValues(chargeEnding(outcome, err)).Observe(time.Since(started).Seconds())
	if err != nil {
		return s.release(ctx, a, err)
	}
	return s.record(ctx, a, outcome)
}

// record keeps at it until the database has the outcome, the lease turns out to be lost, or the budget ends.
func (s *Service) record(ctx context.Context, a attempt, outcome Outcome) (idempotency.Answer, error) {
	defer func(started time.Time) { s.metrics.recordTime.Observe(time.Since(started).Seconds()) }(time.Now())
	return s.persist(ctx, a, func(ctx context.Context) (idempotency.Answer, error, error) {
		answer, err := a.story.record(ctx, a.lease, a.requestID, outcome)
		if errors.Is(err, pgx.ErrNoRows) {
			return s.present(ctx, a, nil)
		}
		return answer, nil, err
	})
}

// release gives the key back without an answer, and returns cause as the reason. It forgets the uncertainty only when cause says that
// surely nothing was charged.
func (s *Service) release(ctx context.Context, a attempt, cause error) (idempotency.Answer, error) {
	return s.persist(ctx, a, func(ctx context.Context) (idempotency.Answer, error, error) {
		ok, err := idempotency.Release(ctx, s.db, a.lease, !errors.Is(cause, ErrNotCharged))
		if err == nil && !ok {
			return s.present(ctx, a, &UnfinishedError{Subject: a.story.subject(), Cause: cause})
		}
		return idempotency.Answer{}, &UnfinishedError{Subject: a.story.subject(), Cause: cause}, err
	})
}

// present answers for an attempt that finds its lease gone: with what the present holder has stored, or with that it is at work. If
// it was this attempt itself that changed the row, by a statement whose call had failed, the answer is its own, or own.
func (s *Service) present(ctx context.Context, a attempt, own error) (answer idempotency.Answer, ending, trouble error) {
	record, err := idempotency.Get(ctx, s.db, a.lease.MerchantID, a.lease.Key)
	switch {
	case err != nil:
		return idempotency.Answer{}, nil, err
	case record.Expired:
		return idempotency.Answer{}, &idempotency.ExpiredError{ResourcePath: record.ResourcePath}, nil
	case record.Final():
		answer := record.Answer()
		if answer.Replayed = record.LeaseID != a.lease.ID; answer.Replayed {
			s.metrics.leasesLost.Inc()
		}
		return answer, nil, nil
	case own != nil && record.Attempt == a.lease.Attempt && record.LeaseID == uuid.Nil:
		return idempotency.Answer{}, own, nil
	}
	s.metrics.leasesLost.Inc()
	return idempotency.Answer{}, &idempotency.InFlightError{Record: record}, nil
}

// persist repeats a write for as long as the database is in trouble, until [RecordBudget] ends. ending is what the write has to say to the
// client once it is done. A database that does not keep what it is told leaves the outcome open, whatever the gateway has said.
func (s *Service) persist(ctx context.Context, a attempt, write func(context.Context) (answer idempotency.Answer, ending, trouble error)) (idempotency.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, RecordBudget)
	defer cancel()
	for pause := firstPause; ; pause = min(2*pause, maxPause) {
		answer, ending, trouble := s.inTurn(ctx, write)
		if trouble == nil {
			return answer, ending
		}
		if postgres.IsFault(trouble) || !pauseFor(ctx, pause) {
			return idempotency.Answer{}, &UnfinishedError{Subject: a.story.subject(), Cause: storageError(trouble)}
		}
	}
}

// inTurn writes when it is this attempt's turn. A gateway that was silent and speaks again ends thousands of attempts at once; were all of
// them to queue for connections, every look at a payment would stand behind them, and be told that the database is away. So a quarter of
// the connections is left to everybody else, and the attempts wait for one another here, in the order they came, within their own budget.
func (s *Service) inTurn(ctx context.Context, write func(context.Context) (answer idempotency.Answer, ending, trouble error)) (answer idempotency.Answer, ending, trouble error) {
	select {
	case s.turns <- struct{}{}:
		defer func() { <-s.turns }()
		return write(ctx)
	case <-ctx.Done():
		return idempotency.Answer{}, nil, ctx.Err()
	}
}
