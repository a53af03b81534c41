// Package servicetest is the world that the service's promises are tested in: a real PostgreSQL, the simulated gateway over real
// HTTP, as many replicas of the service as a test wants, and a client.
//
// A test makes the world misbehave from outside, never by a change of the service:
//
//	w.Gateway       refuses, hangs, talks nonsense, goes away and comes back, or is held at a request for as long as the test wants
//	w.Link          the network to the database: it can be cut, or lose the answer to one statement that was carried out
//	r.Queries       what a replica says to its database: counted, and held at a statement
//	Dies            a worker that is gone from one moment to the next
//	w.ExpireLease   time that has passed: the row is moved, not the clock
//
// However a test ends, [World] holds its database against the gateway's ledger (see invariants.go) and looks for secrets in its logs.
package servicetest

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"regexp"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"example.com/payments/internal/api"
	"example.com/payments/internal/gateway"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

const (
	// PublicURL begins the type of every problem.
	PublicURL = "https://payments.test"
	// A signal that has not come after this will not come. Nobody waits so long in a test that passes.
	patience = 30 * time.Second
)

// Options are what a test is about. Their zero values are a world in which nothing happens by the passing of time.
type Options struct {
	Latency        time.Duration // of the simulated gateway
	GatewayTimeout time.Duration // 20 s if zero
	LeaseTTL       time.Duration // 1 m if zero
	KeyRetention   time.Duration // 24 h if zero
	ReapInterval   time.Duration // 1 h if zero
	ReapAfter      time.Duration // 2 h if zero
	DBMaxConns     int32         // 10 if zero; one of them is for the renewals
	AcquireTimeout time.Duration // 10 s if zero
	RateLimit      float64       // off if zero
	Background     bool          // run what serve runs beside the requests: renewals, wake-ups, reaper and purge
	Link           bool          // put World.Link between the replicas and the database
	Quiet          bool          // do not repeat in a failure what the replicas have logged: a benchmark's are a hundred thousand lines

	// Gateway, if set, is put between a replica and the gateway's client.
	Gateway func(payments.Gateway) payments.Gateway
}

func (o Options) withDefaults() Options {
	setDefault(&o.GatewayTimeout, 20*time.Second)
	setDefault(&o.LeaseTTL, time.Minute)
	setDefault(&o.KeyRetention, 24*time.Hour)
	setDefault(&o.ReapInterval, time.Hour)
	setDefault(&o.ReapAfter, 2*time.Hour)
	setDefault(&o.DBMaxConns, 10)
	setDefault(&o.AcquireTimeout, 10*time.Second)
	return o
}

func setDefault[T comparable](value *T, otherwise T) {
	var zero T
	if *value == zero {
		*value = otherwise
	}
}

// World has one database, one gateway, and at first one merchant and one replica. Its client is that merchant's at that replica.
type World struct {
	*Client
	*Replica
	DatabaseURL string
	DB          *pgxpool.Pool // the test's own way to the database, never through Link
	Link        *Link         // nil unless asked for
	Gateway     *Gateway
	Merchant    Merchant

	t        testing.TB
	options  Options
	mu       sync.Mutex
	replicas []*Replica
	altered  bool // more than rows are not as they were
}

// Merchant is somebody with an API key.
type Merchant struct {
	ID     uuid.UUID
	APIKey string
}

// New builds a world. When the test ends, everything in it comes to its end, the invariants are checked, and everything is stopped.
func New(t testing.TB, options Options) *World {
	t.Helper()
	w := &World{t: t, options: options.withDefaults()}
	w.openDatabase()
	w.Gateway = newGateway(t, options.Latency)
	if options.Link {
		w.Link = newLink(t, w.DatabaseURL)
	}
	t.Cleanup(w.end)
	w.Replica = w.NewReplica(options)
	w.Merchant = w.NewMerchant("first")
	w.Client = w.Replica.As(w.Merchant)
	return w
}

// end lets everything come to its end, checks what must hold then, and stops everything.
func (w *World) end() {
	w.Gateway.releaseAll()
	if w.Link != nil {
		w.Link.Restore()
	}
	for _, r := range w.replicas {
		r.Queries.letGo()
		r.Service.StopWaiting()
	}
	for _, r := range w.replicas {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		if err := r.Service.Drain(ctx); err != nil {
			w.t.Errorf("attempts are left that do not end: %v", err)
		}
		cancel()
	}
	w.checkInvariants()
	for _, r := range w.replicas {
		r.stop()
		if secret := secrets.FindString(r.Log.String()); secret != "" {
			w.t.Errorf("%q is in the log of %s", secret, r.URL)
		}
	}
	w.Gateway.close()
	if w.Link != nil {
		w.Link.close()
	}
	w.passOn()
}

// NewMerchant registers a merchant.
func (w *World) NewMerchant(name string) Merchant {
	w.t.Helper()
	id, apiKey, err := w.Replica.Merchants.Create(w.t.Context(), name)
	if err != nil {
		w.t.Fatalf("create merchant: %v", err)
	}
	return Merchant{ID: id, APIKey: apiKey}
}

// Replica is one process of the service, as far as one process can hold several.
type Replica struct {
	URL       string
	Service   *payments.Service
	API       *api.Server
	Merchants *payments.Merchants
	Reaper    *payments.Reaper
	Pool      *postgres.Pool
	Queries   *Queries
	Metrics   *prometheus.Registry
	Log       *Log

	world  *World
	server *httptest.Server
	stop   func()
}

// NewReplica starts another replica of the service, with settings of its own.
func (w *World) NewReplica(options Options) *Replica {
	w.t.Helper()
	options = options.withDefaults()
	r := &Replica{world: w, Queries: newQueries(w.t), Metrics: prometheus.NewRegistry(), Log: new(Log)}
	log := slog.New(slog.NewTextHandler(r.Log, &slog.HandlerOptions{Level: slog.LevelDebug}))

	address := w.DatabaseURL
	if w.Link != nil {
		address = w.Link.URL
	}
	open := func(conns int32) *postgres.Pool {
		pool, err := postgres.Open(context.Background(), address, postgres.Options{
			MaxConns: conns, AcquireTimeout: options.AcquireTimeout, Tracer: r.Queries,
		})
		if err != nil {
			w.t.Fatal(err)
		}
		return pool
	}
	pool, renewals := open(options.DBMaxConns-1), open(1)
	r.Pool = pool

	client, err := gateway.New(w.Gateway.URL)
	if err != nil {
		w.t.Fatal(err)
	}
	w.Gateway.mu.Lock()
	w.Gateway.clients = append(w.Gateway.clients, client)
	w.Gateway.mu.Unlock()
	var theGateway payments.Gateway = client
	if options.Gateway != nil {
		theGateway = options.Gateway(client)
	}
	r.Service = payments.New(pool, renewals, theGateway, api.Answers{PublicURL: PublicURL}, payments.Settings{
		Holder: fmt.Sprintf("replica %d", len(w.replicas)+1), LeaseTTL: options.LeaseTTL, GatewayTimeout: options.GatewayTimeout,
		KeyRetention: options.KeyRetention, ReapInterval: options.ReapInterval, ReapAfter: options.ReapAfter,
		Metrics: r.Metrics,
	}, log)
	r.Reaper = payments.NewReaper(r.Service)
	r.Merchants = payments.NewMerchants(pool, false)
	r.API = api.New(api.Config{
		Payments: r.Service, Merchants: r.Merchants, PublicURL: PublicURL, KeyRetention: options.KeyRetention,
		RateLimit: options.RateLimit, InFlightMax: options.GatewayTimeout + payments.RecordBudget, Metrics: r.Metrics, Log: log,
		Ready: func(ctx context.Context) error {
			if _, err := pool.Exec(ctx, "SELECT 1"); err != nil {
				return fmt.Errorf("%w: %w", payments.ErrStorageUnavailable, err)
			}
			return nil
		},
	})
	r.server = httptest.NewUnstartedServer(r.API)
	r.server.Config.ErrorLog = slog.NewLogLogger(log.Handler(), slog.LevelDebug)
	r.server.Start()
	r.URL = r.server.URL

	background, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	if options.Background {
		go func() { done <- r.Service.Run(background) }()
	} else {
		done <- nil
	}
	r.stop = sync.OnceFunc(func() {
		r.server.Close()
		cancel()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			w.t.Errorf("the background ended with %v", err)
		}
		client.CloseIdleConnections()
		renewals.Close()
		pool.Close()
		if w.t.Failed() && !options.Quiet {
			w.t.Logf("%s\n%s", r.URL, r.Log)
		}
	})
	w.mu.Lock()
	w.replicas = append(w.replicas, r)
	w.mu.Unlock()
	return r
}

// Stop ends a replica as a deploy does: what it has begun is finished first.
func (r *Replica) Stop() {
	r.Queries.letGo()
	r.stop()
}

// secrets are what is never in a log, whatever happens: API keys, the keys that [Client.NewKey] gives, and the gateway's tokens.
var secrets = regexp.MustCompile(`\b(sk_|key-\d|pm_)\w*`)

// Log keeps what a replica has logged.
type Log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *Log) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(line)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// Eventually waits for something that no signal tells of.
func (w *World) Eventually(what string, happened func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(patience); !happened(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("waited in vain until %s", what)
		}
	}
}

// await waits for a signal.
func await(t testing.TB, what string, signal <-chan struct{}) {
	t.Helper()
	select {
	case <-signal:
	case <-time.After(patience):
		t.Fatalf("waited in vain until %s", what)
	}
}

// Context ends with the test.
func (w *World) Context() context.Context { return w.t.Context() }

// MoreAtOnce lets more tests run at the same time than there are processors, unless the command line says how many: most of them wait for
// a disk or a timer most of the time. It also spends memory, of which there is enough, to collect garbage less often. It belongs before
// the tests run.
func MoreAtOnce() {
	flag.Parse()
	told := false
	flag.Visit(func(f *flag.Flag) { told = told || f.Name == "test.parallel" })
	if !told {
		_ = flag.Set("test.parallel", strconv.Itoa(3*runtime.GOMAXPROCS(0)))
	}
	debug.SetGCPercent(400)
}

// Shutdown ends the replica's HTTP server as serve does.
func (r *Replica) Shutdown(ctx context.Context) error { return r.server.Config.Shutdown(ctx) }
