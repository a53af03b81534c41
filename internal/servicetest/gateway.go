package servicetest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"example.com/payments/internal/gateway"
	"example.com/payments/internal/gateway/simulator"
	"example.com/payments/internal/payments"
)

// The gateway's routes, as [Gateway.On] and [Gateway.Calls] know them.
const (
	PostCharge   = "POST /charges"
	GetCharge    = "GET /charges/{key}"
	CancelCharge = "POST /charges/{key}/cancel"
	PostRefund   = "POST /refunds"
	GetRefund    = "GET /refunds/{key}"
	CancelRefund = "POST /refunds/{key}/cancel"
)

// Gateway is the simulator behind real HTTP, and everything that can come between the two.
type Gateway struct {
	URL string

	t         testing.TB
	simulator *simulator.Simulator
	server    *http.Server
	clients   []*gateway.Client

	mu     sync.Mutex
	rules  []*rule // the newest that fits decides
	calls  map[string]int
	events []func()
}

// Handler answers instead of the simulator, which it may ask.
type Handler func(w http.ResponseWriter, r *http.Request, simulator http.Handler)

type rule struct {
	route   string
	left    int // how many requests it is still for
	handler Handler
}

func newGateway(t testing.TB, latency time.Duration) *Gateway {
	t.Helper()
	sim, err := simulator.Open(filepath.Join(t.TempDir(), "ledger.jsonl"), simulator.Options{Latency: latency})
	if err != nil {
		t.Fatal(err)
	}
	g := &Gateway{t: t, simulator: sim, calls: map[string]int{}}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g.URL = "http://" + listener.Addr().String()
	g.serve(listener)
	return g
}

func (g *Gateway) serve(listener net.Listener) {
	server := &http.Server{Handler: g, ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: patience}
	g.mu.Lock()
	g.server = server
	g.mu.Unlock()
	go func() { _ = server.Serve(listener) }()
}

// Down closes the gateway's port and all connections to it; Up opens it again. What is in the ledger stays there.
func (g *Gateway) Down() {
	g.mu.Lock()
	server, clients := g.server, slices.Clone(g.clients)
	g.mu.Unlock()
	_ = server.Close()
	for _, client := range clients {
		client.CloseIdleConnections() // or one of them finds out by using one
	}
}

// Up is the end of [Gateway.Down].
func (g *Gateway) Up() {
	g.t.Helper()
	address := strings.TrimPrefix(g.URL, "http://")
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		listener, err := net.Listen("tcp", address)
		if err == nil {
			g.serve(listener)
			return
		}
		if time.Now().After(deadline) {
			g.t.Fatal(err)
		}
	}
}

func (g *Gateway) close() {
	_ = g.simulator.Close()
	g.Down()
}

func (g *Gateway) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// Read to its end, or net/http does not notice that the client leaves.
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	r.Body = io.NopCloser(bytes.NewReader(body))
	if handler := g.handlerFor(routeOf(r)); handler != nil {
		handler(w, r, g.simulator)
		return
	}
	g.simulator.ServeHTTP(w, r)
}

func routeOf(r *http.Request) string {
	parts := strings.Split(r.URL.Path, "/")
	if len(parts) > 2 {
		parts[2] = "{key}"
	}
	return r.Method + " " + strings.Join(parts, "/")
}

func (g *Gateway) handlerFor(route string) Handler {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.calls[route]++
	for _, rule := range slices.Backward(g.rules) {
		if rule.route == route && rule.left > 0 {
			rule.left--
			return rule.handler
		}
	}
	return nil
}

// Calls tells how many requests of a route have come.
func (g *Gateway) Calls(route string) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.calls[route]
}

// Always is the number of requests that a rule is for when it is for all.
const Always = 1 << 30

// On hands the next requests of a route, times of them, to the handler. The function that it returns ends that.
func (g *Gateway) On(route string, times int, handler Handler) (off func()) {
	added := &rule{route: route, left: times, handler: handler}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.rules = append(g.rules, added)
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		added.left = 0
	}
}

// Answers is a handler that says always the same. The simulator does not see the request.
func Answers(status int, body string) Handler {
	return func(w http.ResponseWriter, _ *http.Request, _ http.Handler) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// Cuts is a handler that closes the connection without a word.
func Cuts(http.ResponseWriter, *http.Request, http.Handler) { panic(http.ErrAbortHandler) }

// Silent is a handler that says nothing until the client leaves.
func Silent(_ http.ResponseWriter, r *http.Request, _ http.Handler) {
	<-r.Context().Done()
	panic(http.ErrAbortHandler)
}

// After is a handler that has the simulator do its work, keeps its answer, and goes on with another handler.
func After(then Handler) Handler {
	return func(w http.ResponseWriter, r *http.Request, simulator http.Handler) {
		simulator.ServeHTTP(httptest.NewRecorder(), r)
		then(w, r, simulator)
	}
}

// Hold is a place where requests stay until the test lets them go.
type Hold struct {
	t       testing.TB
	arrived chan struct{}
	free    chan struct{}
	release func()
}

func (g *Gateway) hold() *Hold {
	h := &Hold{t: g.t, arrived: make(chan struct{}, Always>>10), free: make(chan struct{})}
	h.release = sync.OnceFunc(func() { close(h.free) })
	g.mu.Lock()
	defer g.mu.Unlock()
	g.events = append(g.events, h.release)
	return h
}

func (h *Hold) stay(r *http.Request) {
	h.arrived <- struct{}{}
	select {
	case <-h.free:
	case <-r.Context().Done():
		panic(http.ErrAbortHandler)
	}
}

// HoldBefore keeps the next requests of a route, times of them, from the simulator.
func (g *Gateway) HoldBefore(route string, times int) *Hold {
	h := g.hold()
	g.On(route, times, func(w http.ResponseWriter, r *http.Request, simulator http.Handler) {
		h.stay(r)
		simulator.ServeHTTP(w, r)
	})
	return h
}

// HoldAfter has the simulator do its work and keeps the answers from leaving.
func (g *Gateway) HoldAfter(route string, times int) *Hold {
	h := g.hold()
	g.On(route, times, func(w http.ResponseWriter, r *http.Request, simulator http.Handler) {
		answer := httptest.NewRecorder()
		simulator.ServeHTTP(answer, r)
		h.stay(r)
		w.Header().Set("Content-Type", answer.Header().Get("Content-Type"))
		w.WriteHeader(answer.Code)
		_, _ = w.Write(answer.Body.Bytes())
	})
	return h
}

// Arrived waits until a request, another one with every call, is held.
func (h *Hold) Arrived() {
	h.t.Helper()
	await(h.t, "the gateway has the request", h.arrived)
}

// Release lets all requests go, those that are held and those to come.
func (h *Hold) Release() { h.release() }

func (g *Gateway) releaseAll() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, release := range g.events {
		release()
	}
}

// Entry is one charge or refund in the gateway's ledger.
type Entry struct {
	ID            string `json:"id"`
	Key           string `json:"key"`
	Status        string `json:"status"`
	Amount        int64  `json:"amount"`
	Currency      string `json:"currency"`
	PaymentMethod string `json:"payment_method"`
	ChargeKey     string `json:"charge_key"`
}

// Charges is the gateway's ledger.
func (g *Gateway) Charges() []Entry { g.t.Helper(); return g.ledger("/charges") }

// Refunds is the gateway's other ledger.
func (g *Gateway) Refunds() []Entry { g.t.Helper(); return g.ledger("/refunds") }

func (g *Gateway) ledger(path string) []Entry {
	g.t.Helper()
	answer := httptest.NewRecorder()
	g.simulator.ServeHTTP(answer, httptest.NewRequest(http.MethodGet, path, nil))
	var ledger struct{ Data []Entry }
	if err := json.Unmarshal(answer.Body.Bytes(), &ledger); err != nil {
		g.t.Fatalf("ledger: %v", err)
	}
	return ledger.Data
}

// Scripted is a gateway inside the process, for what cannot be had from outside. A function that is nil is the real gateway's.
type Scripted struct {
	payments.Gateway
	OnCharge func(ctx context.Context, intent payments.Intent) (payments.Outcome, error)
	OnLookUp func(ctx context.Context, intent payments.Intent) (payments.Outcome, error)
}

func (s Scripted) Charge(ctx context.Context, intent payments.Intent) (payments.Outcome, error) {
	if s.OnCharge != nil {
		return s.OnCharge(ctx, intent)
	}
	return s.Gateway.Charge(ctx, intent)
}

func (s Scripted) LookUp(ctx context.Context, intent payments.Intent) (payments.Outcome, error) {
	if s.OnLookUp != nil {
		return s.OnLookUp(ctx, intent)
	}
	return s.Gateway.LookUp(ctx, intent)
}

// Dies makes a replica whose workers are gone from one moment to the next, as after a kill -9 of their process: nothing is recorded,
// nothing released, and the client's connection breaks. It happens where the charge is sent, before the gateway has it or after the
// gateway has made it.
func Dies(afterCharge bool) func(payments.Gateway) payments.Gateway {
	return func(real payments.Gateway) payments.Gateway {
		return Scripted{Gateway: real, OnCharge: func(ctx context.Context, intent payments.Intent) (payments.Outcome, error) {
			if afterCharge {
				if _, err := real.Charge(ctx, intent); err != nil {
					panic(err)
				}
			}
			runtime.Goexit()
			return payments.Outcome{}, errors.New("unreachable")
		}}
	}
}

// Do asks the simulator past everything that is between. The request is not counted.
func (g *Gateway) Do(method, path string) (status int, body string) {
	answer := httptest.NewRecorder()
	g.simulator.ServeHTTP(answer, httptest.NewRequest(method, path, nil))
	return answer.Code, answer.Body.String()
}
