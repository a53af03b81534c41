// Package labgateway is a payment gateway to measure claims against. It runs in the caller's process, takes exactly as long as it is told to,
// and keeps a ledger that counts.
//
// It differs from a real gateway, and from the service's simulator, on purpose: it charges as often as it is asked. A real one knows the key
// of a charge and answers a second request with the first's outcome, and the service derives that key so that even a lost claim meets the
// same charge. Under such a gateway every claim looks right. Here the claim stands alone, and a claim that lets two requests through is seen
// as two charges.
//
// It is a function call and not a server, because a claim's measurement ends where the call to the gateway begins: whatever the call is made
// of would only take processor time away from what is measured.
package labgateway

import (
	"context"
	"fmt"
	"sync"
	"time"

	"example.com/payments/internal/payments"
)

// Ledger is what the gateway knows. Any number of gateways, one for each process that is played, may share one.
type Ledger struct {
	mu      sync.Mutex
	entries map[string]*entry
}

type entry struct {
	working int // requests that are at work on the key
	charges int
}

// NewLedger returns a ledger with nothing in it.
func NewLedger() *Ledger { return &Ledger{entries: make(map[string]*entry)} }

// Charges returns how often a gateway key was charged.
func (l *Ledger) Charges(key string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.entries[key]; e != nil {
		return e.charges
	}
	return 0
}

// Totals returns how many keys were charged at all, and how many charges there were beyond one for each.
func (l *Ledger) Totals() (charged, doubled int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries {
		if e.charges > 0 {
			charged++
			doubled += e.charges - 1
		}
	}
	return charged, doubled
}

// change calls fn with the key's entry.
func (l *Ledger) change(key string, fn func(*entry)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[key]
	if e == nil {
		e = &entry{}
		l.entries[key] = e
	}
	fn(e)
}

// Gateway implements [payments.Gateway].
type Gateway struct {
	Ledger  *Ledger
	Latency time.Duration // of a charge; looking up takes no time

	// Called, if set, by a Charge before the gateway knows of it, and when it is in the ledger and not yet answered; and by a LookUp. What
	// blocks in them plays a process that was paused there, or has died.
	Arrived  func(ctx context.Context, intent payments.Intent)
	Charged  func(ctx context.Context, intent payments.Intent)
	LookedUp func(ctx context.Context, intent payments.Intent)
}

var _ payments.Gateway = (*Gateway)(nil)

// Charge approves whatever it is asked, and books it. It returns [payments.ErrUnclear] when ctx ends before it is booked.
func (g *Gateway) Charge(ctx context.Context, intent payments.Intent) (payments.Outcome, error) {
	if g.Arrived != nil {
		g.Arrived(ctx, intent)
	}
	g.Ledger.change(intent.Key, func(e *entry) { e.working++ })
	var err error
	if g.Latency > 0 {
		timer := time.NewTimer(g.Latency)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-ctx.Done():
			err = fmt.Errorf("%w: %w", payments.ErrUnclear, ctx.Err())
		}
	}
	g.Ledger.change(intent.Key, func(e *entry) {
		e.working--
		if err == nil {
			e.charges++
		}
	})
	if err != nil {
		return payments.Outcome{}, err
	}
	if g.Charged != nil {
		g.Charged(ctx, intent)
	}
	return approved(intent.Key), nil
}

// LookUp says what became of the key: approved, processing, or never seen.
func (g *Gateway) LookUp(ctx context.Context, intent payments.Intent) (payments.Outcome, error) {
	if g.LookedUp != nil {
		g.LookedUp(ctx, intent)
	}
	outcome := payments.Outcome{Status: payments.OutcomeNeverSeen}
	g.Ledger.change(intent.Key, func(e *entry) {
		switch {
		case e.charges > 0:
			outcome = approved(intent.Key)
		case e.working > 0:
			outcome.Status = payments.OutcomeProcessing
		}
	})
	return outcome, nil
}

// Cancel is the reaper's, and no reaper runs in the lab.
func (g *Gateway) Cancel(context.Context, payments.Intent) (payments.Outcome, error) {
	return payments.Outcome{}, fmt.Errorf("%w: the lab's gateway cancels nothing", payments.ErrUnclear)
}

func approved(key string) payments.Outcome {
	return payments.Outcome{Status: payments.OutcomeApproved, Reference: "ch_" + key[:min(len(key), 24)]}
}
