package servicetest

import (
	"context"
	"maps"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/postgres"
)

// Queries is what a replica says to its database. It is the tracer of the replica's connections; statements go by the names that they
// have in db/queries, and begin and commit by their own.
type Queries struct {
	t testing.TB

	mu     sync.Mutex
	counts map[string]int
	ended  map[string]int
	sql    map[string]string
	args   map[string][]any
	hooks  map[string][]*hook
	holds  []func()
}

type hook struct {
	times int
	run   func(*pgx.Conn)
}

func newQueries(t testing.TB) *Queries {
	return &Queries{t: t, counts: map[string]int{}, ended: map[string]int{}, sql: map[string]string{}, args: map[string][]any{}, hooks: map[string][]*hook{}}
}

// TraceQueryStart implements [pgx.QueryTracer].
func (q *Queries) TraceQueryStart(ctx context.Context, conn *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	name := postgres.StatementName(data.SQL)
	var run []func(*pgx.Conn)
	q.mu.Lock()
	q.counts[name]++
	q.sql[name], q.args[name] = data.SQL, data.Args
	for _, h := range q.hooks[name] {
		if h.times > 0 {
			h.times--
			run = append(run, h.run)
		}
	}
	q.mu.Unlock()
	for _, f := range run {
		f(conn)
	}
	return context.WithValue(ctx, nameKey{}, name)
}

type nameKey struct{}

// TraceQueryEnd implements [pgx.QueryTracer].
func (q *Queries) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.ended[ctx.Value(nameKey{}).(string)]++
}

// Ended tells how often a statement has been answered.
func (q *Queries) Ended(name string) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.ended[name]
}

// Before runs f before the next statements of a name, times of them.
func (q *Queries) Before(name string, times int, f func(*pgx.Conn)) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.hooks[name] = append(q.hooks[name], &hook{times: times, run: f})
}

// HoldBefore keeps the next statements of a name, times of them, from being sent. Their connections are held with them.
func (q *Queries) HoldBefore(name string, times int) *Hold {
	h := &Hold{t: q.t, arrived: make(chan struct{}, Always>>10), free: make(chan struct{})}
	h.release = sync.OnceFunc(func() { close(h.free) })
	q.Before(name, times, func(*pgx.Conn) {
		h.arrived <- struct{}{}
		<-h.free
	})
	q.mu.Lock()
	defer q.mu.Unlock()
	q.holds = append(q.holds, h.release)
	return h
}

func (q *Queries) letGo() {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, release := range q.holds {
		release()
	}
}

// Count tells how often a statement was sent.
func (q *Queries) Count(name string) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.counts[name]
}

// Since begins to count anew and returns what was counted so far.
func (q *Queries) Since() map[string]int {
	q.mu.Lock()
	defer q.mu.Unlock()
	counts := q.counts
	q.counts = map[string]int{}
	return counts
}

// SQL is the text of every statement that was sent, by name.
func (q *Queries) SQL() map[string]string {
	q.mu.Lock()
	defer q.mu.Unlock()
	texts := make(map[string]string, len(q.sql))
	maps.Copy(texts, q.sql)
	return texts
}

// Args are the values with which a statement was sent last.
func (q *Queries) Args(name string) []any {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.args[name]
}
