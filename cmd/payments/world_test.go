package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"example.com/payments/internal/dbtest"
	"example.com/payments/internal/gateway/simulator"
)

const (
	// The gateway of these tests. Slow enough to be caught at work.
	latency = 200 * time.Millisecond
	// As short as leaves a busy machine the time to renew one.
	leaseTTL = 2 * time.Second
)

// testBundle is a world with a database, a gateway and a merchant, in which a test starts processes of the service. Database and
// gateway are reached over wires that the test can cut.
type testBundle struct {
	databaseURL  string // straight to it
	pool         *pgxpool.Pool
	databaseWire *wire
	gateway      *testGateway
	gatewayWire  *wire
	apiKey       string
}

func setup(t *testing.T) *testBundle {
	t.Helper()
	return setupWithLatency(t, latency)
}

func setupWithLatency(t *testing.T, latency time.Duration) *testBundle {
	t.Helper()
	b := &testBundle{databaseURL: dbtest.New(t), gateway: newGateway(t, latency)}
	b.pool = dbtest.Pool(t, b.databaseURL)
	config, err := pgx.ParseConfig(b.databaseURL)
	require.NoError(t, err)
	network, address := pgconn.NetworkAddress(config.Host, config.Port)
	b.databaseWire = newWire(t, network, address)
	b.gatewayWire = newWire(t, "tcp", b.gateway.address)
	b.apiKey = newMerchant(t, b.databaseURL)
	return b
}

// newMerchant creates a merchant as an operator would and returns its API key.
func newMerchant(t testing.TB, databaseURL string) string {
	t.Helper()
	status, stdout, stderr := inProcess(t, "merchant", "create", "Shop", "--database-url", databaseURL)
	require.Zero(t, status, stderr)
	_, apiKey, found := strings.Cut(stdout, "api_key")
	require.True(t, found)
	return strings.TrimSpace(apiKey)
}

// merchantID is the id of the world's one merchant.
func (b *testBundle) merchantID(t *testing.T) (id string) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), "SELECT id::text FROM merchants").Scan(&id))
	return id
}

// settings are those of this world, with the given ones before them.
func (b *testBundle) settings(t *testing.T, settings ...string) []string {
	t.Helper()
	// DATABASE_URL may have either of PostgreSQL's forms.
	wired := b.databaseURL + strings.ReplaceAll(" host="+b.databaseWire.address, ":", " port=")
	if address, err := url.Parse(b.databaseURL); err == nil && address.Scheme != "" {
		address.Host = b.databaseWire.address
		wired = address.String()
	}
	return append([]string{
		"DATABASE_URL=" + wired,
		"GATEWAY_URL=http://" + b.gatewayWire.address,
		"LISTEN_ADDR=127.0.0.1:0",
		"LEASE_TTL=" + leaseTTL.String(),
		"REAP_INTERVAL=500ms",
		"DB_ACQUIRE_TIMEOUT=1300ms",
	}, settings...)
}

// patient are the settings of a service that many come to at once, on a machine that is busy with all the other tests.
var patient = []string{"LEASE_TTL=30s", "DB_ACQUIRE_TIMEOUT=15s"}

// execute runs a command in this world to its end.
func (b *testBundle) execute(t *testing.T, args ...string) (status int, p *program) {
	t.Helper()
	return execute(t, b.settings(t, "DB_ACQUIRE_TIMEOUT=10s"), args...) // Nobody waits for it.
}

// service is a running `payments serve`.
type service struct {
	*program
	url string
}

// serve starts a process of the service and returns when it listens.
func (b *testBundle) serve(t *testing.T, settings ...string) *service {
	t.Helper()
	p := start(t, b.settings(t, settings...), "serve")
	return &service{p, "http://" + p.await(t, &p.stderr, `(?:msg=serving address=|"msg":"serving","address":")([^\s"]+)`)}
}

// ready starts a process of the service and returns when it is ready.
func (b *testBundle) ready(t *testing.T, settings ...string) *service {
	t.Helper()
	s := b.serve(t, settings...)
	s.awaitReady(t)
	return s
}

func (s *service) awaitReady(t testing.TB) {
	t.Helper()
	eventually(t, "the service is ready", func() bool { return s.get(t, "/readyz").status == http.StatusOK })
}

func (s *service) get(t testing.TB, path string) answer {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+path, nil)
	require.NoError(t, err)
	return send(request)
}

// answer is what a client gets; err is a connection that could not be made or broke.
type answer struct {
	status int
	header http.Header
	body   string
	err    error
}

// client makes a new connection for every request: a kept one would tie it to a process that is gone.
var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}

func send(request *http.Request) answer {
	response, err := client.Do(request)
	if err != nil {
		return answer{err: err}
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	return answer{response.StatusCode, response.Header, string(body), err}
}

func (a answer) String() string { return fmt.Sprintf("%d %v %s %v", a.status, a.header, a.body, a.err) }

// field is a text member of the body.
func (a answer) field(name string) string {
	var members map[string]any
	_ = json.Unmarshal([]byte(a.body), &members)
	value, _ := members[name].(string)
	return value
}

// slug names the problem.
func (a answer) slug() string {
	problem := a.field("type")
	return problem[strings.LastIndex(problem, "/")+1:]
}

func (a answer) replayed() string { return a.header.Get("Idempotent-Replayed") }

// intent is a payment that a client wants, and the key it has given it.
type intent struct {
	key, orderID, prefer string
}

// request posts with the merchant's credentials.
func (b *testBundle) request(ctx context.Context, t *testing.T, s *service, path, key, body string) *http.Request {
	t.Helper()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+path, strings.NewReader(body))
	require.NoError(t, err)
	request.Header.Set("Authorization", "Bearer "+b.apiKey)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", key)
	return request
}

// intend creates an order and returns the intent to pay it.
func (b *testBundle) intend(t *testing.T, s *service) intent {
	t.Helper()
	key := "intent-" + strconv.FormatInt(intents.Add(1), 10)
	created := send(b.request(t.Context(), t, s, "/v1/orders", "order-of-"+key, `{"amount":1999,"currency":"EUR"}`))
	require.Equal(t, http.StatusCreated, created.status, created)
	return intent{key: key, orderID: created.field("id")}
}

var intents atomic.Int64

func (b *testBundle) paymentRequest(ctx context.Context, t *testing.T, s *service, i intent) *http.Request {
	t.Helper()
	request := b.request(ctx, t, s, "/v1/payments", i.key, `{"order_id":"`+i.orderID+`","amount":1999,"currency":"EUR","payment_method":"pm_ok"}`)
	if i.prefer != "" {
		request.Header.Set("Prefer", i.prefer)
	}
	return request
}

func (b *testBundle) pay(t *testing.T, s *service, i intent) answer {
	t.Helper()
	return send(b.paymentRequest(t.Context(), t, s, i))
}

// startPaying is pay for a test that has something to do meanwhile.
func (b *testBundle) startPaying(ctx context.Context, t *testing.T, s *service, i intent) <-chan answer {
	t.Helper()
	request := b.paymentRequest(ctx, t, s, i)
	got := make(chan answer, 1)
	go func() { got <- send(request) }()
	return got
}

// receive waits for what startPaying has begun.
func receive[T any](t *testing.T, c <-chan T) (value T) {
	t.Helper()
	select {
	case value = <-c:
	case <-time.After(patience):
		t.Fatal("nothing came")
	}
	return value
}

// row is what the database has on an intent; the zero row is nothing.
type row struct {
	key, payment, order string // state and statuses
	attempt             int
	looked              time.Time // when the reaper looks next
	events              int
}

func (b *testBundle) row(t *testing.T, i intent) (r row) {
	t.Helper()
	rows, err := b.pool.Query(t.Context(), `
		SELECT k.state, p.status, o.status, k.attempt, k.next_look_at, (SELECT count(*) FROM events WHERE resource_id = p.id)
		FROM idempotency_keys AS k
		JOIN payments AS p ON p.id = k.resource_id
		JOIN orders AS o ON o.id = p.order_id
		WHERE k.key = $1`, i.key)
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		require.Zero(t, r, "a key has one payment")
		require.NoError(t, rows.Scan(&r.key, &r.payment, &r.order, &r.attempt, &r.looked, &r.events))
	}
	require.NoError(t, rows.Err())
	return r
}

// everything is all that the database has on an intent, byte for byte.
func (b *testBundle) everything(t *testing.T, i intent) (all string) {
	t.Helper()
	require.NoError(t, b.pool.QueryRow(t.Context(), `
		SELECT concat_ws(E'\n', to_jsonb(k), to_jsonb(p), to_jsonb(o), (SELECT jsonb_agg(e ORDER BY number) FROM events AS e WHERE resource_id = p.id))
		FROM idempotency_keys AS k
		JOIN payments AS p ON p.id = k.resource_id
		JOIN orders AS o ON o.id = p.order_id
		WHERE k.key = $1`, i.key).Scan(&all))
	return all
}

// keepReaperAway leaves a key to its clients.
func (b *testBundle) keepReaperAway(t *testing.T, i intent) {
	t.Helper()
	_, err := b.pool.Exec(t.Context(), "UPDATE idempotency_keys SET next_look_at = now() + interval '1 hour' WHERE key = $1", i.key)
	require.NoError(t, err)
}

// testGateway is the simulator behind real HTTP, and in front of it doors at which requests can be held.
type testGateway struct {
	address   string
	simulator *simulator.Simulator
	posts     atomic.Int64 // requests to charge that have arrived

	traceparent atomic.Value // of the last of them

	mu    sync.Mutex
	doors map[door]*held
}

// door is a place on a request's way.
type door string

const (
	beforeCharge door = "before POST" // the gateway has not seen it
	afterCharge  door = "after POST"  // it is in the ledger, and the answer is under way
	beforeLookUp door = "before GET"
	afterCancel  door = "after cancel"
)

// held is a door that is shut.
type held struct {
	reached, left chan struct{} // closed when the first request stands before it, and when the first has been given up by its client
	opened        chan struct{}
	first, last   sync.Once
	open          func() // lets all of them go, now and from now on
}

func newGateway(t testing.TB, latency time.Duration) *testGateway {
	t.Helper()
	sim, err := simulator.Open(filepath.Join(t.TempDir(), "ledger"), simulator.Options{Latency: latency})
	require.NoError(t, err)
	g := &testGateway{simulator: sim, doors: make(map[door]*held)}
	server := httptest.NewServer(g)
	g.address = server.Listener.Addr().String()
	t.Cleanup(func() {
		g.mu.Lock()
		for _, h := range g.doors {
			h.open()
		}
		g.mu.Unlock()
		require.NoError(t, sim.Close())
		server.Close()
	})
	return g
}

// shut closes a door.
func (g *testGateway) shut(at door) *held {
	h := &held{reached: make(chan struct{}), left: make(chan struct{}), opened: make(chan struct{})}
	h.open = sync.OnceFunc(func() { close(h.opened) })
	g.mu.Lock()
	defer g.mu.Unlock()
	g.doors[at] = h
	return h
}

// pass returns when the door is open. A client that has left meanwhile is sent no further.
func (g *testGateway) pass(ctx context.Context, at door) {
	g.mu.Lock()
	h := g.doors[at]
	g.mu.Unlock()
	if h == nil {
		return
	}
	h.first.Do(func() { close(h.reached) })
	select {
	case <-h.opened:
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		h.last.Do(func() { close(h.left) })
		panic(http.ErrAbortHandler)
	}
}

func (g *testGateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body) // To its end: only then does net/http notice that a client leaves.
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	kind := "POST"
	switch {
	case r.Method == http.MethodGet:
		kind = "GET"
	case strings.HasSuffix(r.URL.Path, "/cancel"):
		kind = "cancel"
	default:
		g.posts.Add(1)
		g.traceparent.Store(r.Header.Get("Traceparent"))
	}
	g.pass(r.Context(), door("before "+kind))
	answer := httptest.NewRecorder()
	g.simulator.ServeHTTP(answer, r)
	g.pass(r.Context(), door("after "+kind))
	w.Header().Set("Content-Type", answer.Header().Get("Content-Type"))
	w.WriteHeader(answer.Code)
	_, _ = w.Write(answer.Body.Bytes())
}

// charges are the statuses of all charges in the ledger.
func (g *testGateway) charges(t *testing.T) []string {
	t.Helper()
	return ledger(t, func(r *http.Request) answer {
		w := httptest.NewRecorder()
		g.simulator.ServeHTTP(w, r)
		return answer{status: w.Code, body: w.Body.String()}
	}, "")
}

// ledger reads a simulator's charges.
func ledger(t *testing.T, send func(*http.Request) answer, url string) (statuses []string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/charges", nil)
	require.NoError(t, err)
	got := send(request)
	require.Equal(t, http.StatusOK, got.status, got)
	var list struct {
		Data []struct {
			Status string `json:"status"`
		} `json:"data"`
	}
	require.NoError(t, json.Unmarshal([]byte(got.body), &list))
	for _, charge := range list.Data {
		statuses = append(statuses, charge.Status)
	}
	return statuses
}

// wire is a way to a server that a test can cut and mend. While it is cut, connections are refused, and the address stays taken.
type wire struct {
	address, network, target string
	connections              atomic.Int64 // all that were ever made

	mu          sync.Mutex
	listener    net.Listener
	closed      chan struct{} // when the listener is
	conns       map[net.Conn]struct{}
	placeholder int
	marker      []byte
}

func newWire(t *testing.T, network, target string) *wire {
	t.Helper()
	w := &wire{address: "127.0.0.1:0", network: network, target: target, conns: make(map[net.Conn]struct{}), placeholder: -1}
	w.mend(t)
	t.Cleanup(func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		w.close()
	})
	return w
}

func (w *wire) mend(t *testing.T) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.close()
	listener, err := net.Listen("tcp4", w.address)
	require.NoError(t, err)
	closed := make(chan struct{})
	w.listener, w.closed, w.address = listener, closed, listener.Addr().String()
	go func() {
		defer close(closed)
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			w.connections.Add(1)
			go w.carry(listener, near)
		}
	}()
}

// cut breaks all connections and refuses new ones.
func (w *wire) cut(t *testing.T) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.close()
	// A socket that is bound and does not listen.
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	require.NoError(t, err)
	syscall.CloseOnExec(fd)
	w.placeholder = fd
	require.NoError(t, syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1))
	address, err := net.ResolveTCPAddr("tcp4", w.address)
	require.NoError(t, err)
	eventually(t, "the port is free", func() bool { // A child that was just forked may have a copy of the listener for a moment.
		return syscall.Bind(fd, &syscall.SockaddrInet4{Port: address.Port, Addr: [4]byte{127, 0, 0, 1}}) == nil
	})
}

// close takes down what there is. The caller holds mu.
func (w *wire) close() {
	if w.listener != nil {
		_ = w.listener.Close()
		<-w.closed
		w.listener = nil
	}
	for conn := range w.conns {
		_ = conn.Close()
	}
	clear(w.conns)
	if w.placeholder >= 0 {
		_ = syscall.Close(w.placeholder)
		w.placeholder = -1
	}
}

func (w *wire) isCut() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.listener == nil
}

// loseAnswerTo lets the next request that has the marker in it through, and nothing back on its connection from then on.
func (w *wire) loseAnswerTo(marker string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.marker = []byte(marker)
}

func (w *wire) marked(p []byte) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.marker) == 0 || !bytes.Contains(p, w.marker) {
		return false
	}
	w.marker = nil
	return true
}

// carry copies both ways until either side ends, or the wire on which the connection came is cut.
func (w *wire) carry(listener net.Listener, near net.Conn) {
	defer near.Close()
	far, err := net.Dial(w.network, w.target)
	if err != nil {
		return
	}
	defer far.Close()
	w.mu.Lock()
	if w.listener != listener {
		w.mu.Unlock()
		return
	}
	w.conns[near], w.conns[far] = struct{}{}, struct{}{}
	w.mu.Unlock()
	var lost atomic.Bool
	copied := func(to, from net.Conn, look func([]byte) bool) {
		buffer := make([]byte, 64<<10)
		for {
			n, err := from.Read(buffer)
			if err == nil && look(buffer[:n]) {
				_, err = to.Write(buffer[:n])
			}
			if err != nil {
				_ = near.Close()
				_ = far.Close()
				return
			}
		}
	}
	go copied(near, far, func([]byte) bool { return !lost.Load() })
	copied(far, near, func(p []byte) bool {
		if w.marked(p) {
			lost.Store(true)
		}
		return true
	})
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.conns, near)
	delete(w.conns, far)
}
