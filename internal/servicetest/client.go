package servicetest

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sync/errgroup"
)

// Client is a merchant's program that talks to one replica.
type Client struct {
	URL      string
	Merchant Merchant

	t         testing.TB
	transport *http.Transport
	document  *Document
}

// Document is what the service says of itself. Every answer that a client gets is held against it.
func (c *Client) Document() *Document { return c.document }

var keys atomic.Int64

// As returns the client of a merchant at the replica.
func (r *Replica) As(merchant Merchant) *Client {
	transport := &http.Transport{MaxIdleConnsPerHost: 100, DisableCompression: true}
	r.world.t.Cleanup(transport.CloseIdleConnections)
	document, err := readDocument(r.URL)
	if err != nil {
		r.world.t.Errorf("openapi.yaml: %v", err)
	}
	return &Client{URL: r.URL, Merchant: merchant, t: r.world.t, transport: transport, document: document}
}

// NewKey returns a key that nobody has used.
func (c *Client) NewKey() string { return fmt.Sprintf("key-%d", keys.Add(1)) }

// Do sends a request and returns the answer whole. An empty key or body is none. Headers are "Name: value" and come on top of those
// that a careful client sends; "Name:" takes one of those away. It may be called from any goroutine.
//
// Of every answer it checks what is promised for all of them.
func (c *Client) Do(method, path, key, body string, headers ...string) Answer {
	c.t.Helper()
	answer, err := c.Try(context.Background(), method, path, key, body, headers...)
	if err != nil {
		c.t.Errorf("%s %s: %v", method, path, err)
	}
	return answer
}

// Try is Do for a request that may have no answer, or whose client may leave before there is one.
func (c *Client) Try(ctx context.Context, method, path, key, body string, headers ...string) (Answer, error) {
	c.t.Helper()
	var content io.Reader
	if body != "" {
		content = strings.NewReader(body)
	}
	request, err := http.NewRequestWithContext(ctx, method, c.URL+path, content)
	if err != nil {
		return Answer{}, err
	}
	request.Header.Set("Authorization", "Bearer "+c.Merchant.APIKey)
	if body != "" {
		request.Header.Set("Content-Type", "application/json")
	}
	if key != "" {
		request.Header.Set("Idempotency-Key", key)
	}
	replaced := map[string]bool{}
	for _, header := range headers {
		name, value, _ := strings.Cut(header, ":")
		if name = http.CanonicalHeaderKey(name); !replaced[name] {
			request.Header.Del(name)
			replaced[name] = true
		}
		if value = strings.TrimSpace(value); value != "" {
			request.Header.Add(name, value)
		}
	}
	return c.Send(request)
}

// Send sends a request as it is.
func (c *Client) Send(request *http.Request) (Answer, error) {
	c.t.Helper()
	request.GetBody = nil // net/http repeats nothing by itself
	response, err := c.transport.RoundTrip(request)
	if err != nil {
		return Answer{}, err
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return Answer{}, err
	}
	if response.Close {
		response.Header.Set("Connection", "close") // net/http has taken it out
	}
	answer := Answer{t: c.t, Status: response.StatusCode, Header: response.Header, Body: body}
	faults := answer.faults(request)
	if c.document != nil {
		if err := c.document.Fault(request, answer.Status, answer.Header, body); err != nil {
			faults = append(faults, err.Error())
		}
	}
	for _, fault := range faults {
		c.t.Errorf("%s %s is answered with %s\n%s", request.Method, request.URL.Path, answer, fault)
	}
	return answer, nil
}

// Answer is what the service has said, whole.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte

	t testing.TB
}

// String is for the log of a test.
func (a Answer) String() string {
	var b bytes.Buffer
	fmt.Fprintf(&b, "%d\n", a.Status)
	_ = a.Header.Write(&b)
	fmt.Fprintf(&b, "\n%s", a.Body)
	return b.String()
}

// Is stops the test unless the answer has this status and, if it is a problem, is of this type. It returns the answer.
func (a Answer) Is(status int, slug ...string) Answer {
	a.t.Helper()
	if a.Status != status || len(slug) > 0 && a.Slug() != slug[0] {
		a.t.Fatalf("want %d %s, got %s", status, strings.Join(slug, ""), a)
	}
	return a
}

// Has stops the test unless the header has this value; an empty one is none. It returns the answer.
func (a Answer) Has(header, value string) Answer {
	a.t.Helper()
	if got := strings.Join(a.Header.Values(header), " | "); got != value {
		a.t.Fatalf("want %s: %q, got %s", header, value, a)
	}
	return a
}

// Says stops the test unless the member of the body has this value. It returns the answer.
func (a Answer) Says(member, value string) Answer {
	a.t.Helper()
	if got := a.Member(member); got != value {
		a.t.Fatalf("want %q to be %q, got %s", member, value, a)
	}
	return a
}

// Same stops the test unless the answer is a replay of the other: the same status and bytes.
func (a Answer) Same(other Answer) Answer {
	a.t.Helper()
	if a.Status != other.Status || !bytes.Equal(a.Body, other.Body) || a.Header.Get("Location") != other.Header.Get("Location") ||
		a.Header.Get("Content-Type") != other.Header.Get("Content-Type") {
		a.t.Fatalf("want the same answer, got %s\n\nand %s", other, a)
	}
	return a
}

// Fresh and Replayed stop the test unless the answer says that it was made for this request, or for another one.
func (a Answer) Fresh() Answer    { a.t.Helper(); return a.Has("Idempotent-Replayed", "false") }
func (a Answer) Replayed() Answer { a.t.Helper(); return a.Has("Idempotent-Replayed", "true") }

// Member is a member of the body as text, empty if there is none or it is null.
func (a Answer) Member(name string) string {
	var members map[string]json.RawMessage
	if json.Unmarshal(a.Body, &members) != nil {
		return ""
	}
	var text string
	switch raw := members[name]; {
	case string(raw) == "null":
		return ""
	case json.Unmarshal(raw, &text) == nil:
		return text
	default:
		return string(raw)
	}
}

// Slug is the name of the problem's type, empty if the answer is none.
func (a Answer) Slug() string {
	slug, _ := strings.CutPrefix(a.Member("type"), PublicURL+"/problems/")
	return slug
}

// Data is the list's resources, one member of each.
func (a Answer) Data(member string) []string {
	a.t.Helper()
	var list struct {
		Data []map[string]json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(a.Body, &list); err != nil || list.Data == nil {
		a.t.Fatalf("want a list, got %s", a)
	}
	values := make([]string, len(list.Data))
	for i, resource := range list.Data {
		values[i] = strings.Trim(string(resource[member]), `"`)
	}
	return values
}

// Pointers are those of a validation problem's errors.
func (a Answer) Pointers() []string {
	var problem struct {
		Errors []struct{ Pointer, Code string }
	}
	_ = json.Unmarshal(a.Body, &problem)
	var pointers []string
	for _, fault := range problem.Errors {
		pointers = append(pointers, fault.Pointer+" "+fault.Code)
	}
	return pointers
}

// pastAuth are the statuses that nobody gets without credentials.
var pastAuth = []int{200, 201, 202, 400, 402, 409, 410, 413, 415, 422, 504}

// faults are the promises about all answers that this one breaks.
func (a Answer) faults(request *http.Request) (faults []string) {
	expect := func(ok bool, fault string) {
		if !ok {
			faults = append(faults, fault)
		}
	}
	_, err := uuid.Parse(a.Header.Get("X-Request-Id"))
	expect(err == nil, "It has no X-Request-Id.")
	if strings.HasPrefix(request.URL.Path, "/v1/") && slices.Contains(pastAuth, a.Status) {
		expect(a.Header.Get("Cache-Control") == "no-store", "It may be cached.")
	}
	if text := a.Header.Get("Retry-After"); text != "" {
		seconds, err := strconv.Atoi(text)
		expect(err == nil && seconds >= 1, "Its Retry-After is not a whole number of seconds.")
	}
	if location := a.Header.Get("Location"); location != "" {
		expect(strings.HasPrefix(location, "/v1/"), "Its Location is not a path.")
	}
	if a.Status < 400 || request.Method == http.MethodHead {
		return faults
	}
	expect(a.Header.Get("Content-Type") == "application/problem+json", "It is no problem.")
	expect(a.Slug() != "", "Its type is not below PUBLIC_URL.")
	expect(a.Member("title") != "" && a.Member("detail") != "", "It explains nothing.")
	expect(a.Member("status") == strconv.Itoa(a.Status), "Its status is another one.")
	if a.Header.Get("Idempotent-Replayed") != "true" {
		expect(a.Member("instance") == a.Header.Get("X-Request-Id"), "Its instance is not the request.")
	}
	expect(a.Status != http.StatusInternalServerError || a.Slug() == "internal-error", "A 500 says what is broken.")
	return faults
}

// NewOrder creates an order of 1999 EUR cents and returns its id.
func (c *Client) NewOrder() string {
	c.t.Helper()
	return c.Do("POST", "/v1/orders", "order-"+c.NewKey(), `{"amount":1999,"currency":"EUR"}`).Is(201).Member("id")
}

// PayBody is the body of the request that pays such an order.
func PayBody(orderID, paymentMethod string) string {
	return fmt.Sprintf(`{"order_id":%q,"amount":1999,"currency":"EUR","payment_method":%q}`, orderID, paymentMethod)
}

// Pay pays such an order.
func (c *Client) Pay(orderID, key, paymentMethod string, headers ...string) Answer {
	c.t.Helper()
	return c.Do("POST", "/v1/payments", key, PayBody(orderID, paymentMethod), headers...)
}

// NewPayment creates an order, pays it, and returns the payment's id. The payment's refunds go the way of the payment method that
// follows "pm_refund_", see package simulator.
func (c *Client) NewPayment(paymentMethod string) string {
	c.t.Helper()
	return c.Pay(c.NewOrder(), "pay-"+c.NewKey(), paymentMethod).Is(201).Member("id")
}

// Go runs f beside the test. The function that it returns waits for the end and returns what f has returned.
func Go[T any](f func() T) (wait func() T) {
	done := make(chan T, 1)
	go func() { done <- f() }()
	return sync.OnceValue(func() T { return <-done })
}

// Race has n requests start from one gate and returns their answers.
func Race(n int, request func(i int) Answer) []Answer {
	gate := make(chan struct{})
	answers := make([]Answer, n)
	var ready, done sync.WaitGroup
	ready.Add(n)
	for i := range n {
		done.Go(func() {
			ready.Done()
			<-gate
			answers[i] = request(i)
		})
	}
	ready.Wait()
	close(gate)
	done.Wait()
	return answers
}

// Count tells how many answers there are of each kind: "201 fresh", "201 replay", "409 idempotency-in-progress".
func Count(answers []Answer) map[string]int {
	counts := map[string]int{}
	for _, a := range answers {
		kind := a.Slug()
		switch a.Header.Get("Idempotent-Replayed") {
		case "true":
			kind = "replay"
		case "false":
			kind = "fresh"
		}
		counts[fmt.Sprintf("%d %s", a.Status, kind)]++
	}
	return counts
}

// Rounds repeats a race, a few rounds at a time: each by itself would mostly wait for the disk. A round returns what was wrong with it.
func Rounds(t testing.TB, n int, round func(i int) error) {
	t.Helper()
	var group errgroup.Group
	group.SetLimit(8)
	for i := range n {
		group.Go(func() error {
			if err := round(i); err != nil {
				return fmt.Errorf("round %d: %w", i, err)
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		t.Fatal(err)
	}
}

// HTTPDate reads a header such as Idempotency-Expires.
func (a Answer) HTTPDate(header string) time.Time {
	a.t.Helper()
	at, err := http.ParseTime(a.Header.Get(header))
	if err != nil {
		a.t.Fatalf("want a date in %s, got %s", header, a)
	}
	return at
}
