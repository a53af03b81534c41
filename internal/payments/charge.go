package payments

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"
)

const (
	// A gateway that has refused three times in a row, or could not be reached, is down, and the client should hear it.
	maxTries = 3
	// The first pause between two exchanges, and the longest: a gateway that has come back is noticed within half a second.
	firstPause = 50 * time.Millisecond
	maxPause   = 500 * time.Millisecond
)

// history is what earlier attempts at the same key have left behind.
type history struct {
	resumed   bool // there were some, so the gateway is asked before it is sent anything
	uncertain bool // one of them may have moved money without our knowing
}

// charge makes the gateway carry out the intent, or finds out that it has, within budget. It touches no database.
//
// It returns a final outcome, or one of two errors that say what can honestly be told without one: [ErrNotCharged], when no attempt
// has left anything uncertain and every request of this one was either never sent or refused by the gateway itself, which then says
// that it has never seen the intent; else [ErrOutcomeUnknown].
//
// Sending again is always under the same gateway key, and only when the gateway does not know it, or when nothing was sent before. A
// request that is still under way somewhere in the network then meets its own key.
func charge(ctx context.Context, gateway Gateway, intent Intent, history history, budget time.Duration) (Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, budget)
	defer cancel()

	uncertain := history.uncertain // money may have moved, and nothing but an outcome can take that back
	refused := false               // refused, and the gateway has not said yet that it has never seen it
	tries, pause, last := 0, firstPause, error(nil)

	for ask := history.resumed; ; {
		if ask {
			outcome, err := within(ctx, budget/5, intent, gateway.LookUp)
			switch {
			case err == nil && outcome.Final():
				return outcome, nil
			case err == nil && outcome.Status == OutcomeNeverSeen:
				ask, refused = false, false
			case err == nil && outcome.Status == OutcomeNotFound:
				ask = false
			case err == nil:
				last = errStillProcessing
			case errors.Is(err, ErrNotSent) && !uncertain && !refused:
				// A gateway that cannot be reached, and nothing to find out about: that is three tries, not a whole budget.
				tries++
				last = err
			default:
				last = err
			}
		}
		if tries > 0 || ask {
			spent := tries == maxTries && !(ask && (uncertain || refused))
			if spent || !pauseFor(ctx, pause) {
				break
			}
			pause = min(2*pause, maxPause)
		}
		if ask {
			continue
		}

		tries++
		outcome, err := within(ctx, remaining(ctx)*3/4, intent, gateway.Charge)
		if err == nil {
			return outcome, nil
		}
		last = err
		switch {
		case errors.Is(err, ErrNotSent):
		case errors.Is(err, ErrRefused):
			ask, refused = true, true
		default:
			ask, uncertain = true, true
		}
	}

	if uncertain || refused {
		return Outcome{}, fmt.Errorf("%w: %w", ErrOutcomeUnknown, last)
	}
	return Outcome{}, fmt.Errorf("%w: %w", ErrNotCharged, last)
}

var errStillProcessing = errors.New("gateway is still working on it")

// within gives one exchange with the gateway its share of the budget, so that one that hangs leaves time to ask about it.
func within(ctx context.Context, limit time.Duration, intent Intent, exchange func(context.Context, Intent) (Outcome, error)) (Outcome, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return exchange(ctx, intent)
}

func remaining(ctx context.Context) time.Duration {
	deadline, _ := ctx.Deadline()
	return time.Until(deadline)
}

// pauseFor waits between half of d and d, and returns false when ctx ends first.
func pauseFor(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d/2 + rand.N(d/2+1))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
