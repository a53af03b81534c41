package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// Cell is one fault at one point of one payment, or refund, with a client that comes back or one that does not.
type Cell struct {
	Fault   string
	Point   string
	Refund  bool
	Returns bool
}

func (c Cell) String() string { return fmt.Sprintf("%s, %s, client %s", c.Fault, c.at(), c.client()) }

func (c Cell) at() string {
	if c.Refund {
		return "refund " + c.Point
	}
	return c.Point
}

func (c Cell) client() string {
	if c.Returns {
		return "returns"
	}
	return "is gone"
}

// CellResult is what the rounds of a cell have shown.
type CellResult struct {
	Cell
	Left       map[string]int // what the fault left behind: key, payment, what the ledger has more than before
	Enders     map[string]int
	Endings    map[string]int // the same at the end, without the key
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

// refundFaults are those that a refund meets in the matrix too: a refund takes the payment's walk, so one of each sort will do.
var refundFaults = []string{
	"kill -9", "SIGSTOP, SIGCONT", "PostgreSQL stopped immediate", "database cut off", "gateway: cut after", "gateway: hang before",
}

// Cells is the matrix. A claim that is under way, a record that is not answered and a cancel that is not recorded are points for those
// faults that end a process or its way to the database; for the others they say nothing that the two in the middle do not. One more has a
// claim to spoil: when the database's answers are lost, it is written and its process does not know. (A record without its answer is a point
// of its own.)
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
			case "database's answers lost":
				if p.name == recorded {
					continue
				}
			default:
				if p.name == claiming || p.name == recorded || p.name == canceled {
					continue
				}
			}
			for _, refund := range []bool{false, true} {
				if refund && (p.name != claimed && p.name != charged || !slices.Contains(refundFaults, f.Name)) {
					continue
				}
				cells = append(cells, Cell{f.Name, p.name, refund, true})
				if p.name == claimed || p.name == charged || p.name == canceled {
					cells = append(cells, Cell{f.Name, p.name, refund, false})
				}
			}
		}
	}
	return cells
}

// state is what the database and the ledger have on an operation.
type state struct {
	kind            string // "charge", "refund"
	key, row, ender string
	moved           int // charges, or refunds, that the ledger has more than before
}

func (s state) String() string {
	if s.key == "" {
		return "nothing, " + s.money()
	}
	return fmt.Sprintf("key %s, %s %s, %s", s.key, map[string]string{"charge": "payment", "refund": "refund"}[s.kind], s.row, s.money())
}

func (s state) money() string {
	switch s.moved {
	case 0:
		return "no " + s.kind
	case 1:
		return "1 " + s.kind
	}
	return fmt.Sprintf("%d %ss", s.moved, s.kind)
}

func (s state) ending() string {
	if s.key == "" {
		return s.String()
	}
	return s.row + ", " + s.money()
}

// state has what the database has, and no count.
func (w *World) state(ctx context.Context, o *operation) (s state, err error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	s.kind = o.ledgerKind()
	err = w.database.current().QueryRow(ctx, `SELECT k.state, coalesce(p.status, r.status), `+whoEnded+` FROM idempotency_keys k
		LEFT JOIN payments p ON p.id = k.resource_id LEFT JOIN refunds r ON r.id = k.resource_id WHERE k.key = $1`, o.key).
		Scan(&s.key, &s.row, &s.ender)
	if errors.Is(err, pgx.ErrNoRows) {
		s.ender, err = "nobody", nil
	}
	return s, err
}

// Matrix is what the cells have shown.
type Matrix struct {
	Rounds     int
	Cells      []CellResult
	PostgreSQL string // its version
	Violations []Violation
	Slow       []string // cells in which a client, or a payment that is left alone, has waited for longer than it may
}

// RunCells runs those cells that are chosen, some worlds side by side, and checks the invariants of each world.
func RunCells(ctx context.Context, options Options, rounds int, chosen func(Cell) bool, log io.Writer) (*Matrix, error) {
	const worlds = 4 // A cell mostly waits.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var (
		mu   sync.Mutex
		next int
		all  sync.WaitGroup
	)
	m := &Matrix{Rounds: rounds}
	for n := range worlds {
		w, err := NewWorld(ctx, options)
		if err != nil {
			cancel(err)
			break
		}
		if n == 0 {
			for _, c := range Cells(w) {
				if chosen(c) {
					m.Cells = append(m.Cells, CellResult{Cell: c, Left: map[string]int{}, Enders: map[string]int{}, Endings: map[string]int{}})
				}
			}
			if m.PostgreSQL, err = w.postgreSQL(ctx); err != nil {
				cancel(err)
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
				if i >= len(m.Cells) {
					break
				}
				r := &m.Cells[i]
				for range rounds {
					if err := w.cell(ctx, b, r); err != nil {
						cancel(fmt.Errorf("%s: %w", r.Cell, err))
						return
					}
				}
				fmt.Fprintf(log, "%3d/%d %s: %v, ended by %v, %v\n", i+1, len(m.Cells), r.Cell, r.Left, r.Enders, r.Endings)
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
			m.Violations = append(m.Violations, violations...)
		})
	}
	all.Wait()
	for _, c := range m.Cells {
		m.Violations = append(m.Violations, c.Violations...)
		limit := options.Settings.Quiet()
		if c.Returns {
			limit = options.Settings.Bound()
		}
		if slowest := (&Recovery{Waits: c.Waits}).Max(); slowest > limit {
			m.Slow = append(m.Slow, fmt.Sprintf("%s: %s of %s", c.Cell, seconds(slowest), seconds(limit)))
		}
	}
	return m, context.Cause(ctx)
}

// round is one payment, or refund, of a cell.
type round struct {
	*World
	Cell
	o      *operation
	before int           // how many charges, or refunds, the ledger had before it
	first  chan struct{} // closed when its first request is over
	leave  func()        // ends that request
}

// cell runs one round.
func (w *World) cell(ctx context.Context, b *book, r *CellResult) error {
	fault, err := w.fault(r.Fault)
	if err != nil {
		return err
	}
	c, err := w.newRound(ctx, b, r.Cell)
	if err != nil {
		return err
	}
	w.down()
	victim, release, err := c.reach(ctx)
	if err != nil {
		return err
	}
	defer c.leave()
	mend, err := fault.begin(ctx, w, victim)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	release()
	time.Sleep(100 * time.Millisecond)
	left, leftErr := c.look(ctx)
	when := ""
	returned := c.comeBack(ctx)
	lasts := 500 * time.Millisecond
	if fault.holds {
		lasts = w.Settings.LeaseTTL + time.Second
	}
	time.Sleep(lasts)
	if err := mend(); err != nil {
		return fmt.Errorf("mend: %w", err)
	}
	if leftErr != nil { // A database that is down says nothing. By the time it is back, clients and reaper are as well.
		if left, err = c.look(ctx); err != nil {
			return err
		}
		when = "once it could be asked: "
	}
	if err := w.awaitUp(ctx); err != nil {
		return err
	}
	up := time.Now()
	<-returned
	<-c.first
	if err := c.awaitEnd(ctx); err != nil {
		r.Violations = append(r.Violations, Violation(fmt.Sprintf("every payment ends: %s: %v", r.Cell, err)))
	}
	ended := time.Now()
	if r.Returns && c.o.answer() != nil {
		ended = c.o.ended
	}
	r.Waits = append(r.Waits, max(ended.Sub(up), 0))
	end, err := c.look(ctx)
	if err != nil {
		return err
	}
	r.Left[when+left.String()]++
	r.Enders[end.ender]++
	r.Endings[end.ending()]++
	if want := map[bool]int{true: 1}[end.row == "succeeded"]; end.moved != want {
		r.Violations = append(r.Violations, Violation(fmt.Sprintf("money moves once, or not at all: %s, %s ended as %s", r.Cell, c.o.key, end)))
	}
	return nil
}

// newRound has the order, and for a refund the payment, that the round is about.
func (w *World) newRound(ctx context.Context, b *book, cell Cell) (c *round, err error) {
	c = &round{World: w, Cell: cell, first: make(chan struct{})}
	if cell.Refund {
		payment, err := w.newPayment(ctx, b)
		if err != nil {
			return nil, err
		}
		c.o = b.refund(payment, payment.amount/2)
	} else {
		order, err := w.newOrder(ctx, b)
		if err != nil {
			return nil, err
		}
		c.o = b.payment(order, "pm_ok")
	}
	c.o.leaves = !cell.Returns
	c.before, err = w.gateway.approved(c.o.ledgerKind())
	return c, err
}

// reach sends the first request and takes it to the cell's point.
func (c *round) reach(ctx context.Context) (victim *replica, release func(), err error) {
	at := slices.IndexFunc(points, func(p point) bool { return p.name == c.Point })
	var there atomic.Bool
	var first context.Context
	first, c.leave = context.WithCancel(ctx)
	victim, release, err = points[at].reach(ctx, c.World, c.o, func() {
		c.o.started = time.Now()
		go func() {
			defer close(c.first)
			for range 20 {
				// What the round before has broken is not this one's fault: a pooled connection is found dead by using it.
				if call := c.send(first, c.o, victimIs, ""); call.slug != "storage-unavailable" || call.resource != "" || there.Load() {
					return
				}
			}
		}()
	})
	there.Store(true)
	return victim, release, err
}

// look takes key and money at one moment: nothing was charged or given back between the two.
func (c *round) look(ctx context.Context) (s state, err error) {
	for {
		before, err := c.gateway.approved(c.o.ledgerKind())
		if err != nil {
			return s, err
		}
		if s, err = c.state(ctx, c.o); err != nil {
			return s, err
		}
		after, err := c.gateway.approved(c.o.ledgerKind())
		if err != nil || before == after {
			s.moved = after - c.before
			return s, err
		}
	}
}

// comeBack does what the client does: it leaves, or it waits for a second, hangs up, and repeats its request. The channel is closed when it
// has its answer, or none in all the time there is.
func (c *round) comeBack(ctx context.Context) (returned chan struct{}) {
	returned = make(chan struct{})
	if !c.Returns {
		c.leave()
		close(returned)
		return returned
	}
	go func() {
		defer close(returned)
		limited, giveUp := context.WithTimeout(ctx, 2*patience)
		defer giveUp()
		select {
		case <-c.first:
		case <-time.After(time.Second):
			c.leave()
		}
		if c.o.answer() == nil {
			c.complete(limited, c.o, anyRandom())
		}
	}()
	return returned
}

// awaitEnd waits until the key is final, or was never claimed.
func (c *round) awaitEnd(ctx context.Context) error {
	return eventually(ctx, "the key is final", func() bool {
		s, err := c.state(ctx, c.o)
		return err == nil && s.key != "in_progress"
	})
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
