package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/idempotency/strategies"
	"example.com/payments/internal/idempotency/strategies/labgateway"
	"example.com/payments/internal/payments"
)

// slowGateway is what a real processor takes on an ordinary day.
const slowGateway = 800 * time.Millisecond

// breakage is a failure that can be reproduced.
type breakage struct {
	Name  string
	Title string
	run   func(ctx context.Context, b *bench) error
}

// breakages are in the order in which one would meet them.
var breakages = []breakage{
	{"double-click", "Two clicks at once, through check-then-act", doubleClick},
	{"pool-drained", "A lock that is held over a gateway of 800 ms", poolDrained},
	{"claim-last", "Losers queue behind a claim that is made last", claimLast},
	{"ttl-too-short", "A TTL in Redis that is shorter than the work", ttlTooShort},
	{"killed-before-write", "A process is killed between its claim in Redis and its write", killedBeforeWrite},
	{"redis-restart", "Redis restarts and comes back empty", redisRestart},
	{"other-body", "The same key, another body", otherBody},
	{"empty-read-back", "ON CONFLICT DO NOTHING, and nothing to read either", emptyReadBack},
	{"hash-collision", "A lock by a hash of 32 bits makes strangers wait", hashCollision},
}

type breakCommand struct {
	DatabaseURL string `name:"database-url" env:"DATABASE_URL" help:"Break on this PostgreSQL, by a role that may create databases; else on one of the lab's own."`
	Case        string `arg:"" optional:"" help:"Which; all of them with \"all\", and a list without."`
}

// Run reproduces failures. It ends with an error when one could not be reproduced: then what it teaches is not so on this machine.
func (c *breakCommand) Run(ctx context.Context, out output) (err error) {
	if c.Case == "" {
		fmt.Fprintln(out.stdout, "claimlab break CASE, one of:")
		for _, b := range breakages {
			fmt.Fprintf(out.stdout, "  %-20s %s\n", b.Name, b.Title)
		}
		fmt.Fprintln(out.stdout, "  all")
		return nil
	}
	var chosen []breakage
	for _, b := range breakages {
		if c.Case == b.Name || c.Case == "all" {
			chosen = append(chosen, b)
		}
	}
	if len(chosen) == 0 {
		return fmt.Errorf("there is no case %q; without a case they are listed", c.Case)
	}
	// Never somebody else's Redis: one of the cases restarts it.
	l, err := openLab(ctx, serverSettings{DatabaseURL: c.DatabaseURL}, out.stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()
	var missed []string
	for _, b := range chosen {
		bench := &bench{lab: l}
		err := b.run(ctx, bench)
		bench.close()
		if err != nil {
			return fmt.Errorf("%s: %w", b.Name, err)
		}
		bench.print(out.stdout, b.Title)
		if len(bench.unseen) > 0 {
			missed = append(missed, b.Name+" ("+strings.Join(bench.unseen, "; ")+")")
		}
	}
	if len(missed) > 0 {
		return fmt.Errorf("not reproduced: %s", strings.Join(missed, ", "))
	}
	return nil
}

// bench is where one failure is reproduced: what it needs, and what it has to say.
type bench struct {
	*lab
	closers []func()
	did     []string
	saw     []string
	teaches []string
	unseen  []string // what should have been seen
}

func (b *bench) close() {
	for _, closer := range b.closers {
		closer()
	}
}

func (b *bench) do(format string, args ...any) { b.did = append(b.did, fmt.Sprintf(format, args...)) }
func (b *bench) see(format string, args ...any) {
	b.saw = append(b.saw, fmt.Sprintf(format, args...))
}
func (b *bench) teach(sentences ...string) { b.teaches = append(b.teaches, sentences...) }

// expect notes what the case is not itself without.
func (b *bench) expect(ok bool, what string) {
	if !ok {
		b.unseen = append(b.unseen, "expected "+what)
	}
}

func (b *bench) print(w io.Writer, title string) {
	fmt.Fprintf(w, "\n%s\n%s\n", title, strings.Repeat("=", len(title)))
	for _, part := range []struct {
		name  string
		lines []string
	}{{"What was done", b.did}, {"What was seen", b.saw}, {"What it teaches", b.teaches}} {
		fmt.Fprintf(w, "\n%s\n", part.name)
		for _, line := range part.lines {
			fmt.Fprintf(w, "  - %s\n", line)
		}
	}
}

// stage is a database with one strategy on it.
type stage struct {
	*bench
	strategies.Strategy
	parts   strategies.Parts
	gateway *labgateway.Gateway
	conn    *pgx.Conn
	address string
}

func (b *bench) stage(ctx context.Context, strategy string, latency time.Duration, pool int) (*stage, error) {
	kind, err := strategies.KindOf(strategy)
	if err != nil {
		return nil, err
	}
	address, err := b.database(ctx, kind)
	if err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, address)
	if err != nil {
		return nil, err
	}
	b.closers = append(b.closers, func() { _ = conn.Close(context.WithoutCancel(ctx)) })
	gateway := &labgateway.Gateway{Ledger: labgateway.NewLedger(), Latency: latency}
	parts, closeParts, err := b.parts(ctx, address, pool, gateway, nil)
	if err != nil {
		return nil, err
	}
	b.closers = append(b.closers, closeParts)
	s, err := kind.New(parts)
	return &stage{bench: b, Strategy: s, parts: parts, gateway: gateway, conn: conn, address: address}, err
}

// requests are for an order of their own each, under the key, or under a key of their own each where it is empty.
func (s *stage) requests(ctx context.Context, n int, key string) ([]payments.NewPayment, error) {
	orders, err := s.orders(ctx, s.conn, n)
	requests := make([]payments.NewPayment, n)
	for i := range requests {
		name := key
		if name == "" {
			name = fmt.Sprint("key-", i)
		}
		if err == nil {
			requests[i] = strategies.NewRequest(s.merchantID, orders[i], idempotency.Key(name))
		}
	}
	return requests, err
}

// twins sends a request n times from one gate.
func (s *stage) twins(ctx context.Context, req payments.NewPayment, n int) map[fate]int {
	ended := make(map[fate]int)
	var mu sync.Mutex
	hot(ctx, n, 1, func(int, time.Time) {
		answer, err := s.Pay(ctx, req)
		mu.Lock()
		defer mu.Unlock()
		ended[fateOf(answer, err)]++
	})
	return ended
}

func (s *stage) charges(req payments.NewPayment) int {
	return s.gateway.Ledger.Charges(payments.GatewayKey(payments.IntentCharge, s.merchantID, string(req.Claim.Key)))
}

func doubleClick(ctx context.Context, b *bench) error {
	b.do("An order, one key, and two requests from one gate; the gateway takes 50 ms and charges as often as it is asked.")
	for _, name := range []string{strategies.NameCheckThenAct, strategies.NameOnConflict} {
		s, err := b.stage(ctx, name, 50*time.Millisecond, 20)
		if err != nil {
			return err
		}
		requests, err := s.requests(ctx, 20, "")
		if err != nil {
			return err
		}
		charged := map[int]int{}
		for _, req := range requests {
			s.twins(ctx, req, 2)
			charged[s.charges(req)]++
		}
		b.see("%s: of %d double clicks %d were charged once and %d twice.", name, len(requests), charged[1], charged[2])
		b.expect(charged[1]+charged[2] == len(requests), name+" to charge for every double click")
		b.expect((charged[2] > 0) == (name == strategies.NameCheckThenAct), "check_then_act, and it alone, to charge twice")
	}
	b.teach("A SELECT that finds nothing says nothing about the moment after it. Both clicks look, both find nothing, both act.",
		"Only a constraint of the database, or a lock that both must take, makes one of two that come together the first. No test with one client ever shows the difference.")
	return nil
}

func poolDrained(ctx context.Context, b *bench) error {
	b.do("40 payments with 40 keys through a pool of 20, over a gateway of 800 ms. Meanwhile somebody else asks the same pool for a connection, to read one row.")
	for _, name := range []string{strategies.NameRowLockHeld, strategies.NameOnConflict} {
		s, err := b.stage(ctx, name, slowGateway, 20)
		if err != nil {
			return err
		}
		requests, err := s.requests(ctx, 40, "")
		if err != nil {
			return err
		}
		// As many as can be at the gateway at once: with the connections held, one for each of them.
		most := int32(40)
		if name == strategies.NameRowLockHeld {
			most = 20
		}
		var atTheGateway atomic.Int32
		reached := make(chan struct{})
		s.gateway.Arrived = func(context.Context, payments.Intent) {
			if atTheGateway.Add(1) == most {
				close(reached)
			}
		}
		var group sync.WaitGroup
		var failed atomic.Int32
		for _, req := range requests {
			group.Go(func() {
				if _, err := s.Pay(ctx, req); err != nil {
					failed.Add(1)
				}
			})
		}
		<-reached
		out := s.parts.DB.Stat().AcquiredConns()
		begin := time.Now()
		if _, err := s.parts.DB.Exec(ctx, "SELECT"); err != nil {
			return err
		}
		waited := time.Since(begin)
		group.Wait()
		b.see("%s: with %d payments at the gateway %d of 20 connections were out; the stranger waited %d ms for one; %d payments failed.",
			name, most, out, waited.Milliseconds(), failed.Load())
		if name == strategies.NameRowLockHeld {
			b.expect(out == 20 && waited > slowGateway/4, "the held form to have drained the pool")
		} else {
			b.expect(out == 0 && waited < slowGateway/4, "the default to have left connections")
		}
	}
	b.teach("What is held over a call of somebody else's system is held for as long as that system pleases. The pool, not the gateway, becomes the limit: 20 connections and 800 ms make 25 payments a second, and nothing else gets through.",
		"Every request that needs the database pays for it, also those that have nothing to do with payments. End the transaction before the call, and begin a new one after it.")
	return nil
}

// claimLast has SQL of its own: what matters is only in which order the statements of one transaction come.
func claimLast(ctx context.Context, b *bench) error {
	const twins, work = 20, 20 * time.Millisecond
	b.do("%d twins in one transaction each, with %d ms of work in it (rules, stock, fraud). Once they lock the order, work, and claim the key last; once they claim it first.", twins, work.Milliseconds())
	s, err := b.stage(ctx, strategies.NameOnConflict, 0, 1)
	if err != nil {
		return err
	}
	orders, err := s.orders(ctx, s.conn, 1)
	if err != nil {
		return err
	}
	if _, err := s.conn.Exec(ctx, "CREATE TABLE claims (key text PRIMARY KEY)"); err != nil {
		return err
	}
	pool, err := openPool(ctx, s.address, twins)
	if err != nil {
		return err
	}
	defer pool.Close()
	lost := errors.New("lost")
	claim := func(ctx context.Context, tx pgx.Tx, key string) error {
		tag, err := tx.Exec(ctx, "INSERT INTO claims (key) VALUES ($1) ON CONFLICT DO NOTHING", key)
		if err == nil && tag.RowsAffected() == 0 {
			return lost
		}
		return err
	}
	business := func(ctx context.Context, tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SELECT FROM orders WHERE merchant_id = $1 AND id = $2 FOR UPDATE", s.merchantID, orders[0]); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "SELECT pg_sleep($1)", work.Seconds())
		return err
	}
	slowest := map[string]time.Duration{}
	for _, order := range []struct {
		name string
		body func(ctx context.Context, tx pgx.Tx) error
	}{
		{"claimed last", func(ctx context.Context, tx pgx.Tx) error {
			return errors.Join(business(ctx, tx), claim(ctx, tx, "last"))
		}},
		{"claimed first", func(ctx context.Context, tx pgx.Tx) error {
			if err := claim(ctx, tx, "first"); err != nil {
				return err
			}
			return business(ctx, tx)
		}},
	} {
		var mu sync.Mutex
		var failure error
		losers := 0
		hot(ctx, twins, 1, func(_ int, due time.Time) {
			err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return order.body(ctx, tx) })
			took := time.Since(due)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case errors.Is(err, lost):
				losers++
				slowest[order.name] = max(slowest[order.name], took)
			case err != nil:
				failure = err
			}
		})
		if failure != nil {
			return failure
		}
		b.see("%s: the slowest of %d losers heard of it after %d ms.", order.name, losers, slowest[order.name].Milliseconds())
	}
	b.expect(slowest["claimed last"] > 3*slowest["claimed first"], "the losers of the claim made last to be slower by far")
	b.teach("A loser has to find out that it is one before it does anything, not after. With the claim last every twin does the whole work, one after the other, and throws it away.",
		"Claim first. If the claim and its work must be in one statement, as in the service's, let the first thing that it looks at be whether the key is there.")
	return nil
}

// naiveLock is what a search for "redis lock" finds first: SET NX PX, work, DEL.
func naiveLock(ctx context.Context, s *stage, key string, ttl time.Duration, work func()) (got bool, err error) {
	client := s.lab.redis()
	defer client.Close()
	name := "naive:" + s.merchantID.String() + ":" + key
	err = client.SetArgs(ctx, name, "1", redis.SetArgs{Mode: "NX", TTL: ttl}).Err()
	if errors.Is(err, redis.Nil) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	work()
	return true, client.Del(ctx, name).Err()
}

func ttlTooShort(ctx context.Context, b *bench) error {
	const ttl = 300 * time.Millisecond
	b.do("SET NX PX 300, a gateway of 800 ms, then DEL; clicks at 0, 400 and 900 ms. Then redis_set_nx is asked to work with such a TTL.")
	s, err := b.stage(ctx, strategies.NameCheckThenAct, slowGateway, 20)
	if err != nil {
		return err
	}
	requests, err := s.requests(ctx, 1, "ttl")
	if err != nil {
		return err
	}
	var group sync.WaitGroup
	var mu sync.Mutex
	var failure error
	claims := 0
	for _, at := range []time.Duration{0, 400 * time.Millisecond, 900 * time.Millisecond} {
		group.Go(func() {
			time.Sleep(at)
			got, err := naiveLock(ctx, s, "ttl", ttl, func() {
				_, _ = s.gateway.Charge(ctx, payments.Intent{Key: payments.GatewayKey(payments.IntentCharge, s.merchantID, "ttl")})
			})
			mu.Lock()
			defer mu.Unlock()
			failure = errors.Join(failure, err)
			if got {
				claims++
			}
		})
	}
	group.Wait()
	if failure != nil {
		return failure
	}
	b.see("%d of 3 clicks held the lock, and %d charges were made. The second came when the first's TTL had ended; the first's DEL then deleted the second's lock, and let the third in.", claims, s.charges(requests[0]))
	b.expect(s.charges(requests[0]) == 3, "three charges")
	kind, err := strategies.KindOf(strategies.NameRedisSetNX)
	if err != nil {
		return err
	}
	settings := b.settings()
	settings.LeaseTTL, settings.GatewayTimeout = ttl, slowGateway
	_, refused := kind.New(strategies.Parts{Settings: settings})
	b.see("redis_set_nx with that TTL: %v.", refused)
	b.expect(refused != nil, "redis_set_nx to refuse the TTL")
	b.teach("A TTL is a bet that nothing takes longer. The bet is on the gateway's time-out, the database's, every retry, and on a pause of the process that nobody can bound.",
		"Check the bet where the program starts, release by a script that compares the token, and put a unique index behind it all: the TTL protects patience, not money.")
	return nil
}

func killedBeforeWrite(ctx context.Context, b *bench) error {
	b.do("A process claims the key and is killed (kill -9) before it has reached PostgreSQL. Then the client repeats its request with another process.")
	for _, name := range []string{strategies.NameRedisSetNX, strategies.NameOnConflict} {
		s, err := b.stage(ctx, name, 0, 20)
		if err != nil {
			return err
		}
		requests, err := s.requests(ctx, 1, "killed")
		if err != nil {
			return err
		}
		if err := b.killVictim(ctx, name, requests[0]); err != nil {
			return err
		}
		_, err = s.Pay(ctx, requests[0])
		inFlight, told := errors.AsType[*idempotency.InFlightError](err)
		if told {
			b.see("%s: the repeat is told that the payment is in progress, for %s more. Nobody is at work on it; there is no payment, and %s.",
				name, inFlight.Record.LeaseLeft.Round(time.Second), plural(s.charges(requests[0]), "charge"))
		} else if err == nil {
			b.see("%s: the repeat is paid at once, with %s.", name, plural(s.charges(requests[0]), "charge"))
		} else {
			return err
		}
		b.expect(told == (name == strategies.NameRedisSetNX), "the claim in Redis, and it alone, to have outlived its process")
		charges := 1
		if told {
			charges = 0
		}
		b.expect(s.charges(requests[0]) == charges, "one charge where the repeat is paid, and none where it waits")
	}
	b.teach("A claim and what it is a claim of are one thing. In two stores there is a moment in which only one of them is written, and processes die in such moments.",
		"Nothing is charged twice here, but the key is stuck until the TTL ends, and the TTL must be longer than the longest payment. Written by one statement, the two exist together or not at all.")
	return nil
}

func redisRestart(ctx context.Context, b *bench) error {
	how := "is killed and started again, without a file to read its memory from"
	if !b.redisServer.Real() {
		how = "loses its memory, as by a restart"
	}
	b.do("A payment is under way. Redis (%s) %s. The client repeats its request.", b.redisSource, how)

	naive, err := b.stage(ctx, strategies.NameCheckThenAct, slowGateway, 20)
	if err != nil {
		return err
	}
	intent := payments.Intent{Key: payments.GatewayKey(payments.IntentCharge, b.merchantID, "restart")}
	click := func() {
		_, _ = naiveLock(ctx, naive, "restart", time.Minute, func() { _, _ = naive.gateway.Charge(ctx, intent) })
	}
	reached := make(chan struct{}, 2)
	naive.gateway.Arrived = func(context.Context, payments.Intent) { reached <- struct{}{} }
	var group sync.WaitGroup
	group.Go(click)
	<-reached
	if err := b.redisServer.Restart(ctx); err != nil {
		return err
	}
	click()
	group.Wait()
	doubled := naive.gateway.Ledger.Charges(intent.Key)
	b.see("A lock in Redis and nothing behind it: %s.", plural(doubled, "charge"))
	b.expect(doubled == 2, "two charges with nothing but Redis")

	for _, moment := range []string{"while the gateway works", "before the gateway has heard of it"} {
		s, err := b.stage(ctx, strategies.NameRedisSetNX, slowGateway, 20)
		if err != nil {
			return err
		}
		requests, err := s.requests(ctx, 1, "restart "+moment)
		if err != nil {
			return err
		}
		req := requests[0]
		req.Claim.Key = idempotency.Key(strings.ReplaceAll(string(req.Claim.Key), " ", "-"))
		held, release := make(chan struct{}), make(chan struct{})
		first := sync.OnceFunc(func() { close(held) })
		paused := moment != "while the gateway works"
		var calls atomic.Int32
		s.gateway.Arrived = func(context.Context, payments.Intent) {
			if calls.Add(1) == 1 {
				first()
				if paused {
					<-release
				}
			}
		}
		var group sync.WaitGroup
		group.Go(func() { _, _ = s.Pay(ctx, req) })
		<-held
		if !paused {
			time.Sleep(slowGateway / 8) // It has arrived; now the gateway enters it.
		}
		if err := b.redisServer.Restart(ctx); err != nil {
			return err
		}
		_, err = s.Pay(ctx, req)
		close(release)
		group.Wait()
		var rows int
		if err := s.conn.QueryRow(ctx, "SELECT count(*) FROM payments").Scan(&rows); err != nil {
			return err
		}
		said := "is paid"
		if err != nil {
			said = "is told that the outcome is unclear"
		}
		b.see("redis_set_nx, restarted %s: the repeat claims too; the unique index keeps it to %s; it asks the gateway, and %s. This gateway, which knows no keys, has booked %s.",
			moment, plural(rows, "payment"), said, plural(s.charges(req), "charge"))
		b.expect(rows == 1, "one payment behind the unique index")
		charges := 1
		if paused {
			charges = 2
		}
		b.expect(s.charges(req) == charges, "the second holder to charge where the gateway has not heard of the first, and nowhere else")
	}
	b.teach("What Redis forgets was never claimed. An append-only file makes the moment shorter (a second, by default), a replica another one (replication is asynchronous).",
		"A unique index on the payment keeps it to one row, and asking the gateway first keeps it to one charge wherever the gateway has heard of the first. For the rest only a gateway that knows the charge's key helps, and the service derives that key from the merchant and the idempotency key, so that it can be made again from nothing.")
	return nil
}

func otherBody(ctx context.Context, b *bench) error {
	b.do("A client pays one order, and then, by a fault of its own, another order under the same key.")
	for _, name := range []string{strategies.NameCheckThenAct, strategies.NameOnConflict} {
		s, err := b.stage(ctx, name, 0, 20)
		if err != nil {
			return err
		}
		requests, err := s.requests(ctx, 2, "other-body")
		if err != nil {
			return err
		}
		if _, err := s.Pay(ctx, requests[0]); err != nil {
			return err
		}
		answer, err := s.Pay(ctx, requests[1])
		if err == nil {
			var status string
			if err := s.conn.QueryRow(ctx, "SELECT status FROM orders WHERE merchant_id = $1 AND id = $2", s.merchantID, requests[1].OrderID).Scan(&status); err != nil {
				return err
			}
			b.see("%s answers %d, with the first order's payment. The second order is %s, and its client ships it.", name, answer.Status, status)
		} else {
			b.see("%s: %v.", name, err)
		}
		b.expect(errors.Is(err, idempotency.ErrKeyReused) == (name == strategies.NameOnConflict), "the fingerprint, and it alone, to notice")
	}
	b.teach("A key names one intent. Store what it was first used for, beside the key and by the same statement, and compare before anything else is said.",
		"Compare meanings, not bytes: the order of names and the spelling of numbers differ between retries of honest clients.")
	return nil
}

func emptyReadBack(ctx context.Context, b *bench) error {
	b.do("A twin has inserted the key and not committed yet. We INSERT … ON CONFLICT DO NOTHING and read the row in the same statement. While we wait for the twin, it commits.")
	s, err := b.stage(ctx, strategies.NameOnConflict, 0, 1)
	if err != nil {
		return err
	}
	if _, err := s.conn.Exec(ctx, "CREATE TABLE claims (key text PRIMARY KEY, by text NOT NULL)"); err != nil {
		return err
	}
	twin, err := pgx.Connect(ctx, s.address)
	if err != nil {
		return err
	}
	defer twin.Close(context.WithoutCancel(ctx))
	for _, sql := range []string{"BEGIN", "INSERT INTO claims VALUES ('key', 'the twin')"} {
		if _, err := twin.Exec(ctx, sql); err != nil {
			return err
		}
	}
	var pid uint32 = s.conn.PgConn().PID()
	read := make(chan int, 1)
	failed := make(chan error, 1)
	go func() {
		rows, err := s.conn.Query(ctx, `WITH mine AS (
    INSERT INTO claims VALUES ('key', 'us') ON CONFLICT DO NOTHING RETURNING by
)
SELECT by FROM mine
UNION ALL
SELECT by FROM claims WHERE key = 'key'`)
		if err == nil {
			var found []string
			found, err = pgx.CollectRows(rows, pgx.RowTo[string])
			if err == nil {
				read <- len(found)
				return
			}
		}
		failed <- err
	}()
	if err := awaitLockWait(ctx, twin, pid); err != nil {
		return err
	}
	if _, err := twin.Exec(ctx, "COMMIT"); err != nil {
		return err
	}
	select {
	case n := <-read:
		b.see("The statement returned %d rows: the INSERT saw the twin's row and did nothing, the SELECT did not see it.", n)
		b.expect(n == 0, "an empty read-back")
	case err := <-failed:
		return err
	}
	var by string
	if err := s.conn.QueryRow(ctx, "SELECT by FROM claims WHERE key = 'key'").Scan(&by); err != nil {
		return err
	}
	b.see("The next statement reads the row: it was claimed by %s.", by)
	b.teach("The whole of a statement looks at the moment of its beginning. ON CONFLICT alone looks at now. So a row can be in the way and not be there.",
		"Read what you have lost against in a second statement, with a snapshot of its own, as the service does. ON CONFLICT DO UPDATE SET key = excluded.key does return the row, and pays for it with a dead tuple and a lock for every loser.")
	return nil
}

func hashCollision(ctx context.Context, b *bench) error {
	const keys = 300_000
	b.do("Among %s keys two are looked for with the same hashtext(), of 32 bits. One is being paid, with pg_advisory_xact_lock(hashtext(key)) held over a gateway of 800 ms. Somebody else pays with the other.", count(keys))
	s, err := b.stage(ctx, strategies.NameOnConflict, 0, 1)
	if err != nil {
		return err
	}
	var one, other string
	var collisions, collisions64 int
	err = s.conn.QueryRow(ctx, `WITH hashes AS (
    SELECT min('order-' || i) AS one, max('order-' || i) AS other, count(*) - 1 AS surplus
    FROM generate_series(1, $1::int) AS i
    GROUP BY hashtext('order-' || i)
    HAVING count(*) > 1
)
SELECT coalesce(min(one), ''), coalesce((SELECT other FROM hashes ORDER BY one LIMIT 1), ''), coalesce(sum(surplus), 0)::int FROM hashes`, keys).Scan(&one, &other, &collisions)
	if err != nil {
		return err
	}
	err = s.conn.QueryRow(ctx, `SELECT $1::int - count(DISTINCT hashtextextended('order-' || i, 0))::int FROM generate_series(1, $1::int) AS i`, keys).Scan(&collisions64)
	if err != nil {
		return err
	}
	b.expect(collisions > 0, "a collision")
	if collisions == 0 {
		return nil
	}
	waits := func(hash string) (time.Duration, error) {
		holder, err := pgx.Connect(ctx, s.address)
		if err != nil {
			return 0, err
		}
		defer holder.Close(context.WithoutCancel(ctx))
		held := make(chan error, 1)
		var group sync.WaitGroup
		group.Go(func() {
			err := pgx.BeginFunc(ctx, holder, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock("+hash+")", one)
				held <- err
				if err == nil {
					time.Sleep(slowGateway)
				}
				return err
			})
			_ = err // It was told through held, or is about the end of a lock that nobody waits for any more.
		})
		defer group.Wait()
		if err := <-held; err != nil {
			return 0, err
		}
		begin := time.Now()
		err = pgx.BeginFunc(ctx, s.conn, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock("+hash+")", other)
			return err
		})
		return time.Since(begin), err
	}
	narrow, err := waits("hashtext($1)")
	if err != nil {
		return err
	}
	wide, err := waits("hashtextextended($1, 0)")
	if err != nil {
		return err
	}
	b.see("32 bits: %d of %s keys share their hash with another one, %s with %s for example; the second waited %d ms for the first one's gateway.", collisions, count(keys), one, other, narrow.Milliseconds())
	b.see("64 bits: %d of them do; the same two keys waited %d ms for each other.", collisions64, wide.Milliseconds())
	b.expect(narrow > slowGateway/2 && wide < slowGateway/2, "the stranger to wait for 32 bits, and not for 64")
	b.teach("With 32 bits, two of 77,000 keys share a lock with a probability of a half. A merchant's slow payment then holds up a stranger's, and nothing in any log says why; with pg_try_advisory_lock the stranger is told that its payment is in progress, which is false.",
		"Take all of the 64 bits, hold the lock for a short transaction only, and read the row by the key itself under it: then a collision costs a wait of a millisecond, and never an answer.")
	return nil
}

// plural is for what is a handful.
func plural(n int, noun string) string {
	if n == 1 {
		return "one " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// awaitLockWait returns when the session waits for a lock.
func awaitLockWait(ctx context.Context, conn *pgx.Conn, pid uint32) error {
	for range 5000 {
		var waiting bool
		err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock')", pid).Scan(&waiting)
		if err != nil || waiting {
			return err
		}
		time.Sleep(2 * time.Millisecond)
	}
	return errors.New("the statement does not come to wait for its twin")
}

// openPool opens plain connections, without the service's limits.
func openPool(ctx context.Context, address string, conns int) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(address)
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(conns)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	// Warm: what is measured is not the opening of connections.
	var group sync.WaitGroup
	conn := make([]*pgxpool.Conn, conns)
	for i := range conn {
		group.Go(func() { conn[i], _ = pool.Acquire(ctx) })
	}
	group.Wait()
	for _, c := range conn {
		if c != nil {
			c.Release()
		}
	}
	return pool, nil
}
