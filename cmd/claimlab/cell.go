package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/idempotency/strategies"
	"example.com/payments/internal/idempotency/strategies/labgateway"
	"example.com/payments/internal/postgres"
)

const (
	// How often the pool is asked how many of its connections are out.
	sampleInterval = 5 * time.Millisecond
	// Enough for a plot as wide as half a page.
	seriesMax = 120
	// Orders that are made for a slice: more than any of the strategies pays in that time. When they are used up, the slice ends early.
	spreadOrdersPerSecond = 6000
	hotOrdersPerSecond    = 2000
	// A connection is warm when it has prepared what winners and losers send. Which one a request gets is chance: of six intents for each, with
	// a claim and a record in each, one connection in two thousand has seen but the one or the other, and prepares what it lacks in the slice.
	warmIntentsPerConnection = 6
	// Of a hot key: all clients but one are losers.
	warmHotIntents = 3
	// And after the vacuum, which lets every plan be made anew.
	rewarmIntentsPerConnection = 2
	rewarmHotIntents           = 2
	// Requests under way at once in an open loop. Beyond this a machine is not being measured any more but flooded.
	inFlightMax = 5000
)

// cell is one thing that is measured: a strategy under a load.
type cell struct {
	Strategy string        `json:"strategy"`
	Shape    string        `json:"shape"`
	Gateway  time.Duration `json:"gateway_ns"`
}

func (c cell) String() string {
	return fmt.Sprintf("%s, %s, gateway %s", c.Strategy, c.Shape, gatewayTime(c.Gateway))
}

// load is what is the same for all cells of a run.
type load struct {
	Clients int           `json:"clients"`
	Pool    int           `json:"pool"`
	Retries float64       `json:"retries"`
	Rate    float64       `json:"rate_per_second"`
	Slice   time.Duration `json:"slice_ns"`
	Rounds  int           `json:"rounds"`
}

// measurement collects a cell's slices.
type measurement struct {
	cell   cell
	kind   strategies.Kind
	load   load
	rounds []round

	claimWinner, claimLoser, whole, acquires histogram
	fates                                    map[fate]int
	fateTimes                                map[fate]histogram
	failures                                 map[string]int // what the failed ones said

	winners, losers         trips
	intents                 int // that were begun
	elapsed                 time.Duration
	heldThere, calls        int
	series                  []connections
	heldSum, heldMax        int
	heldSamples             int
	idleInTransaction       time.Duration
	acquired, emptyAcquires int64
	walBytes                int64
	charged, doubled        int
	deadTuples              int64
	deadIntents             int // those that the dead tuples are of
}

// round is one slice's part of the cell.
type round struct {
	Paid    int     `json:"paid"`
	Seconds float64 `json:"seconds"`
}

// trips are the round trips of requests.
type trips struct{ requests, postgres, redis int }

// connections are those that were out of the pool at a moment.
type connections struct {
	Seconds float64 `json:"s"`
	Held    int32   `json:"held"`
}

func newMeasurement(c cell, kind strategies.Kind, l load) *measurement {
	return &measurement{
		cell: c, kind: kind, load: l,
		claimWinner: newHistogram(), claimLoser: newHistogram(), whole: newHistogram(), acquires: newHistogram(),
		fates: make(map[fate]int), fateTimes: make(map[fate]histogram), failures: make(map[string]int),
	}
}

// slice measures the cell for one slice, in the database at the address.
func (m *measurement) slice(ctx context.Context, l *lab, address string, number int) error {
	conn, err := pgx.Connect(ctx, address)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	orders, err := l.orders(ctx, conn, m.orders())
	if err != nil {
		return err
	}

	tracer, gateway := newTracer(), &tracedGateway{labgateway.Gateway{Ledger: labgateway.NewLedger()}}
	parts, closeParts, err := l.parts(ctx, address, m.load.Pool, gateway, tracer)
	if err != nil {
		return err
	}
	closeParts = sync.OnceFunc(closeParts)
	defer closeParts()
	strategy, err := m.kind.New(parts)
	if err != nil {
		return err
	}
	background, stop := context.WithCancel(context.WithoutCancel(ctx))
	var group sync.WaitGroup
	group.Go(func() { _ = strategy.Run(background) })
	defer group.Wait()
	defer stop()

	warm := func(prefix string, load func(send request) int) {
		orders = orders[load(sender(ctx, strategy, l.merchantID, orders, fmt.Sprintf("%s-%d", prefix, number), func(*trace, idempotency.Answer, error) {})):]
	}
	warm("warm", func(send request) int { return m.warm(ctx, send) })
	// What earlier slices and the warm-up have left behind is not this one's. It is taken away, not only subtracted: pages are pruned in
	// passing, and what the slice prunes of others' would count against what it leaves itself.
	if err := m.tellStatistics(ctx, parts.DB); err != nil {
		return err
	}
	if _, err := conn.Exec(ctx, "VACUUM (ANALYZE) idempotency_keys, payments, orders, events"); err != nil {
		return err
	}
	dead, err := deadTuples(ctx, conn)
	if err != nil {
		return err
	}
	gateway.Ledger = labgateway.NewLedger()
	warm("rewarm", func(send request) int { return m.rewarm(ctx, send) })
	rewarmed, _ := gateway.Ledger.Totals()
	tracer.take()
	gateway.Ledger, gateway.Latency = labgateway.NewLedger(), m.cell.Gateway

	wal, err := walPosition(ctx, conn)
	if err != nil {
		return err
	}
	statBefore := parts.DB.Stat()
	stopSampling := m.sample(parts.DB)
	var mu sync.Mutex
	begin := time.Now()
	sliceCtx, cancel := context.WithTimeout(ctx, m.load.Slice)
	used := m.drive(sliceCtx, strategy, l.merchantID, orders, fmt.Sprintf("slice-%d", number), func(t *trace, answer idempotency.Answer, err error) {
		whole := time.Since(t.due)
		mu.Lock()
		defer mu.Unlock()
		m.record(t, whole, answer, err)
	})
	cancel()
	elapsed := time.Since(begin)
	stopSampling()
	statAfter := parts.DB.Stat()
	walAfter, err := walPosition(ctx, conn)
	if err != nil {
		return err
	}
	stop()
	closeParts() // And so tell the statistics.
	deadAfter, err := l.settledDeadTuples(ctx, conn)
	if err != nil {
		return err
	}

	totals := tracer.take()
	for _, took := range totals.acquires {
		m.acquires.record(took)
	}
	charged, doubled := gateway.Ledger.Totals()
	m.rounds = append(m.rounds, round{Paid: charged, Seconds: elapsed.Seconds()})
	m.intents += used
	m.elapsed += elapsed
	m.idleInTransaction += totals.idleInTransaction
	m.acquired += statAfter.AcquireCount() + statAfter.CanceledAcquireCount() - statBefore.AcquireCount() - statBefore.CanceledAcquireCount()
	m.emptyAcquires += statAfter.EmptyAcquireCount() - statBefore.EmptyAcquireCount()
	m.walBytes += walAfter - wal
	// A session tells its statistics once a second at most, so those of the few intents before the slice cannot be told apart from the slice's.
	m.deadTuples += deadAfter - dead
	m.deadIntents += rewarmed + charged
	m.charged += charged
	m.doubled += doubled
	return ctx.Err()
}

// orders is how many a slice may use, with its warm-up.
func (m *measurement) orders() int {
	perSecond := float64(spreadOrdersPerSecond)
	if m.cell.Shape == shapeHot {
		perSecond = hotOrdersPerSecond
	}
	if m.load.Rate > 0 {
		perSecond = m.load.Rate
	} else if m.cell.Gateway > 0 {
		perSecond = min(perSecond, 2*float64(m.load.Clients)/m.cell.Gateway.Seconds())
	}
	return m.warmIntents() + warmHotIntents + rewarmIntentsPerConnection*m.load.Pool + rewarmHotIntents + int(perSecond*m.load.Slice.Seconds()) + m.load.Clients + 1
}

// warmIntents is never so few that chance has nothing to work with.
func (m *measurement) warmIntents() int { return max(warmIntentsPerConnection*m.load.Pool, 100) }

// warm sends what the slice will send, with nothing recorded and no latency, so that the slow cells are warm as soon as the quick ones; and
// where winners are few, winners first. It returns how many orders were used.
func (m *measurement) warm(ctx context.Context, send request) int {
	losers := func(int) bool { return m.load.Retries > 0 }
	used := spread(ctx, m.load.Clients, m.warmIntents(), losers, send)
	if m.cell.Shape == shapeHot {
		used += hot(ctx, m.load.Clients, warmHotIntents, func(n int, due time.Time) { send(used+n, due) })
	}
	return used
}

// rewarm is the beginning of the slice's own load, likewise.
func (m *measurement) rewarm(ctx context.Context, send request) int {
	if m.cell.Shape == shapeHot {
		return hot(ctx, m.load.Clients, rewarmHotIntents, send)
	}
	return spread(ctx, m.load.Clients, rewarmIntentsPerConnection*m.load.Pool, func(int) bool { return false }, send)
}

// tellStatistics lets every session of the pool tell its statistics, which it else does once a second at most, so that the warm-up's are not
// told in the slice.
func (m *measurement) tellStatistics(ctx context.Context, pool *postgres.Pool) error {
	var all, group sync.WaitGroup
	all.Add(m.load.Pool)
	errs := make([]error, m.load.Pool)
	for i := range errs {
		group.Go(func() {
			here := sync.OnceFunc(all.Done)
			defer here()
			errs[i] = pool.BeginFunc(ctx, func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "SELECT pg_stat_force_next_flush()")
				here()
				all.Wait() // Until then nobody gives a connection back, so each has one of its own.
				return err
			})
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// sender sends the n-th order's intent, with a key that begins with the prefix.
func sender(ctx context.Context, strategy strategies.Strategy, merchantID uuid.UUID, orders []uuid.UUID, prefix string,
	ended func(*trace, idempotency.Answer, error),
) request {
	// The requests outlive the slice: what was begun comes to its end and is measured.
	requests := context.WithoutCancel(ctx)
	return func(n int, due time.Time) {
		t := &trace{due: due}
		req := strategies.NewRequest(merchantID, orders[n], idempotency.Key(fmt.Sprintf("%s-%d", prefix, n)))
		answer, err := strategy.Pay(withTrace(requests, t), req)
		ended(t, answer, err)
	}
}

// drive puts the load on the strategy and returns how many orders were used.
func (m *measurement) drive(ctx context.Context, strategy strategies.Strategy, merchantID uuid.UUID, orders []uuid.UUID, prefix string,
	ended func(*trace, idempotency.Answer, error),
) int {
	send := sender(ctx, strategy, merchantID, orders, prefix, ended)
	again := func(int) bool { return m.load.Retries > 0 && rand.Float64() < m.load.Retries }
	switch {
	case m.load.Rate > 0 && m.cell.Shape == shapeHot:
		return arrivals(ctx, m.load.Rate, m.load.Clients, len(orders), inFlightMax, again, send)
	case m.load.Rate > 0:
		return arrivals(ctx, m.load.Rate, 1, len(orders), inFlightMax, again, send)
	case m.cell.Shape == shapeHot:
		return hot(ctx, m.load.Clients, len(orders), send)
	}
	return spread(ctx, m.load.Clients, len(orders), again, send)
}

// record takes one request into account.
func (m *measurement) record(t *trace, whole time.Duration, answer idempotency.Answer, err error) {
	f := fateOf(answer, err)
	m.fates[f]++
	if _, ok := m.fateTimes[f]; !ok {
		m.fateTimes[f] = newHistogram()
	}
	m.fateTimes[f].record(whole)
	m.whole.record(whole)
	if f == fateFailed {
		m.failures[err.Error()]++
	}
	if t.claimed > 0 { // It came to the gateway.
		m.claimWinner.record(t.claimed)
		m.calls++
		if t.heldThere > 0 {
			m.heldThere++
		}
	} else {
		m.claimLoser.record(whole)
	}
	side := &m.losers
	if f == fatePaid {
		side = &m.winners
	}
	side.requests++
	side.postgres += t.postgres
	side.redis += t.redis
}

// sample watches the pool until the function it returns is called.
func (m *measurement) sample(pool *postgres.Pool) (stop func()) {
	done, ended := make(chan struct{}), make(chan struct{})
	m.series = nil // Of the last slice, which is as good as any.
	begin := time.Now()
	go func() {
		defer close(ended)
		ticker := time.NewTicker(sampleInterval)
		defer ticker.Stop()
		for {
			select {
			case <-done:
				return
			case <-ticker.C:
				held := pool.Stat().AcquiredConns()
				m.heldSum += int(held)
				m.heldMax = max(m.heldMax, int(held))
				m.heldSamples++
				m.series = append(m.series, connections{float64(time.Since(begin).Milliseconds()) / 1000, held})
			}
		}
	}()
	return func() {
		close(done)
		<-ended
		every := len(m.series)/seriesMax + 1
		kept := m.series[:0]
		for i := 0; i < len(m.series); i += every {
			kept = append(kept, m.series[i])
		}
		m.series = slices.Clip(kept)
	}
}

// walPosition is where the server's log ends, in bytes.
func walPosition(ctx context.Context, conn *pgx.Conn) (position int64, err error) {
	err = conn.QueryRow(ctx, "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint").Scan(&position)
	return position, err
}

// deadTuples counts the row versions that vacuum has yet to collect.
func deadTuples(ctx context.Context, conn *pgx.Conn) (n int64, err error) {
	err = conn.QueryRow(ctx, "SELECT coalesce(sum(n_dead_tup), 0)::bigint FROM pg_stat_user_tables").Scan(&n)
	return n, err
}

// settledDeadTuples counts them when the database's other sessions have gone.
func (l *lab) settledDeadTuples(ctx context.Context, conn *pgx.Conn) (int64, error) {
	deadline := time.Now().Add(5 * time.Second)
	for {
		var others int
		err := conn.QueryRow(ctx, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()").Scan(&others)
		if err != nil {
			return 0, err
		}
		if others == 0 {
			return deadTuples(ctx, conn)
		}
		if time.Now().After(deadline) {
			return 0, errors.New("the slice's sessions do not end")
		}
		time.Sleep(5 * time.Millisecond)
	}
}
