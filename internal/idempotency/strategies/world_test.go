package strategies

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"example.com/payments/internal/dbtest"
	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/idempotency/strategies/devredis"
	"example.com/payments/internal/idempotency/strategies/labgateway"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

// ground is a database that has what a kind needs, and a Redis. Any number of worlds share it, each with a merchant of its own.
type ground struct {
	kind        Kind
	databaseURL string
	admin       *pgxpool.Pool // the test's own look at the database
	redisServer *devredis.Server
}

func newGround(t testing.TB, kind Kind) *ground {
	t.Helper()
	return newGroundAt(t, kind, dbtest.New(t), sharedRedis.get(t))
}

func newGroundAt(t testing.TB, kind Kind, databaseURL string, server *devredis.Server) *ground {
	t.Helper()
	g := &ground{kind: kind, databaseURL: databaseURL, admin: dbtest.Pool(t, databaseURL), redisServer: server}
	_, err := g.admin.Exec(t.Context(), kind.Prepare)
	require.NoError(t, err)
	// A payment that the database refuses.
	_, err = g.admin.Exec(t.Context(), `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'refused' USING ERRCODE = 'check_violation';
END
$$;
CREATE TRIGGER refuse BEFORE INSERT ON payments FOR EACH ROW WHEN (NEW.payment_method = '`+refusedByDatabase+`') EXECUTE FUNCTION refuse()`)
	require.NoError(t, err)
	return g
}

const refusedByDatabase = "pm_refused_by_database"

// world is a merchant, and a gateway's ledger. Any number of processes of one kind may live in it.
type world struct {
	*ground
	t          testing.TB
	redis      *redis.Client
	ledger     *labgateway.Ledger
	merchantID uuid.UUID
	processes  atomic.Int32
}

func (g *ground) world(t testing.TB) *world {
	t.Helper()
	w := &world{ground: g, t: t, redis: g.redisServer.Client(), ledger: labgateway.NewLedger(), merchantID: uuid.Must(uuid.NewV7())}
	t.Cleanup(func() { _ = w.redis.Close() })
	_, err := g.admin.Exec(t.Context(), "INSERT INTO merchants (id, name) VALUES ($1, 'lab')", w.merchantID)
	require.NoError(t, err)
	return w
}

// process is one replica: a strategy with connections of its own.
type process struct {
	Strategy
	w        *world
	gateway  *labgateway.Gateway
	db       *postgres.Pool
	renewals *postgres.Pool
	redis    *redis.Client
	name     string
	closed   sync.Once
}

// settings are the service's, but for a lease that no test outlives by accident.
func settings(holder string) payments.Settings {
	return payments.Settings{
		Holder: holder, LeaseTTL: 60 * time.Second, GatewayTimeout: 30 * time.Second, KeyRetention: time.Hour,
		ReapInterval: time.Hour, ReapAfter: 2 * time.Hour,
	}
}

// process starts a replica. Each has its own view of the one gateway, so that one can be stopped in it and another not.
func (w *world) process() *process {
	w.t.Helper()
	return w.processWith(settings("process"))
}

func (w *world) processWith(settings payments.Settings) *process {
	w.t.Helper()
	p := &process{w: w, gateway: &labgateway.Gateway{Ledger: w.ledger}, name: fmt.Sprintf("lab-%s-%d", w.merchantID, w.processes.Add(1))}
	address, err := url.Parse(w.databaseURL)
	require.NoError(w.t, err)
	query := address.Query()
	query.Set("application_name", p.name)
	address.RawQuery = query.Encode()
	open := func(conns int32) *postgres.Pool {
		pool, err := postgres.Open(context.Background(), address.String(), postgres.Options{MaxConns: conns, AcquireTimeout: 20 * time.Second})
		require.NoError(w.t, err)
		return pool
	}
	p.db, p.renewals, p.redis = open(10), open(1), w.redisServer.Client()
	p.Strategy, err = w.kind.New(Parts{
		DB: p.db, Renewals: p.renewals, Redis: p.redis, Gateway: p.gateway, Settings: settings, Log: slog.New(slog.DiscardHandler),
	})
	require.NoError(w.t, err)
	w.t.Cleanup(p.close)
	return p
}

func (p *process) close() {
	p.closed.Do(func() {
		_ = p.redis.Close()
		p.db.Close()
		p.renewals.Close()
	})
}

// kill ends the replica's connections, for good. Whatever it was doing, it does nothing any more that anybody else could see.
func (p *process) kill() {
	p.w.t.Helper()
	go p.close() // It waits for the connections that are in use, and refuses new ones at once.
	for {
		if _, err := p.db.Exec(context.Background(), "SELECT"); err != nil {
			break
		}
	}
	_, err := p.w.admin.Exec(context.Background(), "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1", p.name)
	require.NoError(p.w.t, err)
}

// request is a payment of an order of its own, which is open and of that amount.
func (w *world) request(key string) payments.NewPayment {
	w.t.Helper()
	return w.requestFor(w.order("open"), key)
}

func (w *world) order(status string) uuid.UUID {
	w.t.Helper()
	id := uuid.Must(uuid.NewV7())
	_, err := w.admin.Exec(context.Background(), `INSERT INTO orders (merchant_id, id, status, amount, currency, metadata, created_at)
VALUES ($1, $2, $3, 1999, 'EUR', '{}', now())`, w.merchantID, id, status)
	require.NoError(w.t, err)
	return id
}

func (w *world) requestFor(orderID uuid.UUID, key string) payments.NewPayment {
	return NewRequest(w.merchantID, orderID, idempotency.Key(key))
}

var requestNumber atomic.Int64

// repeat is the same request, sent again.
func repeat(req payments.NewPayment) payments.NewPayment {
	req.Claim.RequestID = fmt.Sprintf("repeat-%d", requestNumber.Add(1))
	return req
}

// endLease moves the end of the key's lease into the past.
func (w *world) endLease(req payments.NewPayment) {
	w.t.Helper()
	if w.kind.Redis {
		require.NoError(w.t, w.redis.Del(context.Background(), redisName(w.merchantID, req.Claim.Key)).Err())
		return
	}
	tag, err := w.admin.Exec(context.Background(), `UPDATE idempotency_keys SET lease_expires_at = now() - interval '1 ms'
WHERE merchant_id = $1 AND key = $2 AND state = 'in_progress'`, w.merchantID, string(req.Claim.Key))
	require.NoError(w.t, err)
	require.EqualValues(w.t, 1, tag.RowsAffected(), "there is a lease to end")
}

// endRetention moves the end of the stored answer's retention into the past. In Redis the entry then expires, which must have been coming.
func (w *world) endRetention(req payments.NewPayment) {
	w.t.Helper()
	if w.kind.Redis {
		left := w.redis.PTTL(context.Background(), redisName(w.merchantID, req.Claim.Key)).Val()
		require.Positive(w.t, left, "the entry does not expire")
		require.LessOrEqual(w.t, left, settings("").KeyRetention)
		require.NoError(w.t, w.redis.Del(context.Background(), redisName(w.merchantID, req.Claim.Key)).Err())
		return
	}
	tag, err := w.admin.Exec(context.Background(), `UPDATE idempotency_keys SET expires_at = now() - interval '1 ms'
WHERE merchant_id = $1 AND key = $2 AND state = 'done'`, w.merchantID, string(req.Claim.Key))
	require.NoError(w.t, err)
	require.EqualValues(w.t, 1, tag.RowsAffected(), "there is a retention to end")
}

func (w *world) charges(req payments.NewPayment) int {
	return w.ledger.Charges(payments.GatewayKey(payments.IntentCharge, w.merchantID, string(req.Claim.Key)))
}

// payments counts the merchant's payments with the status.
func (w *world) payments(status string) (n int) {
	w.t.Helper()
	err := w.admin.QueryRow(context.Background(), "SELECT count(*) FROM payments WHERE merchant_id = $1 AND status = $2", w.merchantID, status).Scan(&n)
	require.NoError(w.t, err)
	return n
}

// versions tells whether any of the merchant's payments has been written to.
func (w *world) versions() (n int) {
	w.t.Helper()
	err := w.admin.QueryRow(context.Background(), "SELECT coalesce(sum(xmin::text::bigint), 0) FROM payments WHERE merchant_id = $1", w.merchantID).Scan(&n)
	require.NoError(w.t, err)
	return n
}

// paid is what one Pay has ended with.
type paid struct {
	answer idempotency.Answer
	err    error
}

// pays are those under way. One whose process has died, as far as a test can have a process die, goes on for some seconds and changes
// nothing; TestMain waits for it.
var pays sync.WaitGroup

// start starts a Pay.
func (p *process) start(req payments.NewPayment) chan paid {
	ended := make(chan paid, 1)
	pays.Go(func() {
		answer, err := p.Pay(context.Background(), req)
		ended <- paid{answer, err}
	})
	return ended
}

// gate is where something stands until it is let through.
type gate struct {
	reached chan struct{}
	open    chan struct{}
	once    sync.Once
}

func newGate(t testing.TB) *gate {
	g := &gate{reached: make(chan struct{}, 100), open: make(chan struct{})}
	t.Cleanup(g.pass)
	return g
}

func (g *gate) pass() { g.once.Do(func() { close(g.open) }) }

// stop is for the hooks of a gateway.
func (g *gate) stop(context.Context, payments.Intent) {
	g.reached <- struct{}{}
	<-g.open
}

// await fails the test when nobody reaches the gate.
func (g *gate) await(t testing.TB) {
	t.Helper()
	select {
	case <-g.reached:
	case <-time.After(20 * time.Second):
		t.Fatal("nobody has reached the gate")
	}
}

// wait returns how a Pay has ended.
func wait(t testing.TB, ended <-chan paid) paid {
	t.Helper()
	select {
	case p := <-ended:
		return p
	case <-time.After(40 * time.Second):
		t.Fatal("the payment does not end")
		return paid{}
	}
}
