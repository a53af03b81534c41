package chaos

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// operation is one intent of a client: one key, one request, repeated until there is a final answer.
type operation struct {
	kind     string // "order", "payment", "refund", "cancel"
	key      string
	path     string
	body     string
	prefer   string // of the first request
	orderID  string
	amount   int64
	currency string
	of       *operation // the payment that a refund gives back
	scripts  string     // payment method, for what can never end well
	// A client that leaves: it sends its request once and does not come back.
	leaves bool

	mu      sync.Mutex
	calls   []call
	started time.Time
	ended   time.Time // of the first final answer or refusal; zero while there is none
	final   *call     // the last final answer
	refused string    // the rule that has refused it; the key stays free
}

// call is one request and what became of it.
type call struct {
	sent, received time.Time
	replica        int
	clock          time.Duration // how wrong that replica's clock was; see [World.checkClocks]
	restarted      bool          // between the request and its answer, with another clock
	status         int           // 0: the connection broke, or the client lost patience
	slug           string
	resource       string // the payment or refund that the answer names
	replayed       bool
	retryAfter     time.Duration
	body           []byte // of final answers
}

func (c call) String() string {
	if c.status == 0 {
		return "no answer"
	}
	return strings.TrimSpace(fmt.Sprintf("%d %s", c.status, c.slug))
}

// isFinal reports whether the answer is the stored one of its key.
func (c call) isFinal() bool {
	return c.status == http.StatusCreated || c.status == http.StatusOK || c.status == http.StatusPaymentRequired
}

// refusals are answers of the business that are not stored. The client gives up.
var refusals = map[string]bool{
	"order-not-open": true, "order-payment-in-progress": true, "payment-not-refundable": true, "refund-exceeds-payment": true,
}

// unfinished are answers after which a client comes back with the same key.
var unfinished = map[string]bool{
	"idempotency-in-progress": true, "gateway-timeout": true, "gateway-unavailable": true, "storage-unavailable": true, "shutting-down": true,
	"overloaded": true,
}

// clientPatience is how long a client waits for one answer. It is longer than an attempt, and shorter than a stopped replica is stopped.
const clientPatience = 8 * time.Second

// send sends the operation's request once. A call that got no answer is a call all the same: it may have done everything.
func (w *World) send(ctx context.Context, o *operation, replica int, prefer string) (c call) {
	ctx, cancel := context.WithTimeout(ctx, clientPatience)
	defer cancel()
	c = call{sent: time.Now(), replica: replica, clock: w.replicas[replica].clock()}
	defer func() {
		c.received, c.restarted = time.Now(), c.clock != w.replicas[replica].clock()
		o.mu.Lock()
		defer o.mu.Unlock()
		o.calls = append(o.calls, c)
		if c.isFinal() {
			if o.ended.IsZero() {
				o.ended = c.received
			}
			last := c
			o.final = &last
		}
	}()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+w.replicas[replica].address+o.path, strings.NewReader(o.body))
	if err != nil {
		panic(err) // The harness has built the path.
	}
	request.Header.Set("Authorization", "Bearer "+w.apiKey)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", o.key)
	if prefer != "" {
		request.Header.Set("Prefer", prefer)
	}
	request.GetBody = nil // net/http would repeat it by itself
	response, err := w.clients.Do(request)
	if err != nil {
		return c
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return c
	}
	c.status = response.StatusCode
	c.replayed = response.Header.Get("Idempotent-Replayed") == "true"
	if seconds, err := strconv.Atoi(response.Header.Get("Retry-After")); err == nil {
		c.retryAfter = time.Duration(seconds) * time.Second
	}
	var said struct {
		Type      string `json:"type"`
		ID        string `json:"id"`
		PaymentID string `json:"payment_id"`
		RefundID  string `json:"refund_id"`
	}
	_ = json.Unmarshal(body, &said) // What is no JSON names nothing.
	c.slug = said.Type[strings.LastIndexByte(said.Type, '/')+1:]
	switch {
	case response.StatusCode < 300: // The resource itself; a refund names its payment too.
		c.resource = said.ID
	case said.RefundID != "":
		c.resource = said.RefundID
	default:
		c.resource = said.PaymentID
	}
	if c.isFinal() || !unfinished[c.slug] && !refusals[c.slug] {
		c.body = body
	}
	return c
}

// complete is what a careful client does: it repeats its request with the same key, at any replica, with back-off and as Retry-After asks,
// until there is a final answer, a refusal, or no time.
func (w *World) complete(ctx context.Context, o *operation, random *rand.Rand) {
	o.mu.Lock()
	if o.started.IsZero() {
		o.started = time.Now()
	}
	o.mu.Unlock()
	replica, pause, refusedBefore := random.IntN(len(w.replicas)), 100*time.Millisecond, 0
	for n := 0; ctx.Err() == nil; n++ {
		prefer := o.prefer
		if n > 0 && random.IntN(4) == 0 {
			prefer = strings.TrimPrefix(o.prefer+", wait=1", ", ")
		}
		c := w.send(ctx, o, replica, prefer)
		switch {
		case c.isFinal():
			return
		case refusals[c.slug]:
			// An order that is being paid with another key may become free again.
			if refusedBefore++; c.slug != "order-payment-in-progress" || refusedBefore > 3 {
				o.refuse(c)
				return
			}
		case c.status != 0 && c.status != http.StatusAccepted && !unfinished[c.slug]:
			o.refuse(c) // Nothing that a careful client should ever see; judged later.
			return
		}
		wait := pause/2 + rand.N(pause/2+1)
		pause = min(2*pause, w.Settings.Repeat)
		if c.retryAfter > 0 {
			wait = c.retryAfter
		}
		if c.status == 0 || c.status == http.StatusServiceUnavailable {
			replica = (replica + 1) % len(w.replicas)
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
		}
	}
}

func (o *operation) refuse(c call) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.refused, o.ended = c.slug, c.received
	if o.refused == "" {
		o.refused = c.String()
	}
}

func (o *operation) answer() *call {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.final
}

// leave is what an impatient client does: it sends its request, hangs up after a moment, and does not come back.
func (w *World) leave(ctx context.Context, o *operation, random *rand.Rand) {
	o.leaves, o.started = true, time.Now()
	ctx, cancel := context.WithTimeout(ctx, time.Duration(random.IntN(150))*time.Millisecond)
	defer cancel()
	w.send(ctx, o, random.IntN(len(w.replicas)), o.prefer)
}

// ledgerKind is which of the gateway's two ledgers the operation belongs to.
func (o *operation) ledgerKind() string {
	if o.kind == "refund" {
		return "refund"
	}
	return "charge"
}

// gatewayKey is what the contract says that the gateway knows the intent by.
func (w *World) gatewayKey(o *operation) string {
	sum := sha256.Sum256([]byte(o.ledgerKind() + "\n" + w.merchantID + "\n" + o.key))
	return hex.EncodeToString(sum[:])
}

// book is everything that the clients of a run have done.
type book struct {
	mu         sync.Mutex
	operations []*operation
	keys       int
}

func (b *book) add(o *operation) *operation {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.keys++
	o.key = fmt.Sprintf("%s-%d", o.kind, b.keys)
	b.operations = append(b.operations, o)
	return o
}

func (b *book) order(amount int64, currency string) *operation {
	return b.add(&operation{
		kind: "order", path: "/v1/orders", amount: amount, currency: currency, body: fmt.Sprintf(`{"amount":%d,"currency":%q}`, amount, currency),
	})
}

// payment pays an order that was answered.
func (b *book) payment(order *operation, method string) *operation {
	orderID := order.answer().resource
	return b.add(&operation{
		kind: "payment", path: "/v1/payments", orderID: orderID, amount: order.amount, currency: order.currency, scripts: method,
		body: fmt.Sprintf(`{"order_id":%q,"amount":%d,"currency":%q,"payment_method":%q}`, orderID, order.amount, order.currency, method),
	})
}

// refund gives back some of a payment that was answered.
func (b *book) refund(payment *operation, amount int64) *operation {
	return b.add(&operation{
		kind: "refund", path: "/v1/payments/" + payment.answer().resource + "/refunds", of: payment,
		amount: amount, currency: payment.currency, body: fmt.Sprintf(`{"amount":%d}`, amount),
	})
}

func (b *book) cancel(orderID string) *operation {
	return b.add(&operation{kind: "cancel", path: "/v1/orders/" + orderID + "/cancel", orderID: orderID})
}

// methods are the tokens that clients pay with. Most cards work.
var methods = []string{
	"pm_ok", "pm_ok", "pm_ok", "pm_ok", "pm_ok", "pm_ok", "pm_ok", "pm_ok", "pm_ok", "pm_ok", "pm_ok", "pm_ok",
	"pm_declined", "pm_insufficient_funds", "pm_slow", "pm_error_after", "pm_hang_after", "pm_drop_after",
	"pm_refund_declined", "pm_refund_error_after", "pm_refund_hang_after", "pm_refund_drop_after",
}

var currencies = []string{"EUR", "EUR", "USD", "JPY"}

// shop is one customer: an order, a payment, and whatever else customers do. The number decides what, so a seed has the same customers.
func (w *World) shop(ctx context.Context, b *book, seed uint64, number int) {
	random := rand.New(rand.NewPCG(seed, uint64(number)))
	chance := func(percent int) bool { return random.IntN(100) < percent }
	other := func() *rand.Rand { return rand.New(rand.NewPCG(random.Uint64(), 0)) }

	order := b.order(100+random.Int64N(100_000), currencies[random.IntN(len(currencies))])
	if chance(2) {
		w.leave(ctx, order, random)
		return
	}
	w.complete(ctx, order, random)
	if order.answer() == nil {
		return
	}
	var friends sync.WaitGroup
	defer friends.Wait()
	method := methods[random.IntN(len(methods))]
	payment := b.payment(order, method)
	if chance(20) {
		payment.prefer = "respond-async"
	}

	switch {
	case chance(4):
		w.leave(ctx, payment, random)
		return
	case chance(10): // The same click twice.
		friends.Go(func() { w.complete(ctx, payment, other()) })
	case chance(8): // Two clicks with two keys.
		second := b.payment(order, "pm_ok")
		friends.Go(func() { w.complete(ctx, second, other()) })
	case chance(8): // Pays and cancels at once.
		cancel, his := b.cancel(order.answer().resource), other()
		if chance(20) {
			friends.Go(func() { w.leave(ctx, cancel, his) })
		} else {
			friends.Go(func() { w.complete(ctx, cancel, his) })
		}
	}
	w.complete(ctx, payment, random)
	answer := payment.answer()
	if answer == nil {
		return
	}
	if answer.slug == "payment-failed" { // Closed with nothing charged: try again with a new key, as the answer says.
		payment = b.payment(order, "pm_ok")
		w.complete(ctx, payment, random)
		if answer = payment.answer(); answer == nil {
			return
		}
	}
	if answer.status != http.StatusCreated || !chance(25) {
		return
	}
	// Some of it is given back, in parts that together may be too much.
	for range 1 + random.IntN(3) {
		refund, his := b.refund(payment, 1+random.Int64N(order.amount)), other()
		if chance(20) {
			refund.prefer = "respond-async"
		}
		if chance(8) {
			friends.Go(func() { w.leave(ctx, refund, his) })
		} else {
			friends.Go(func() { w.complete(ctx, refund, his) })
		}
	}
}

// anyRandom is for choices that a scenario does not care about.
func anyRandom() *rand.Rand { return rand.New(rand.NewPCG(rand.Uint64(), 0)) }

func (w *World) newOrder(ctx context.Context, b *book) (*operation, error) {
	order := b.order(1999, "EUR")
	w.complete(ctx, order, anyRandom())
	if order.answer() == nil {
		return nil, fmt.Errorf("no order: %v", order.calls)
	}
	return order, nil
}

// newPayment is an order that is paid.
func (w *World) newPayment(ctx context.Context, b *book) (*operation, error) {
	order, err := w.newOrder(ctx, b)
	if err != nil {
		return nil, err
	}
	payment := b.payment(order, "pm_ok")
	w.complete(ctx, payment, anyRandom())
	if answer := payment.answer(); answer == nil || answer.status != http.StatusCreated {
		return nil, fmt.Errorf("no payment: %v", payment.calls)
	}
	return payment, nil
}
