package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"example.com/payments/internal/dbtest"
	"example.com/payments/internal/devdb"
	"example.com/payments/internal/servicetest"
)

// The budgets of DESIGN §6 that are about whole processes; what idempotency costs is in internal/api. docs/benchmarks.md says how each is
// measured. A budget that is missed fails.

// stage is a service with its default settings, as a process of its own, on a database that nothing is between.
type stage struct {
	*service
	databaseURL string
	pool        *pgxpool.Pool
	apiKey      string
	merchantID  string
}

func newStage(b *testing.B, gatewayURL string, settings ...string) *stage {
	b.Helper()
	s := &stage{databaseURL: dbtest.New(b)}
	s.pool = dbtest.Pool(b, s.databaseURL)
	s.apiKey = newMerchant(b, s.databaseURL)
	require.NoError(b, s.pool.QueryRow(b.Context(), "SELECT id::text FROM merchants").Scan(&s.merchantID))
	s.service = startService(b, s.databaseURL, gatewayURL, settings...)
	s.awaitReady(b)
	return s
}

func startService(b *testing.B, databaseURL, gatewayURL string, settings ...string) *service {
	b.Helper()
	p := start(b, append([]string{"DATABASE_URL=" + databaseURL, "GATEWAY_URL=" + gatewayURL, "LISTEN_ADDR=127.0.0.1:0"}, settings...), "serve")
	return &service{p, "http://" + p.await(b, &p.stderr, `msg=serving address=(\S+)`)}
}

// newQuickGateway is the simulator with a latency of 0, as a process of its own.
func newQuickGateway(b *testing.B) (url string) {
	b.Helper()
	p := start(b, []string{"LISTEN_ADDR=127.0.0.1:0", "GATEWAY_LATENCY=0s", "GATEWAY_LEDGER=" + filepath.Join(b.TempDir(), "ledger")}, "gateway")
	return "http://" + p.await(b, &p.stderr, `address=(\S+)`)
}

func (s *stage) exec(b *testing.B, sql string, args ...any) {
	b.Helper()
	_, err := s.pool.Exec(b.Context(), sql, args...)
	require.NoError(b, err)
}

// newOrders makes open orders, as many of them as are to be paid, and returns their ids.
func (s *stage) newOrders(b *testing.B, n int) []string {
	b.Helper()
	rows, err := s.pool.Query(b.Context(), `
		INSERT INTO orders (merchant_id, id, status, amount, currency, metadata, created_at)
		SELECT $1, gen_random_uuid(), 'open', 1999, 'EUR', '{}', now() FROM generate_series(1, $2)
		RETURNING id::text`, s.merchantID, n)
	require.NoError(b, err)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(b, err)
	return ids
}

// pay pays an order under a key of its own.
func pay(c *servicetest.Caller, orderID string) error {
	return c.Send(http.StatusCreated, http.MethodPost, "/v1/payments", "bench-"+orderID, servicetest.PayBody(orderID, "pm_ok"))
}

// BenchmarkPgbench tells what is left, with everything around them, of the pairs of claim and record that the database takes from pgbench.
// The two take turns, so that whatever else the machine does meets both.
func BenchmarkPgbench(b *testing.B) {
	const (
		budget  = 0.50 // DESIGN §6
		clients = 40   // twice the connections, so that the pool is never idle
		turns   = 5    // of each
		turn    = 3000 // payments, or pairs: a few seconds
	)
	program, err := devdb.Program(b.Context(), "pgbench")
	if err != nil {
		b.Skip(err)
	}
	statements := newPgbench(b, program)
	s := newStage(b, newQuickGateway(b))
	callers := servicetest.NewCallers(b, clients, s.url, s.apiKey)
	take := func(n int) float64 {
		orders := s.newOrders(b, n)
		return servicetest.AllOf(b, callers, n, func(c *servicetest.Caller, i int) error { return pay(c, orders[i]) })
	}
	for b.Loop() {
		take(1000) // connections are made, statements are planned
		statements.take(b, 1000)
		rate, bareRate, ratio := servicetest.TakeTurns(turns,
			func() float64 { return take(turn) },
			func() float64 { return statements.take(b, turn) })
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(rate, "payments/s")
		b.ReportMetric(bareRate, "pgbench-pairs/s")
		b.ReportMetric(ratio, "ratio")
		if ratio < budget {
			b.Errorf("%.0f payments/s, and %.0f pairs/s of pgbench: a ratio of %.2f, and the budget is %.2f", rate, bareRate, ratio, budget)
		}
	}
}

// pgbench runs the two statements of a payment, as the service sends them, on a database of its own on the same server.
type pgbench struct {
	program, script, url string
	pool                 *pgxpool.Pool
	values               []string // of the script's variables that are always the same, as arguments of pgbench
	taken                int      // pairs
}

const (
	// As many as a service with the default settings has, all together.
	pgbenchClients = 20
	// Pairs in a transaction of pgbench. Its own variables are numbers, so the pairs' ids come from the database; asking for a few at once
	// keeps that small beside what is measured.
	pgbenchPairs = 5
)

// newPgbench has a service pay, listens to what it says, and makes a script of that in which the ids and the key are new each time.
func newPgbench(b *testing.B, program string) *pgbench {
	b.Helper()
	w := servicetest.New(b, servicetest.Options{Quiet: true})
	orderID := w.NewOrder()
	payment := w.Pay(orderID, "captured", "pm_ok").Is(http.StatusCreated)
	changing := map[string]string{
		payment.Member("id"): "payment", orderID: "order", "captured": "key", w.Key("captured").LeaseID.String(): "lease",
	}

	p := &pgbench{program: program, url: dbtest.New(b)}
	p.pool = dbtest.Pool(b, p.url)
	_, err := p.pool.Exec(b.Context(), "INSERT INTO merchants (id, name) VALUES ($1, 'Shop')", w.Merchant.ID)
	require.NoError(b, err)
	script := `\set n :base + (:client_id * :each + :done) * ` + strconv.Itoa(pgbenchPairs) + "\n" + `\set done :done + 1` + "\n"
	var ids []string
	for i := range pgbenchPairs {
		// Payments have ids that grow with time, as the service's do; keys are as random as clients make them.
		ids = append(ids, fmt.Sprintf(orderOfNumber+` AS order_%[2]d, gen_random_uuid() AS lease_%[2]d, gen_random_uuid() AS key_%[2]d,
			lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0') || right(gen_random_uuid()::text, 23) AS payment_%[2]d`,
			fmt.Sprintf(":n + %d", i), i))
	}
	script += "SELECT " + strings.Join(ids, ",\n") + ` \gset` + "\n"
	for i := range pgbenchPairs {
		for _, name := range []string{"PaymentClaim", "PaymentRecord"} {
			script += p.statement(b, name, w.Queries.SQL()[name], w.Queries.Args(name), changing, i)
		}
	}
	p.script = filepath.Join(b.TempDir(), "pairs.sql")
	require.NoError(b, os.WriteFile(p.script, []byte(script), 0o600))
	return p
}

// orderOfNumber is the id of the order of that number.
const orderOfNumber = `lpad(to_hex(%[1]s), 32, '0')::uuid`

// statement is a statement with variables of pgbench for its parameters.
func (p *pgbench) statement(b *testing.B, name, sql string, args []any, changing map[string]string, pair int) string {
	b.Helper()
	conn, err := p.pool.Acquire(b.Context())
	require.NoError(b, err)
	defer conn.Release()
	prepared, err := conn.Conn().Prepare(b.Context(), name, sql)
	require.NoError(b, err)
	require.Len(b, args, len(prepared.ParamOIDs))
	variables := make([]string, len(args))
	for i, arg := range args {
		value, err := conn.Conn().TypeMap().Encode(prepared.ParamOIDs[i], pgtype.TextFormatCode, arg, nil)
		require.NoError(b, err)
		variable, changes := changing[string(value)]
		switch {
		case value == nil:
			variables[i] = "NULL" // which no variable can be
		case changes:
			variables[i] = fmt.Sprintf(":%s_%d", variable, pair)
		default:
			variables[i] = fmt.Sprintf(":%s_%d", name, i+1)
			if pair == 0 {
				p.values = append(p.values, "-D", fmt.Sprintf("%s_%d=%s", name, i+1, value))
			}
		}
	}
	_, sql, _ = strings.Cut(sql, "\n") // The name is in the first line, and would be taken for a variable.
	return regexp.MustCompile(`\$\d+`).ReplaceAllStringFunc(strings.TrimSpace(sql), func(parameter string) string {
		n, err := strconv.Atoi(parameter[1:])
		require.NoError(b, err)
		return variables[n-1]
	}) + ";\n"
}

var pgbenchRate = regexp.MustCompile(`(?m)^tps = ([0-9.]+) \(without initial connection time\)`)

// take runs n pairs and returns how many of them the database took in a second.
func (p *pgbench) take(b *testing.B, n int) float64 {
	b.Helper()
	const wave = pgbenchClients * pgbenchPairs
	require.Zero(b, n%wave)
	_, err := p.pool.Exec(b.Context(), fmt.Sprintf(`
		INSERT INTO orders (merchant_id, id, status, amount, currency, metadata, created_at)
		SELECT m.id, `+orderOfNumber+`, 'open', 1999, 'EUR', '{}', now() FROM merchants AS m, generate_series(%[2]d, %[3]d) AS n`,
		"n", p.taken, p.taken+n-1))
	require.NoError(b, err)
	args := append([]string{
		"-n", "-M", "prepared", "-c", strconv.Itoa(pgbenchClients), "-t", strconv.Itoa(n / wave), "-f", p.script,
		"-D", "done=0", "-D", fmt.Sprintf("each=%d", n/wave), "-D", fmt.Sprintf("base=%d", p.taken),
	}, p.values...)
	command := exec.CommandContext(b.Context(), p.program, append(args, p.url)...)
	// Planned once for all values, as the service's statements are when a connection has sent them five times.
	command.Env = append(os.Environ(), "PGOPTIONS=-c plan_cache_mode=force_generic_plan")
	out, err := command.CombinedOutput()
	require.NoError(b, err, string(out))
	p.taken += n
	var paid int
	require.NoError(b, p.pool.QueryRow(b.Context(), `
		SELECT count(*) FROM idempotency_keys AS k JOIN payments AS p ON p.id = k.resource_id JOIN orders AS o ON o.id = p.order_id JOIN events AS e ON e.resource_id = p.id
		WHERE k.state = 'done' AND p.status = 'succeeded' AND o.status = 'paid'`).Scan(&paid))
	require.Equal(b, p.taken, paid, "a pair that has written nothing is quick")
	match := pgbenchRate.FindSubmatch(out)
	require.NotNil(b, match, string(out))
	transactions, err := strconv.ParseFloat(string(match[1]), 64)
	require.NoError(b, err)
	return transactions * pgbenchPairs
}

// BenchmarkInFlight has a great many payments wait for a gateway that says nothing, on ten connections, and then lets the gateway speak.
// Somebody looks at a payment all the time.
func BenchmarkInFlight(b *testing.B) {
	const (
		inFlight    = 5000
		ramp        = 10 * time.Second
		getInterval = 5 * time.Millisecond
		getFor      = 5 * time.Second // 1,000 GETs, of which the p99 leaves out 10
		budgetRSS   = 300_000_000     // bytes, DESIGN §6
		budgetRatio = 10.0            // of the p99 to the idle p99
	)
	gateway := newGateway(b, latency)
	// The gateway's budget is longer than the benchmark takes: what is measured is patience, not its end.
	s := newStage(b, "http://"+gateway.address, "DB_MAX_CONNS=10", "GATEWAY_TIMEOUT=2m", "SHUTDOWN_TIMEOUT=3m")
	for b.Loop() {
		getters := servicetest.NewCallers(b, 100, s.url, s.apiKey)
		payers := servicetest.NewCallers(b, inFlight, s.url, s.apiKey)
		orders := s.newOrders(b, inFlight+1)
		require.NoError(b, pay(payers[0], orders[inFlight]))
		var id string
		require.NoError(b, s.pool.QueryRow(b.Context(), "SELECT id::text FROM payments WHERE order_id = $1", orders[inFlight]).Scan(&id))
		var failed atomic.Int64
		count := func(err error) error {
			if err != nil && failed.Add(1) == 1 {
				b.Logf("the first of the errors: %v", err)
			}
			return nil
		}
		get := func(stop <-chan struct{}) []servicetest.Took {
			return servicetest.Every(b, getters, getInterval, stop, func(c *servicetest.Caller, _ int) error {
				return count(c.Send(http.StatusOK, http.MethodGet, "/v1/payments/"+id, "", ""))
			})
		}
		get(servicetest.For(time.Second)) // connections are made, statements are planned
		idle := servicetest.P99(get(servicetest.For(getFor)))

		before := gateway.posts.Load()
		gate := gateway.shut(beforeCharge)
		answered, held := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(answered)
			var all sync.WaitGroup
			for i, payer := range payers {
				all.Go(func() {
					time.Sleep(time.Duration(i) * ramp / inFlight)
					_ = count(pay(payer, orders[i]))
				})
			}
			all.Wait()
		}()
		go func() {
			defer close(held)
			for gateway.posts.Load()-before+failed.Load() < inFlight {
				time.Sleep(10 * time.Millisecond)
			}
			time.Sleep(getFor)
		}()
		shut := get(held)
		heldRSS := s.memory(b, "VmRSS")
		opened := time.Now()
		gate.open()
		open := get(answered)
		letGo := time.Since(opened)
		rss := s.memory(b, "VmHWM")

		shutP99, openP99, p99 := servicetest.P99(shut), servicetest.P99(open), servicetest.P99(slices.Concat(shut, open))
		ratio := float64(p99) / float64(idle)
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(float64(failed.Load()), "errors")
		b.ReportMetric(float64(heldRSS)/1e6, "RSS-held-MB")
		b.ReportMetric(float64(rss)/1e6, "RSS-peak-MB")
		b.ReportMetric(milliseconds(idle), "GET-p99-idle-ms")
		b.ReportMetric(milliseconds(shutP99), "GET-p99-held-ms")
		b.ReportMetric(milliseconds(openP99), "GET-p99-let-go-ms")
		b.ReportMetric(letGo.Seconds(), "let-go-s")
		b.ReportMetric(float64(shutP99)/float64(idle), "ratio-held")
		b.ReportMetric(ratio, "ratio")
		if failed.Load() > 0 || rss >= budgetRSS || ratio >= budgetRatio {
			b.Errorf("%d errors (budget 0); RSS %d MB while held, %d at its peak (budget %d); p99 of GET %s idle, %s while held, %s while let go, which took %s: "+
				"a ratio of %.1f in all (budget %.0f), %.1f while held",
				failed.Load(), heldRSS/1e6, rss/1e6, budgetRSS/int(1e6), idle, shutP99, openP99, letGo, ratio, budgetRatio, float64(shutP99)/float64(idle))
		}
	}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// memory is a figure of the process's memory in bytes: VmRSS is what it has now, VmHWM the most that it ever had.
func (p *program) memory(b *testing.B, figure string) int64 {
	b.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	if err != nil {
		b.Skipf("a process's memory is read from /proc: %v", err)
	}
	match := regexp.MustCompile(figure + `:\s+(\d+) kB`).FindSubmatch(status)
	require.NotNil(b, match, string(status))
	kB, err := strconv.ParseInt(string(match[1]), 10, 64)
	require.NoError(b, err)
	return kB << 10
}

// BenchmarkPurge has a service purge answers whose time is over, of which there are a million, while payments are made. A service does not
// purge in its first ten seconds; it is started again and again, so that before and during take turns.
func BenchmarkPurge(b *testing.B) {
	const (
		budget   = 1.5 // DESIGN §6: the p99 during it to the p99 before
		expired  = 1_000_000
		rounds   = 3
		interval = 10 * time.Millisecond // between payments: a fraction of what the service can do, or it would be the queue that is measured
		quiet    = 7 * time.Second
		busy     = 25 * time.Second
		window   = 2 * time.Second // 200 payments
	)
	gatewayURL := newQuickGateway(b)
	s := newStage(b, gatewayURL)
	s.stop(b)
	for b.Loop() {
		s.expire(b, expired)
		var before, during []servicetest.Took
		purged := 0
		for range rounds {
			s.service = startService(b, s.databaseURL, gatewayURL)
			s.awaitReady(b)
			callers := servicetest.NewCallers(b, 40, s.url, s.apiKey)
			orders := s.newOrders(b, 1000+int((quiet+busy)/interval))
			var next atomic.Int64
			payOne := func(c *servicetest.Caller, _ int) error { return pay(c, orders[next.Add(1)-1]) }
			servicetest.AllOf(b, callers, 400, payOne) // connections are made, statements are planned
			before = append(before, servicetest.Every(b, callers, interval, servicetest.For(quiet), payOne)...)
			require.Zero(b, s.purged(b), "the purge has begun before its time")
			eventually(b, "the purge begins", func() bool { return s.purged(b) > 0 })
			during = append(during, servicetest.Every(b, callers, interval, servicetest.For(busy), payOne)...)
			purged += s.purged(b)
			require.Less(b, purged, expired, "the purge has ended, and its end was measured as well")
			s.stop(b)
		}
		beforeP99, duringP99 := medianP99(before, window), medianP99(during, window)
		ratio := float64(duringP99) / float64(beforeP99)
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(float64(purged)/(rounds*busy.Seconds()), "purged/s")
		b.ReportMetric(milliseconds(beforeP99), "POST-p99-before-ms")
		b.ReportMetric(milliseconds(duringP99), "POST-p99-during-ms")
		b.ReportMetric(milliseconds(servicetest.P99(before)), "whole-p99-before-ms")
		b.ReportMetric(milliseconds(servicetest.P99(during)), "whole-p99-during-ms")
		b.ReportMetric(ratio, "ratio")
		if ratio > budget {
			b.Errorf("p99 of POST: %s before the purge (%d payments), %s during it (%d): a ratio of %.2f, and the budget is %.1f",
				beforeP99, len(before), duringP99, len(during), ratio, budget)
		}
	}
}

// medianP99 is the median of the p99s of all windows. A burst of a neighbour's, or a checkpoint, is a hundred of the slowest requests in a
// row; over everything at once the p99 would tell of nothing else.
func medianP99(all []servicetest.Took, window time.Duration) time.Duration {
	windows := make(map[time.Time][]servicetest.Took)
	for _, one := range all {
		at := one.Due.Truncate(window)
		windows[at] = append(windows[at], one)
	}
	var p99s []float64
	for _, one := range windows {
		p99s = append(p99s, float64(servicetest.P99(one)))
	}
	return time.Duration(servicetest.Median(p99s))
}

// expire makes n keys as payments leave them behind, whose retention is over.
func (s *stage) expire(b *testing.B, n int) {
	b.Helper()
	s.exec(b, `
		INSERT INTO idempotency_keys (merchant_id, key, route, resource_id, resource_path, recipe, fingerprint, mode, state, attempt, holder, request_id,
			outcome_uncertain, answer_status, answer_headers, answer_body, created_at, final_at, expires_at)
		SELECT $1, 'expired-' || i, 'POST /v1/payments', gen_random_uuid(), '/v1/payments/0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11', 1, sha256(''), 'sync', 'done', 1,
			'host pid 1', '0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c12', false,
			201, '{"Location": "/v1/payments/0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11", "Content-Type": "application/json"}', convert_to(repeat('x', 400), 'UTF8'),
			now() - interval '25 hours', now() - interval '25 hours', now() - interval '1 hour' + i * interval '1 millisecond'
		FROM generate_series(1, $2::integer) AS i`, s.merchantID, n)
	s.exec(b, "VACUUM ANALYZE idempotency_keys")
	s.exec(b, "CHECKPOINT")
}

// stop ends the service as a deploy does.
func (s *stage) stop(b *testing.B) {
	b.Helper()
	s.signal(b, syscall.SIGTERM)
	require.Zero(b, s.wait(b))
}

// purged is how many answers the service has stripped since its start.
func (s *stage) purged(b *testing.B) int {
	b.Helper()
	response, err := http.Get("http://" + s.await(b, &s.stderr, `admin=(\S+)`) + "/metrics")
	require.NoError(b, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	require.NoError(b, err)
	match := regexp.MustCompile(`(?m)^payments_purged_answers_total (\S+)$`).FindSubmatch(text)
	require.NotNil(b, match)
	purged, err := strconv.ParseFloat(string(match[1]), 64)
	require.NoError(b, err)
	return int(purged)
}

// BenchmarkStart tells how long one waits for a service, and for `payments dev` on a machine that has never run it.
func BenchmarkStart(b *testing.B) {
	b.Run("Serve", func(b *testing.B) {
		const budget, times = time.Second, 5
		s := newStage(b, newQuickGateway(b))
		var longest time.Duration
		for b.Loop() {
			for range times {
				started := time.Now()
				another := startService(b, s.databaseURL, "http://127.0.0.1:1")
				another.awaitReady(b)
				longest = max(longest, time.Since(started))
				another.kill(b)
			}
		}
		reportStart(b, longest, budget)
	})
	b.Run("Dev", func(b *testing.B) {
		const budget = 10 * time.Second
		var longest time.Duration
		for b.Loop() {
			started := time.Now()
			startDev(b, openDir(b))
			longest = max(longest, time.Since(started))
		}
		reportStart(b, longest, budget)
	})
}

func reportStart(b *testing.B, longest, budget time.Duration) {
	b.Helper()
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(longest.Seconds(), "s")
	if longest >= budget {
		b.Errorf("the longest start took %s, and the budget is %s", longest, budget)
	}
}

// BenchmarkReadiness tells how long who routes the traffic waits for its answer while the service is abused: by a thousand clients that never
// finish their headers, and by ten times as many payments as it takes.
func BenchmarkReadiness(b *testing.B) {
	const (
		budget   = 100 * time.Millisecond
		interval = 10 * time.Millisecond
	)
	report := func(b *testing.B, looks []servicetest.Took) {
		b.Helper()
		p99 := servicetest.P99(looks)
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(milliseconds(p99), "readyz-p99-ms")
		b.ReportMetric(milliseconds(looks[len(looks)-1].Took), "readyz-max-ms")
		if p99 >= budget {
			b.Errorf("the p99 of /readyz is %s, and the budget is %s", p99, budget)
		}
	}
	look := func(c *servicetest.Caller, _ int) error {
		return c.Send(http.StatusOK, http.MethodGet, "/readyz", "", "")
	}

	b.Run("SlowClients", func(b *testing.B) {
		const slow = 1000
		s := newStage(b, newQuickGateway(b))
		for b.Loop() {
			slowClients(b, s.service, slow)
			// As long as the service bears with them.
			report(b, servicetest.Every(b, servicetest.NewCallers(b, 20, s.url, s.apiKey), interval, servicetest.For(readHeaderTimeout), look))
		}
	})

	b.Run("Overload", func(b *testing.B) {
		const (
			most      = 100
			latency   = 800 * time.Millisecond
			perSecond = 10 * most * int(time.Second) / int(latency)
			lasts     = 10 * time.Second
		)
		s := newStage(b, "http://"+newGateway(b, latency).address, fmt.Sprintf("MAX_IN_FLIGHT=%d", most))
		for b.Loop() {
			orders := s.newOrders(b, 2*perSecond*int(lasts.Seconds()))
			payers := servicetest.NewCallers(b, 2*most+perSecond/10, s.url, s.apiKey)
			var paid, refused atomic.Int64
			stop, done := servicetest.For(lasts), make(chan struct{})
			go func() {
				defer close(done)
				servicetest.Every(b, payers, time.Second/time.Duration(perSecond), stop, func(c *servicetest.Caller, i int) error {
					err := pay(c, orders[i])
					switch {
					case err == nil:
						paid.Add(1)
					case strings.Contains(err.Error(), "/problems/overloaded"):
						refused.Add(1)
						err = nil
					}
					return err
				})
			}()
			looks := servicetest.Every(b, servicetest.NewCallers(b, 20, s.url, s.apiKey), interval, servicetest.For(lasts), look)
			<-done
			report(b, looks)
			b.ReportMetric(float64(paid.Load())/lasts.Seconds(), "paid/s")
			b.ReportMetric(float64(refused.Load())/lasts.Seconds(), "refused/s")
		}
	})
}
