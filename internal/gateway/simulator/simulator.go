package simulator

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"time"

	"github.com/go-json-experiment/json"
)

// DefaultLatency is what an authorization takes at a real processor on an ordinary day: long enough that the service must not hold
// anything while it waits.
const DefaultLatency = 800 * time.Millisecond

// Options are how the simulator differs from the next one.
type Options struct {
	// Latency is the processing time of a charge or refund, give or take a tenth. Zero is none; see DefaultLatency. Looking up
	// and cancelling are quick.
	Latency time.Duration
}

// Simulator is an http.Handler with a ledger.
type Simulator struct {
	latency time.Duration
	routes  *http.ServeMux
	ledger  *ledger

	lifetime context.Context // ends with Close
	end      context.CancelCauseFunc
	requests sync.WaitGroup

	mu       sync.Mutex // guards what follows, and is never held during work
	closed   bool
	entries  map[name]*entry
	made     []*record        // all charges and refunds, oldest first
	refunded map[string]int64 // by the charge's key; what is being written to the ledger counts
}

// name is what an entry is known by. Charges and refunds are two ledgers in one file: a key may be in both.
type name struct {
	kind kind
	key  string
}

// request is a POST's parameters. Two that differ in anything are not the same intent.
type request struct {
	name          `json:"-"` // from the Idempotency-Key header
	Amount        int64      `json:"amount"`
	Currency      string     `json:"currency"`       // charges only
	PaymentMethod string     `json:"payment_method"` // charges only
	ChargeKey     string     `json:"charge_key"`     // refunds only
}

// entry is what the gateway knows of a key. It exists while a request is at the key, and for ever once there is a last word.
type entry struct {
	name
	turn   chan struct{} // full while a request works on the key; the others wait to fill it, and Go lets them in the order they came
	guests int           // requests that wait or work here; guarded by Simulator.mu
	asked  *request      // what the key stands for, unless it is canceled: set by the first POST to come; guarded by Simulator.mu
	final  *record       // written by whoever has the turn, under Simulator.mu
}

// refusal is an answer that is not a charge.
type refusal struct {
	status int
	code   string
}

func (r refusal) Error() string { return r.code }

var (
	errInvalid   = refusal{http.StatusBadRequest, "invalid_request"}
	errNeverSeen = refusal{http.StatusNotFound, "never_seen"}
	errCanceled  = refusal{http.StatusConflict, "canceled"}
	errKeyReused = refusal{http.StatusUnprocessableEntity, "key_reused"}
	errInternal  = refusal{http.StatusInternalServerError, "internal_error"}
	errClosing   = refusal{http.StatusServiceUnavailable, "unavailable"} // refused before processing: no key is entered
)

// Open reads the ledger at path, creating it if there is none, and locks it. It returns ErrLedgerInUse if another simulator has it.
func Open(path string, options Options) (*Simulator, error) {
	ledger, records, err := openLedger(path)
	if err != nil {
		return nil, err
	}
	s := &Simulator{
		latency:  options.Latency,
		routes:   http.NewServeMux(),
		ledger:   ledger,
		entries:  make(map[name]*entry),
		refunded: make(map[string]int64),
	}
	s.lifetime, s.end = context.WithCancelCause(context.Background())
	for _, r := range records {
		if s.entries[name{r.Kind, r.Key}] != nil {
			_ = ledger.close() // the error that matters is the one below
			return nil, fmt.Errorf("ledger %s has two last words on the %s %s", path, r.Kind, r.Key)
		}
		if r.Kind == refunds && r.Status == approved {
			s.refunded[r.ChargeKey] += r.Amount
		}
		s.conclude(s.entry(name{r.Kind, r.Key}), r)
	}
	for kind, path := range map[kind]string{charges: "/charges", refunds: "/refunds"} {
		route := func(pattern string, handle func(http.ResponseWriter, *http.Request, name)) {
			s.routes.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) { handle(w, r, name{kind, r.PathValue("key")}) })
		}
		route("POST "+path, s.post)
		route("GET "+path, s.list)
		route("GET "+path+"/{key}", s.get)
		route("POST "+path+"/{key}/cancel", s.cancel)
	}
	return s, nil
}

// Close lets requests go: those that wait or process answer 503 and have charged nothing, those that hang are cut. It returns when
// the last has gone, and releases the ledger. Later requests get 503. Call it before http.Server.Shutdown, which would wait for
// the hanging ones.
func (s *Simulator) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.end(errClosing)
	s.requests.Wait()
	return s.ledger.close()
}

func (s *Simulator) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		fail(w, errClosing)
		return
	}
	s.requests.Add(1)
	s.mu.Unlock()
	defer s.requests.Done()

	// One context tells a request that its client has left or that the simulator closes; the cause says which.
	ctx, cancel := context.WithCancelCause(r.Context())
	defer cancel(nil)
	defer context.AfterFunc(s.lifetime, func() { cancel(errClosing) })()
	s.routes.ServeHTTP(w, r.WithContext(ctx))
}

// post is the one handler that moves money.
func (s *Simulator) post(w http.ResponseWriter, r *http.Request, n name) {
	asked, err := read(w, r, n.kind)
	if err != nil {
		fail(w, err)
		return
	}
	e, err := s.enter(r.Context(), asked.name, &asked)
	if err != nil {
		fail(w, err)
		return
	}
	result, script := e.final, script{}
	if result == nil {
		script = s.script(asked)
		result, err = s.work(r.Context(), e, asked, script)
	}
	// Before the answer, so that whoever has read it finds what it says.
	s.leave(e)

	switch {
	case err != nil:
		fail(w, err)
	case result.Status == canceled:
		fail(w, errCanceled)
	case script.after == failing:
		fail(w, errInternal)
	case script.after == hanging:
		<-r.Context().Done()
		panic(http.ErrAbortHandler)
	case script.after == dropping:
		panic(http.ErrAbortHandler)
	default:
		reply(w, http.StatusOK, result.answer())
	}
}

// cancel makes sure that the key never charges, unless it already has.
func (s *Simulator) cancel(w http.ResponseWriter, r *http.Request, n name) {
	if !keyForm.MatchString(n.key) {
		fail(w, errInvalid) // no POST can have such a key
		return
	}
	e, err := s.enter(r.Context(), n, nil)
	if err != nil {
		fail(w, err)
		return
	}
	if e.final == nil {
		s.record(e, &record{Kind: n.kind, Key: n.key, Status: canceled, CreatedAt: now()})
	}
	result := e.final
	s.leave(e)
	reply(w, http.StatusOK, result.answer())
}

func (s *Simulator) get(w http.ResponseWriter, _ *http.Request, n name) {
	s.mu.Lock()
	e := s.entries[n]
	answer := record{Key: n.key, Status: processing}
	if e != nil && e.final != nil {
		answer = e.final.answer()
	}
	s.mu.Unlock()
	if e == nil {
		fail(w, errNeverSeen)
		return
	}
	reply(w, http.StatusOK, answer)
}

// list shows the records as they are in the ledger, payment method included. A cancel is no charge, and is not among them.
func (s *Simulator) list(w http.ResponseWriter, _ *http.Request, n name) {
	var list struct {
		Data []*record `json:"data"`
	}
	s.mu.Lock()
	for _, r := range s.made {
		if r.Kind == n.kind {
			list.Data = append(list.Data, r)
		}
	}
	s.mu.Unlock()
	reply(w, http.StatusOK, list)
}

// enter brings a request to its key and waits for its turn. Whoever is let in must leave. A cancel asks for nothing.
func (s *Simulator) enter(ctx context.Context, n name, asked *request) (*entry, error) {
	s.mu.Lock()
	e := s.entry(n)
	if e.asked == nil && e.final == nil {
		e.asked = asked
	}
	if asked != nil && e.asked != nil && *asked != *e.asked {
		s.mu.Unlock()
		return nil, errKeyReused
	}
	e.guests++
	s.mu.Unlock()

	select {
	case e.turn <- struct{}{}:
		return e, nil
	case <-ctx.Done():
		s.mu.Lock()
		defer s.mu.Unlock()
		s.depart(e)
		return nil, context.Cause(ctx)
	}
}

// leave gives the turn to the next in line.
func (s *Simulator) leave(e *entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	<-e.turn
	s.depart(e)
}

// depart forgets a key at which nothing has happened when its last guest goes: it was never seen. The caller holds mu.
func (s *Simulator) depart(e *entry) {
	e.guests--
	if e.guests == 0 && e.final == nil {
		delete(s.entries, e.name)
	}
}

// entry returns the key's entry, a new one if need be. The caller holds mu.
func (s *Simulator) entry(n name) *entry {
	e := s.entries[n]
	if e == nil {
		e = &entry{name: n, turn: make(chan struct{}, 1)}
		s.entries[n] = e
	}
	return e
}

// work carries out the request whose turn it is. An error means that nothing has happened and nothing will.
func (s *Simulator) work(ctx context.Context, e *entry, asked request, script script) (*record, error) {
	latency := time.Duration(float64(s.latency) * (0.9 + 0.2*mathrand.Float64()))
	if script.slow {
		latency *= 3
	}
	timer := time.NewTimer(latency)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	if script.refuses {
		return nil, errInternal
	}
	s.record(e, s.decide(asked, script))
	return e.final, nil
}

// decide makes the charge or refund. The amount of an approved refund is taken from its charge here and now, so that two refunds
// at once cannot both have it.
func (s *Simulator) decide(asked request, script script) *record {
	r := &record{
		Kind: asked.kind, Key: asked.key, Status: approved, DeclineCode: script.declines,
		Amount: asked.Amount, Currency: asked.Currency, PaymentMethod: asked.PaymentMethod, ChargeKey: asked.ChargeKey,
		CreatedAt: now(),
	}
	r.ID = "ch_" + strings.ToLower(rand.Text())
	if asked.kind == refunds {
		r.ID = "re_" + strings.ToLower(rand.Text())
		s.mu.Lock()
		defer s.mu.Unlock()
		charge := s.charge(asked.ChargeKey)
		switch {
		case charge == nil || charge.Status != approved:
			r.DeclineCode = "charge_not_refundable"
		case asked.Amount > charge.Amount-s.refunded[charge.Key]:
			r.DeclineCode = "amount_exceeds_charge"
		case r.DeclineCode == "":
			s.refunded[charge.Key] += asked.Amount
		}
		if charge != nil {
			r.Currency = charge.Currency
		}
	}
	if r.DeclineCode != "" {
		r.Status = declined
	}
	return r
}

// charge returns the last word on a charge's key, or nil. The caller holds mu.
func (s *Simulator) charge(key string) *record {
	if e := s.entries[name{charges, key}]; e != nil {
		return e.final
	}
	return nil
}

// record writes the last word on a key to disk, then makes it known. If the disk fails, nobody knows whether it is written, so the
// key stays in work, unanswered, until the ledger is opened again and tells.
func (s *Simulator) record(e *entry, r *record) {
	if err := s.ledger.append(r); err != nil {
		slog.Error("gateway simulator: the key stays in work until a restart", "error", err)
		panic(http.ErrAbortHandler)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.conclude(e, r)
}

// conclude makes a record the last word on its key. The caller holds mu.
func (s *Simulator) conclude(e *entry, r *record) {
	e.final = r
	if r.Status == canceled {
		e.asked = nil
		return
	}
	e.asked = &request{name: e.name, Amount: r.Amount, Currency: r.Currency, PaymentMethod: r.PaymentMethod, ChargeKey: r.ChargeKey}
	if r.Kind == refunds {
		e.asked.Currency = "" // nobody asked for it: it is the charge's
	}
	s.made = append(s.made, r)
}

// script is how a payment method makes the gateway behave.
type script struct {
	slow     bool
	refuses  bool   // with a 500, before anything has happened
	declines string // the decline code
	after    misbehaviour
}

type misbehaviour int

const (
	behaving misbehaviour = iota
	failing               // 500
	hanging
	dropping
)

var scripts = map[string]script{
	"pm_declined":           {declines: "generic_decline"},
	"pm_insufficient_funds": {declines: "insufficient_funds"},
	"pm_slow":               {slow: true},
	"pm_error_before":       {refuses: true},
	"pm_error_after":        {after: failing},
	"pm_hang_after":         {after: hanging},
	"pm_drop_after":         {after: dropping},
}

// script finds a charge's script by its payment method, and a refund's by that of its charge.
func (s *Simulator) script(asked request) script {
	if asked.kind == charges {
		return scripts[asked.PaymentMethod]
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if charge := s.charge(asked.ChargeKey); charge != nil {
		if token, meant := strings.CutPrefix(charge.PaymentMethod, "pm_refund_"); meant {
			return scripts["pm_"+token]
		}
	}
	return script{}
}

var (
	keyForm           = regexp.MustCompile(`^[\x21-\x7e]{1,255}$`)
	currencyForm      = regexp.MustCompile(`^[A-Z]{3}$`)
	paymentMethodForm = regexp.MustCompile(`^pm_[a-z0-9_]{1,64}$`)
)

const (
	maxAmount    = 999_999_999_999
	maxBodyBytes = 64 << 10
)

// read takes the request from the wire. It reads the body to its end: only then does net/http notice that a client leaves.
func read(w http.ResponseWriter, r *http.Request, kind kind) (request, error) {
	keys := r.Header.Values("Idempotency-Key")
	if len(keys) != 1 || !keyForm.MatchString(keys[0]) {
		return request{}, errInvalid
	}
	asked := request{name: name{kind, keys[0]}}
	err := json.UnmarshalRead(http.MaxBytesReader(w, r.Body, maxBodyBytes), &asked, json.RejectUnknownMembers(true))
	valid := err == nil && asked.Amount >= 1 && asked.Amount <= maxAmount
	if kind == charges {
		valid = valid && currencyForm.MatchString(asked.Currency) && paymentMethodForm.MatchString(asked.PaymentMethod) && asked.ChargeKey == ""
	} else {
		valid = valid && keyForm.MatchString(asked.ChargeKey) && asked.Currency == "" && asked.PaymentMethod == ""
	}
	if !valid {
		return request{}, errInvalid
	}
	return asked, nil
}

// answer is a record as its owner is told of it: a cancel has nothing but its key and status.
func (r record) answer() record {
	if r.Status == canceled {
		return record{Key: r.Key, Status: r.Status}
	}
	r.Kind, r.PaymentMethod = "", ""
	return r
}

// fail answers with the refusal. Any other error means that there is nobody to answer: the connection is cut.
func fail(w http.ResponseWriter, err error) {
	var refused refusal
	if !errors.As(err, &refused) {
		panic(http.ErrAbortHandler)
	}
	reply(w, refused.status, map[string]string{"error": refused.code})
}

func reply(w http.ResponseWriter, status int, body any) {
	text, err := json.Marshal(body)
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(text) // a client that has left needs no answer
}

// now is to the microsecond: what other databases keep of a time.
func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }
