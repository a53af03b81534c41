package chaos

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// gatewayMode is how the gateway misbehaves towards all of its clients.
type gatewayMode string

const (
	healthy     gatewayMode = ""
	slow        gatewayMode = "slow"         // a second more
	errorBefore gatewayMode = "error before" // its own 500, and it has seen nothing
	errorAfter  gatewayMode = "error after"  // carried out, then its own 500
	hangBefore  gatewayMode = "hang before"  // silence, and it has seen nothing
	hangAfter   gatewayMode = "hang after"   // carried out, then silence
	cutBefore   gatewayMode = "cut before"   // the connection breaks, and it has seen nothing
	cutAfter    gatewayMode = "cut after"    // carried out, then the connection breaks
	unavailable gatewayMode = "503"
	lying       gatewayMode = "lying" // carried out or not, the answer is nonsense
	late        gatewayMode = "late"  // the connection breaks, and the request arrives a second later
)

// gateway is the simulator as a process of its own, and a proxy before it that misbehaves on command.
type gateway struct {
	binary, dir string
	latency     time.Duration

	mu     sync.Mutex
	sim    *process
	simURL string
	starts int
	mode   gatewayMode
	always bool          // the mode meets every request; else two of three, so that some get through and meet what the others have left
	healed chan struct{} // closed when the mode ends: what hangs is let go
	doors  []*door
}

// moment is a place on a request's way through the proxy.
type moment string

const (
	beforeCharge moment = "before POST" // the gateway has not seen it
	afterCharge  moment = "after POST"  // it is in the ledger, and the answer is under way
	afterCancel  moment = "after cancel"
)

// door holds the first request that comes to a moment, of one replica and about one gateway key unless they are left open. Later ones pass.
type door struct {
	replica int    // anyReplica: whichever comes first
	key     string // empty: any
	at      moment
	reached chan struct{}
	opened  chan struct{}
	taken   bool
	by      int // the replica whose request is held, once reached
	open    func()
}

const anyReplica = -1

func newGateway(binary, dir string, latency time.Duration) (*gateway, error) {
	g := &gateway{binary: binary, dir: dir, latency: latency, healed: make(chan struct{})}
	return g, g.start()
}

func (g *gateway) start() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.starts++
	sim, err := startProcess(filepath.Join(g.dir, fmt.Sprintf("gateway.%d.log", g.starts)), []string{
		"LISTEN_ADDR=127.0.0.1:0", "GATEWAY_LEDGER=" + filepath.Join(g.dir, "ledger.jsonl"), "GATEWAY_LATENCY=" + g.latency.String(),
	}, g.binary, "gateway")
	if err != nil {
		return err
	}
	address, err := sim.await(`listening" address=(\S+)`)
	if err != nil {
		return err
	}
	g.sim, g.simURL = sim, "http://"+address
	return nil
}

func (g *gateway) kill() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.sim.kill()
}

func (g *gateway) misbehave(mode gatewayMode) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.mode = mode
	if mode == healthy {
		close(g.healed)
		g.healed = make(chan struct{})
	}
}

// now is how the next thing goes, and a signal for when that is over.
func (g *gateway) now() (gatewayMode, <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.always && rand.IntN(3) == 0 {
		return healthy, g.healed
	}
	return g.mode, g.healed
}

// shut closes a door.
func (g *gateway) shut(replica int, at moment, key string) *door {
	d := &door{replica: replica, at: at, key: key, reached: make(chan struct{}), opened: make(chan struct{})}
	d.open = sync.OnceFunc(func() {
		close(d.opened)
		g.mu.Lock()
		defer g.mu.Unlock()
		d.taken = true
	})
	g.mu.Lock()
	defer g.mu.Unlock()
	g.doors = append(g.doors, d)
	return d
}

func (g *gateway) pass(ctx context.Context, replica int, at moment, key string) {
	g.mu.Lock()
	var shut *door
	kept := g.doors[:0]
	for _, d := range g.doors {
		fits := d.at == at && (d.replica == replica || d.replica == anyReplica) && (d.key == key || d.key == "")
		if !d.taken && fits && shut == nil {
			d.taken, d.by, shut = true, replica, d
		}
		if !d.taken {
			kept = append(kept, d)
		}
	}
	g.doors = kept
	g.mu.Unlock()
	if shut == nil {
		return
	}
	close(shut.reached)
	select {
	case <-shut.opened:
	case <-ctx.Done():
		panic(http.ErrAbortHandler)
	}
}

// serve is the gateway as one replica reaches it.
func (g *gateway) serve(replica int) (address string, err error) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	server := &http.Server{
		Handler:           http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { g.proxy(replica, w, r) }),
		ErrorLog:          log.New(io.Discard, "", 0),
		ReadHeaderTimeout: patience,
	}
	go func() { _ = server.Serve(listener) }()
	return listener.Addr().String(), nil
}

var toSimulator = &http.Transport{MaxIdleConnsPerHost: 500, DisableCompression: true}

// gatewayAnswer is what the simulator has said.
type gatewayAnswer struct {
	status int
	body   []byte
}

func (g *gateway) forward(ctx context.Context, r *http.Request, body []byte) (gatewayAnswer, error) {
	g.mu.Lock()
	target := g.simURL
	g.mu.Unlock()
	request, err := http.NewRequestWithContext(ctx, r.Method, target+r.URL.Path, bytes.NewReader(body))
	if err != nil {
		return gatewayAnswer{}, err
	}
	request.Header = r.Header.Clone()
	request.GetBody = nil
	response, err := toSimulator.RoundTrip(request)
	if err != nil {
		return gatewayAnswer{}, err
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	return gatewayAnswer{response.StatusCode, content}, err
}

func (g *gateway) proxy(replica int, w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body) // To its end: only then does net/http notice that a client leaves.
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	kind, key := " POST", r.Header.Get("Idempotency-Key")
	if parts := strings.Split(r.URL.Path, "/"); len(parts) > 2 {
		kind, key = " GET", parts[2]
		if len(parts) > 3 {
			kind = " cancel"
		}
	}
	g.pass(r.Context(), replica, moment("before"+kind), key)

	mode, healed := g.now()
	hang := func(healed <-chan struct{}) {
		select {
		case <-healed:
		case <-r.Context().Done():
		}
		panic(http.ErrAbortHandler)
	}
	switch mode {
	case slow:
		select {
		case <-time.After(time.Second):
		case <-healed:
		case <-r.Context().Done():
			panic(http.ErrAbortHandler)
		}
	case errorBefore:
		reply(w, http.StatusInternalServerError, `{"error":"internal_error"}`)
		return
	case unavailable:
		reply(w, http.StatusServiceUnavailable, `{"error":"unavailable"}`)
		return
	case hangBefore:
		hang(healed)
	case cutBefore:
		panic(http.ErrAbortHandler)
	case late:
		go func() {
			time.Sleep(time.Second)
			ctx, cancel := context.WithTimeout(context.Background(), patience)
			defer cancel()
			_, _ = g.forward(ctx, r, body) // Nobody is there to be answered.
		}()
		panic(http.ErrAbortHandler)
	}

	answer, err := g.forward(r.Context(), r, body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	g.pass(r.Context(), replica, moment("after"+kind), key)
	mode, healed = g.now()
	switch mode {
	case errorAfter:
		answer = gatewayAnswer{http.StatusInternalServerError, []byte(`{"error":"internal_error"}`)}
	case hangAfter:
		hang(healed)
	case cutAfter:
		panic(http.ErrAbortHandler)
	case lying:
		answer = lies[rand.IntN(len(lies))]
	}
	reply(w, answer.status, string(answer.body))
}

// lies are answers that no gateway gives, about a charge that may be in the ledger.
var lies = []gatewayAnswer{
	{http.StatusOK, []byte(`{"id":"ch_1","key":"another","status":"approved","amount":1,"currency":"EUR"}`)},
	{http.StatusOK, []byte(`<html>It works!</html>`)},
	{http.StatusOK, []byte(`{"status":"approved"`)},
	{http.StatusOK, []byte(`{}`)},
	{http.StatusNotFound, []byte(`<html>404</html>`)},
	{http.StatusBadGateway, []byte(`<html>502</html>`)},
	{http.StatusServiceUnavailable, []byte(`<html>503</html>`)},
	{http.StatusInternalServerError, []byte(``)},
}

func reply(w http.ResponseWriter, status int, body string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = io.WriteString(w, body)
}

// entry is one line of the gateway's ledger: its last word on a key.
type entry struct {
	Kind        string `json:"kind"` // "charge", "refund"
	ID          string `json:"id"`
	Key         string `json:"key"`
	Status      string `json:"status"` // "approved", "declined", "canceled"
	DeclineCode string `json:"decline_code"`
	Amount      int64  `json:"amount"`
	Currency    string `json:"currency"`
	ChargeKey   string `json:"charge_key"`
}

// ledger reads the gateway's file, past everything that misbehaves, and whether or not the gateway lives.
func (g *gateway) ledger() (entries []entry, err error) {
	content, err := os.ReadFile(filepath.Join(g.dir, "ledger.jsonl"))
	if err != nil {
		return nil, err
	}
	// A last line without its end is being written: nobody has been told of it.
	for line := range bytes.Lines(content[:bytes.LastIndexByte(content, '\n')+1]) {
		var e entry
		if err := json.Unmarshal(line, &e); err != nil {
			return nil, fmt.Errorf("read the ledger: %w", err)
		}
		entries = append(entries, e)
	}
	return entries, nil
}

// approved counts all charges, or all refunds, that have moved money.
func (g *gateway) approved(kind string) (n int, err error) {
	entries, err := g.ledger()
	for _, e := range entries {
		if e.Kind == kind && e.Status == "approved" {
			n++
		}
	}
	return n, err
}

func (g *gateway) close() { g.sim.kill() }
