package main

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"example.com/payments/internal/idempotency/strategies/labgateway"
	"example.com/payments/internal/payments"
)

// trace is what one request has done. Only the request's own goroutine writes to it.
type trace struct {
	due       time.Time     // when it should have begun; in a closed loop, when it did
	claimed   time.Duration // from due to the call of the gateway; 0 if it did not come to that
	postgres  int           // round trips that it waited for, whatever they were for
	redis     int
	held      int // connections held now
	heldThere int // connections held when the gateway was called
}

type traceKey struct{}

func withTrace(ctx context.Context, t *trace) context.Context {
	return context.WithValue(ctx, traceKey{}, t)
}

// traceOf returns the request's trace, or one that nobody reads.
func traceOf(ctx context.Context) *trace {
	if t, ok := ctx.Value(traceKey{}).(*trace); ok {
		return t
	}
	return &trace{}
}

// tracer counts the exchanges of a pool and of a Redis client, and adds up the time in which a transaction was open and nothing was asked
// of it.
//
// The exchanges with PostgreSQL are counted on the wire, because what pgx does of its own accord is in no query's trace: it prepares a
// statement before it first sends it on a connection, and when one has ended in an error it closes it before whatever comes next there, and
// prepares it anew. Whoever has the connection then waits for that, so it is counted to that request, whoever's error it was.
type tracer struct {
	mu     sync.Mutex
	owner  map[*pgx.Conn]tenancy   // who has the connection
	idle   map[*pgx.Conn]time.Time // since when it has stood idle in a transaction
	totals traceTotals
}

// tenancy is the time for which a request has a connection.
type tenancy struct {
	request *trace
	before  int64 // exchanges on the connection, until then
}

type traceTotals struct {
	idleInTransaction time.Duration
	acquires          []time.Duration // how long each took
}

func newTracer() *tracer {
	return &tracer{owner: make(map[*pgx.Conn]tenancy), idle: make(map[*pgx.Conn]time.Time)}
}

// take returns what has been added up, and begins anew.
func (t *tracer) take() traceTotals {
	t.mu.Lock()
	defer t.mu.Unlock()
	totals := t.totals
	t.totals = traceTotals{}
	return totals
}

// TraceConnectStart implements [pgx.ConnectTracer]. It is the one place in which the lab comes by the service's own connections.
func (t *tracer) TraceConnectStart(ctx context.Context, data pgx.TraceConnectStartData) context.Context {
	data.ConnConfig.AfterNetConnect = func(_ context.Context, _ *pgconn.Config, conn net.Conn) (net.Conn, error) {
		return &countingConn{Conn: conn}, nil
	}
	return ctx
}

func (t *tracer) TraceConnectEnd(context.Context, pgx.TraceConnectEndData) {}

// countingConn counts exchanges: something was written, and then something was read.
type countingConn struct {
	net.Conn
	asked     atomic.Bool
	exchanges atomic.Int64
}

func (c *countingConn) Write(b []byte) (int, error) {
	c.asked.Store(true)
	return c.Conn.Write(b)
}

func (c *countingConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 && c.asked.CompareAndSwap(true, false) {
		c.exchanges.Add(1)
	}
	return n, err
}

// exchanges is how many there have been on a connection that the tracer has seen opened.
func exchanges(conn *pgx.Conn) int64 { return conn.PgConn().Conn().(*countingConn).exchanges.Load() }

// TraceQueryStart implements [pgx.QueryTracer]. BEGIN and COMMIT are queries like any other.
func (t *tracer) TraceQueryStart(ctx context.Context, conn *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.endIdle(conn)
	return ctx
}

func (t *tracer) TraceQueryEnd(_ context.Context, conn *pgx.Conn, _ pgx.TraceQueryEndData) {
	if conn.IsClosed() || conn.PgConn().TxStatus() == 'I' {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.idle[conn] = time.Now()
}

// endIdle adds the connection's idle time up.
func (t *tracer) endIdle(conn *pgx.Conn) {
	if since, ok := t.idle[conn]; ok {
		t.totals.idleInTransaction += time.Since(since)
		delete(t.idle, conn)
	}
}

type acquireKey struct{}

// TraceAcquireStart implements [pgxpool.AcquireTracer].
func (t *tracer) TraceAcquireStart(ctx context.Context, _ *pgxpool.Pool, _ pgxpool.TraceAcquireStartData) context.Context {
	return context.WithValue(ctx, acquireKey{}, time.Now())
}

func (t *tracer) TraceAcquireEnd(ctx context.Context, _ *pgxpool.Pool, data pgxpool.TraceAcquireEndData) {
	took := time.Since(ctx.Value(acquireKey{}).(time.Time))
	request := traceOf(ctx)
	if data.Err == nil {
		request.held++
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.totals.acquires = append(t.totals.acquires, took)
	if data.Err == nil {
		t.owner[data.Conn] = tenancy{request, exchanges(data.Conn)}
	}
}

// TraceRelease implements [pgxpool.ReleaseTracer].
func (t *tracer) TraceRelease(_ *pgxpool.Pool, data pgxpool.TraceReleaseData) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.endIdle(data.Conn)
	if had, ok := t.owner[data.Conn]; ok {
		had.request.held--
		had.request.postgres += int(exchanges(data.Conn) - had.before)
		delete(t.owner, data.Conn)
	}
}

// DialHook implements [redis.Hook].
func (t *tracer) DialHook(next redis.DialHook) redis.DialHook {
	return func(ctx context.Context, network, addr string) (net.Conn, error) { return next(ctx, network, addr) }
}

func (t *tracer) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		traceOf(ctx).redis++
		return next(ctx, cmd)
	}
}

// ProcessPipelineHook counts a pipeline as one round trip, which it is.
func (t *tracer) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		traceOf(ctx).redis++
		return next(ctx, cmds)
	}
}

// tracedGateway marks in the request's trace where the claim ends: at the first call of the gateway.
type tracedGateway struct {
	labgateway.Gateway
}

func (g *tracedGateway) Charge(ctx context.Context, intent payments.Intent) (payments.Outcome, error) {
	t := traceOf(ctx)
	if t.claimed == 0 {
		t.claimed, t.heldThere = time.Since(t.due), t.held
	}
	return g.Gateway.Charge(ctx, intent)
}
