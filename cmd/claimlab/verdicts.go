package main

import (
	"fmt"
	"strings"

	"example.com/payments/internal/idempotency/strategies"
)

// tolerance is how far below the best the default may be without an explanation.
const tolerance = 0.10

// judge says whether the run has shown what the lab is there to show, as far as it has the cells for it.
func (r *report) judge() {
	r.Verdicts = nil
	for _, verdict := range []*verdict{r.onlyCheckThenActDoubles(), r.heldFormsDrainThePool(), r.defaultHoldsNothing(), r.defaultIsAmongTheBest()} {
		if verdict != nil {
			r.Verdicts = append(r.Verdicts, *verdict)
		}
	}
}

func (r *report) onlyCheckThenActDoubles() *verdict {
	v := &verdict{Claim: "check-then-act charges twice whenever twins meet, and nothing else ever does", Holds: true}
	for _, c := range r.Cells {
		kind := c.Strategy == strategies.NameCheckThenAct
		switch {
		case kind && c.Shape == shapeHot:
			v.Holds = v.Holds && c.Doubled > 0
			v.Why = append(v.Why, fmt.Sprintf("%s: %s charges too many for %s intents.", c.cell, count(c.Doubled), count(c.Paid)))
		case !kind && c.Doubled > 0:
			v.Holds = false
			v.Why = append(v.Why, fmt.Sprintf("%s: %s charges too many.", c.cell, count(c.Doubled)))
		}
	}
	if len(v.Why) == 0 {
		return nil
	}
	return v
}

func (r *report) heldFormsDrainThePool() *verdict {
	v := &verdict{Claim: "a lock that is held over the gateway's call drains the pool", Holds: true}
	for _, c := range r.Cells {
		if c.Strategy == strategies.NameRowLockHeld || c.Strategy == strategies.NameAdvisoryLockHeld {
			v.Holds = v.Holds && c.HeldMax == r.Load.Pool
			v.Why = append(v.Why, fmt.Sprintf("%s: %d of %d connections out, %.1f on average; half of the requests wait %s ms or more for one.",
				c.cell, c.HeldMax, r.Load.Pool, c.HeldMean, milliseconds(c.PoolWait.P50)))
		}
	}
	if len(v.Why) == 0 {
		return nil
	}
	return v
}

func (r *report) defaultHoldsNothing() *verdict {
	v := &verdict{Claim: "the default holds no connection while the gateway is called", Holds: true}
	held, calls := 0, 0
	for _, c := range r.Cells {
		if c.Strategy == strategies.NameOnConflict {
			held, calls = held+c.HeldAtTheGateway, calls+c.GatewayCalls
		}
	}
	if calls == 0 {
		return nil
	}
	v.Holds = held == 0
	v.Why = []string{fmt.Sprintf("Of %s calls of the gateway %s were made by a request that held a connection.", count(calls), count(held))}
	return v
}

// defaultIsAmongTheBest compares the default with the best strategy of each group, and explains where it is not.
func (r *report) defaultIsAmongTheBest() *verdict {
	v := &verdict{Claim: "the default is within 10 % of the best strategy's intents per second", Holds: true}
	for _, g := range r.groups() {
		own, best := r.find(strategies.NameOnConflict, g.Shape, g.Gateway), g.best()
		if own == nil || best == nil || best.PaidPerSec == 0 {
			continue
		}
		ratio := own.PaidPerSec / best.PaidPerSec
		within := ratio >= 1-tolerance
		own.ShareOfBest, own.WithinTenPerCent, own.BestOfItsCell = &ratio, &within, best.Strategy
		switch {
		case own == best:
			v.Why = append(v.Why, fmt.Sprintf("%s: the default is the best, with %s intents per second.", g, rate(own.PaidPerSec)))
		case within:
			v.Why = append(v.Why, fmt.Sprintf("%s: %s of the best, %s (%s against %s intents per second).", g, percent(ratio), best.Strategy, rate(own.PaidPerSec), rate(best.PaidPerSec)))
		default:
			v.Holds = false
			v.Why = append(v.Why, fmt.Sprintf("%s: not so: %s of the best, %s (%s against %s intents per second). %s",
				g, percent(ratio), best.Strategy, rate(own.PaidPerSec), rate(best.PaidPerSec), why(own, best)))
		}
	}
	if len(v.Why) == 0 {
		return nil
	}
	return v
}

// why names what the better one does less of, as far as it was measured.
func why(own, best *result) string {
	var reasons []string
	if o, b := own.WinnerTrips, best.WinnerTrips; o != nil && b != nil && (o.PostgreSQL != b.PostgreSQL || o.Redis != b.Redis) {
		reasons = append(reasons, fmt.Sprintf("a winner of it makes %s, one of the default %s", b, o))
	}
	if o, b := own.LoserTrips, best.LoserTrips; own.Shape == shapeHot && o != nil && b != nil && (o.PostgreSQL != b.PostgreSQL || o.Redis != b.Redis) {
		reasons = append(reasons, fmt.Sprintf("a loser %s against %s", b, o))
	}
	if best.WALPerThousand < 0.95*own.WALPerThousand {
		reasons = append(reasons, fmt.Sprintf("it writes %s of log for 1,000 intents against %s", kilobytes(best.WALPerThousand), kilobytes(own.WALPerThousand)))
	}
	sentence := "Nothing that was counted tells them apart, so it is the machine: see the lowest and highest round."
	if len(reasons) > 0 {
		sentence = "Why: " + strings.Join(reasons, "; ") + "."
	}
	if best.Strategy == strategies.NameRedisSetNX {
		sentence += " Key and answer are in Redis's memory: PostgreSQL is spared their two writes and the reads of the losers, and they are gone when Redis restarts."
	}
	return sentence
}

func (t roundTrips) String() string {
	var where []string
	if t.PostgreSQL > 0 {
		where = append(where, fmt.Sprintf("%.1f round trips to PostgreSQL", t.PostgreSQL))
	}
	if t.Redis > 0 {
		where = append(where, fmt.Sprintf("%.1f to Redis", t.Redis))
	}
	return strings.Join(where, " and ")
}
