package chaos

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// Cell is one fault at one point of one payment, with a client that comes back or one that does not.
type Cell struct {
	Fault   string
	Point   string
	Returns bool
}

// CellResult is what the rounds of a cell have shown.
type CellResult struct {
	Cell
	Left       map[string]int // what the fault left behind: key, payment, charges
	Enders     map[string]int
	Endings    map[string]int // payment and charges at the end
	Waits      []time.Duration
	Violations []Violation
}

// point is a place in the life of a payment at which a fault can strike.
type point struct {
	name string
	// reach brings the payment there, and returns the replica that has it and what lets it go on.
	reach func(ctx context.Context, w *World, o *operation, start func()) (victim *replica, release func(), err error)
}

const (
	claiming = "claim under way"
	claimed  = "claimed, not charged"
	charged  = "charged, not recorded"
	recorded = "recorded, not answered"
	canceled = "canceled for the reaper, not recorded"
	victimIs = 0 // the replica that takes the payment
)

var points = []point{
	{claiming, func(ctx context.Context, w *World, o *operation, start func()) (*replica, func(), error) {
		pool := w.database.current()
		tx, err := pool.Begin(ctx)
		if err != nil {
			return nil, nil, err
		}
		if _, err := tx.Exec(ctx, "SELECT FROM orders WHERE id = $1 FOR UPDATE", o.orderID); err != nil {
			return nil, nil, err
		}
		start()
		err = w.lockWaits(ctx, 1)
		return w.replicas[victimIs], func() { _ = tx.Rollback(ctx) }, err // That it is gone with its server is as good.
	}},
	{claimed, reachDoor(beforeCharge)},
	{charged, reachDoor(afterCharge)},
	{recorded, func(ctx context.Context, w *World, o *operation, start func()) (*replica, func(), error) {
		victim, release, err := reachDoor(afterCharge)(ctx, w, o, start)
		if err != nil {
			return nil, nil, err
		}
		// The record waits for the payment's row until nothing comes back from the database any more. Then it commits.
		tx, err := w.database.current().Begin(ctx)
		if err != nil {
			return nil, nil, err
		}
		defer func() { _ = tx.Rollback(ctx) }()
		if _, err := tx.Exec(ctx, "SELECT FROM payments WHERE order_id = $1 FOR UPDATE", o.orderID); err != nil {
			return nil, nil, err
		}
		release()
		if err := w.lockWaits(ctx, 1); err != nil {
			return nil, nil, err
		}
		if err := victim.toDB.swallow("downstream"); err != nil {
			return nil, nil, err
		}
		if err := tx.Rollback(ctx); err != nil {
			return nil, nil, err
		}
		err = eventually(ctx, "the record has committed", func() bool {
			s, err := w.state(ctx, o)
			return err == nil && s.key == "done"
		})
		return victim, func() { _ = victim.toDB.mend() }, err
	}},
	{canceled, func(ctx context.Context, w *World, o *operation, start func()) (*replica, func(), error) {
		d, err := w.canceledByReaper(ctx, o, w.replicas[victimIs], start)
		if err != nil {
			return nil, nil, err
		}
		return w.replicas[d.by], d.open, nil
	}},
}

func reachDoor(at moment) func(context.Context, *World, *operation, func()) (*replica, func(), error) {
	return func(ctx context.Context, w *World, o *operation, start func()) (*replica, func(), error) {
		d := w.gateway.shut(victimIs, at, w.gatewayKey(o))
		start()
		return w.replicas[victimIs], d.open, await(d.reached, fmt.Sprintf("a request has come to %q", at))
	}
}

// Cells is the matrix. A claim that is under way, a record that is not answered and a cancel that is not recorded are points for
// those faults that end a process or its way to the database; for the others they say nothing that the two in the middle do not.
func Cells(w *World) (cells []Cell) {
	for _, f := range Faults {
		switch {
		case f.needs != nil && !f.needs(w), f.Name == "kill -9 before the charge", f.Name == "kill -9 after the charge",
			f.Name == "SIGSTOP after the charge", f.Name == "kill -9 after the reaper's cancel":
			continue
		}
		for _, p := range points {
			switch f.Name {
			case "kill -9", "SIGTERM", "SIGSTOP, SIGCONT", "PostgreSQL stopped fast", "PostgreSQL stopped immediate", "pg_terminate_backend", "database cut off":
			default:
				if p.name == claiming || p.name == recorded || p.name == canceled {
					continue
				}
			}
			cells = append(cells, Cell{f.Name, p.name, true})
			if p.name == claimed || p.name == charged || p.name == canceled {
				cells = append(cells, Cell{f.Name, p.name, false})
			}
		}
	}
	return cells
}

// state is what the database and the ledger have on an operation.
type state struct {
	key, payment, ender string
	charges             int
}

func (s state) String() string {
	if s.key == "" {
		return fmt.Sprintf("nothing, %s", chargesText(s.charges))
	}
	return fmt.Sprintf("key %s, payment %s, %s", s.key, s.payment, chargesText(s.charges))
}

func chargesText(n int) string {
	switch n {
	case 0:
		return "no charge"
	case 1:
		return "1 charge"
	}
	return strconv.Itoa(n) + " charges"
}

func (w *World) state(ctx context.Context, o *operation) (s state, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	rows, err := w.database.current().Query(ctx, `SELECT k.state, p.status, `+whoEnded+`
		FROM idempotency_keys k JOIN payments p ON p.id = k.resource_id WHERE k.key = $1`, o.key)
	if err != nil {
		return s, err
	}
	defer rows.Close()
	for rows.Next() {
		if err := rows.Scan(&s.key, &s.payment, &s.ender); err != nil {
			return s, err
		}
	}
	return s, rows.Err()
}

// RunCells runs every cell, some worlds side by side, and checks the invariants of each world.
func RunCells(ctx context.Context, options Options, rounds int, log io.Writer) ([]CellResult, error) {
	const worlds = 4 // A cell mostly waits.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		mu      sync.Mutex
		results []CellResult
		next    int
		all     sync.WaitGroup
	)
	for n := range worlds {
		w, err := NewWorld(ctx, options)
		if err != nil {
			cancel(err)
			break
		}
		if n == 0 {
			for _, c := range Cells(w) {
				results = append(results, CellResult{Cell: c, Left: map[string]int{}, Enders: map[string]int{}, Endings: map[string]int{}})
			}
		}
		b := &book{}
		w.gateway.always = true
		all.Go(func() {
			defer w.Close()
			for ctx.Err() == nil {
				mu.Lock()
				i := next
				next++
				mu.Unlock()
				if i >= len(results) {
					break
				}
				r := &results[i]
				for range rounds {
					if err := w.cell(ctx, b, r); err != nil {
						cancel(fmt.Errorf("%s, %s: %w", r.Fault, r.Point, err))
						return
					}
				}
				fmt.Fprintf(log, "%3d/%d %s, %s, client returns %t: %v, ended by %v, %v\n", i+1, len(results), r.Fault, r.Point, r.Returns, r.Left, r.Enders, r.Endings)
			}
			if ctx.Err() != nil {
				return
			}
			violations, err := w.Check(ctx, b)
			if err != nil {
				cancel(err)
			}
			mu.Lock()
			defer mu.Unlock()
			results[len(results)-1].Violations = append(results[len(results)-1].Violations, violations...)
		})
	}
	all.Wait()
	return results, context.Cause(ctx)
}

// cell runs one round.
func (w *World) cell(ctx context.Context, b *book, r *CellResult) error {
	order, err := w.newOrder(ctx, b)
	if err != nil {
		return err
	}
	o := b.payment(order.answer().resource, 1999, "pm_ok")
	o.leaves = !r.Returns
	var p point
	for _, candidate := range points {
		if candidate.name == r.Point {
			p = candidate
		}
	}
	first, leave := context.WithCancel(ctx)
	defer leave()
	firstCall := make(chan struct{})
	var struck atomic.Bool
	victim, release, err := p.reach(ctx, w, o, func() {
		o.started = time.Now()
		go func() {
			defer close(firstCall)
			for range 20 {
				// What the round before has broken is not this one's fault: a pooled connection is found dead by using it.
				if c := w.send(first, o, victimIs, ""); c.slug != "storage-unavailable" || c.resource != "" || struck.Load() {
					return
				}
			}
		}()
	})
	if err != nil {
		return err
	}
	struck.Store(true)
	fault := w.fault(r.Fault)
	mend, err := fault.begin(ctx, w, victim)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	release()
	time.Sleep(100 * time.Millisecond)
	// What the database has to say while it is down is what it says when it is back.
	charges := func() int {
		n, err := w.gateway.charges(ctx, w.gatewayKey(o))
		if err != nil {
			return -1
		}
		return n
	}
	left, leftErr := w.state(ctx, o)
	left.charges = charges()
	if !r.Returns {
		leave()
	}
	returned := make(chan struct{})
	limited, giveUp := context.WithTimeout(ctx, 2*patience)
	defer giveUp()
	go func() {
		defer close(returned)
		if !r.Returns {
			return
		}
		// The client waits for a second, hangs up, and comes back.
		select {
		case <-firstCall:
		case <-time.After(time.Second):
		}
		if o.answer() == nil {
			w.complete(limited, o, anyRandom())
		}
	}()
	lasts := 500 * time.Millisecond
	if fault.holds {
		lasts = w.Settings.LeaseTTL + time.Second
	}
	time.Sleep(lasts)
	if err := mend(); err != nil {
		return fmt.Errorf("mend: %w", err)
	}
	if leftErr != nil {
		found := left.charges
		if left, leftErr = w.state(ctx, o); leftErr != nil {
			return leftErr
		}
		left.charges = found
	}
	if left.charges < 0 {
		left.charges = charges()
	}
	if err := w.awaitUp(ctx); err != nil {
		return err
	}
	up := time.Now()
	if r.Returns {
		<-returned
		if o.answer() == nil {
			return fmt.Errorf("no final answer: %v", o.calls)
		}
		r.Waits = append(r.Waits, max(o.ended.Sub(up), 0))
	} else {
		<-firstCall
		err := eventually(ctx, "the payment has ended", func() bool {
			s, err := w.state(ctx, o)
			return err == nil && (s.key == "" || s.key != "in_progress")
		})
		if err != nil {
			return err
		}
		r.Waits = append(r.Waits, time.Since(up))
	}
	end, err := w.state(ctx, o)
	if err != nil {
		return err
	}
	end.charges = charges()
	r.Left[left.String()]++
	if end.key == "" {
		end.ender = "nobody"
	}
	r.Enders[end.ender]++
	r.Endings[fmt.Sprintf("%s, %s", end.payment, chargesText(end.charges))]++
	if want := map[bool]int{true: 1}[end.payment == "succeeded"]; end.charges != want {
		r.Violations = append(r.Violations, Violation(fmt.Sprintf("%s ended as %s", o.key, end)))
	}
	victim.clock = 0
	return nil
}

// lockWaits waits until so many sessions of the service wait for a lock.
func (w *World) lockWaits(ctx context.Context, sessions int) error {
	return eventually(ctx, fmt.Sprintf("%d sessions wait for a lock", sessions), func() bool {
		var n int
		err := w.database.current().QueryRow(ctx, `
			SELECT count(*) FROM pg_stat_activity WHERE application_name = 'payments' AND wait_event_type = 'Lock'`).Scan(&n)
		return err == nil && n >= sessions
	})
}

func eventually(ctx context.Context, what string, holds func() bool) error {
	for deadline := time.Now().Add(patience); !holds(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) || ctx.Err() != nil {
			return fmt.Errorf("waited in vain until %s", what)
		}
	}
	return nil
}
