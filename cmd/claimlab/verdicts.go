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

// heldFormsDrainThePool is not seen in how many connections are out at once: for a moment the default has all of them out, too. The pool is
// drained when every call of the gateway keeps one, and others wait for one about as long as such a call takes; half of it is longer than
// anything that the database does.
func (r *report) heldFormsDrainThePool() *verdict {
	v := &verdict{Claim: "a lock that is held over the gateway's call drains the pool", Holds: true}
	for _, c := range r.Cells {
		if c.Strategy == strategies.NameRowLockHeld || c.Strategy == strategies.NameAdvisoryLockHeld {
			wait := c.PoolWait.P50
			v.Holds = v.Holds && c.GatewayCalls > 0 && c.HeldAtTheGateway == c.GatewayCalls && wait != nil && *wait >= c.GatewayMs/2
			v.Why = append(v.Why, fmt.Sprintf("%s: %s of %s calls of the gateway kept a connection, %d of %d were out at once, %.1f averaged over the slices and their ends; half of the requests wait %s ms or more for one.",
				c.cell, count(c.HeldAtTheGateway), count(c.GatewayCalls), c.HeldMax, r.Load.Pool, c.HeldMean, milliseconds(wait)))
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
	v := &verdict{Claim: "the default is within 10 % of the best strategy's intents per second, or their rounds overlap", Holds: true}
	for _, g := range r.groups() {
		own, best := r.find(strategies.NameOnConflict, g.Shape, g.Gateway), g.best()
		if own == nil || best == nil || best.PaidPerSec == 0 {
			continue
		}
		ratio := own.PaidPerSec / best.PaidPerSec
		within := ratio >= 1-tolerance
		own.ShareOfBest, own.WithinTenPerCent, own.BestOfItsCell = &ratio, &within, best.Strategy
		compared := fmt.Sprintf("%s of the best, %s (%s against %s intents per second)", percent(ratio), best.Strategy, rate(own.PaidPerSec), rate(best.PaidPerSec))
		switch {
		case own == best && g.usable() == 1:
			v.Why = append(v.Why, fmt.Sprintf("%s: %s intents per second; no other usable strategy is measured here.", g, rate(own.PaidPerSec)))
		case own == best:
			v.Why = append(v.Why, fmt.Sprintf("%s: the default is the best, with %s intents per second.", g, rate(own.PaidPerSec)))
		case within:
			v.Why = append(v.Why, fmt.Sprintf("%s: %s.", g, compared))
		case own.HighPerSec >= best.LowPerSec:
			v.Why = append(v.Why, fmt.Sprintf("%s: %s, but their rounds overlap (%s to %s against %s to %s), so this run does not tell them apart.",
				g, compared, rate(own.LowPerSec), rate(own.HighPerSec), rate(best.LowPerSec), rate(best.HighPerSec)))
		default:
			v.Holds = false
			v.Why = append(v.Why, fmt.Sprintf("%s: not so: %s. %s", g, compared, why(own, best)))
		}
	}
	if len(v.Why) == 0 {
		return nil
	}
	return v
}

// why names what the better one does less of, as far as it was measured. What it does more of is no reason, but belongs to the sentence.
func why(own, best *result) string {
	var reasons []string
	fewer := func(who string, o, b *roundTrips) {
		if o == nil || b == nil || o.PostgreSQL-b.PostgreSQL < 0.05 {
			return
		}
		reason := fmt.Sprintf("a %s of it makes %.1f round trips to PostgreSQL against %.1f", who, b.PostgreSQL, o.PostgreSQL)
		if b.Redis > o.Redis {
			reason += fmt.Sprintf(" (and %.1f to Redis)", b.Redis)
		}
		reasons = append(reasons, reason)
	}
	fewer("winner", own.WinnerTrips, best.WinnerTrips)
	fewer("loser", own.LoserTrips, best.LoserTrips)
	if best.WALPerThousand < 0.95*own.WALPerThousand {
		reasons = append(reasons, fmt.Sprintf("it writes %s of log for 1,000 intents against %s", kilobytes(best.WALPerThousand), kilobytes(own.WALPerThousand)))
	}
	if best.DeadPerThousand < 0.95*own.DeadPerThousand {
		reasons = append(reasons, fmt.Sprintf("it leaves %s dead tuples against %s", rate(best.DeadPerThousand), rate(own.DeadPerThousand)))
	}
	if len(reasons) == 0 {
		return "Nothing that was counted is the reason."
	}
	sentence := "Why: " + strings.Join(reasons, "; ") + "."
	if best.Strategy == strategies.NameRedisSetNX {
		spared := "the row of the key and the stored answer"
		if own.LoserTrips != nil {
			spared += ", and the reads of the losers"
		}
		sentence += " Key and answer are in Redis's memory: PostgreSQL is spared " + spared + ", and they are gone when Redis restarts."
	}
	return sentence
}
