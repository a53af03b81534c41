// Package gateway speaks to the external payment system over HTTP. Its [Client] is the service's [payments.Gateway].
//
// It promises one thing: to say what is known, and no more. Each call is one exchange, with no retry, no redirect and no patience
// of its own (the context carries the deadline), and ends in one of four ways:
//
//	an Outcome            the gateway's own JSON, about exactly this intent: its key, its amount, its currency
//	payments.ErrNotSent   no connection was had for the request, so no byte of it can have left
//	payments.ErrRefused   the gateway's own 500 or 503, read in full
//	payments.ErrUnclear   everything else: silence, half an answer, a proxy's answer, nonsense, an answer about something else
//
// The line between the first and the last is drawn strictly, because a wrong "unclear" costs one more question, and a wrong
// outcome costs somebody's money. Errors hold neither the payment method nor anything of what the other side answered but its
// status code.
package gateway

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/go-json-experiment/json"
	"github.com/go-json-experiment/json/jsontext"
	"go.opentelemetry.io/otel/propagation"

	"example.com/payments/internal/payments"
)

const (
	// 1 MiB: the gateway's answers are well under 1 KiB. What is longer is not one, and must not fill our memory.
	maxAnswerBytes = 1 << 20

	// 255: what the gateway calls a charge, and why it declined, is stored and shown. Longer than this it is nonsense.
	maxNameLength = 255

	// The issuer's no is final with or without a reason; this one stands in where the gateway gives none.
	unexplainedDecline = "generic_decline"
)

// Client implements [payments.Gateway]. It is safe for concurrent use.
type Client struct {
	baseURL   string // without a trailing slash
	transport *http.Transport
}

var _ payments.Gateway = (*Client)(nil)

// New returns a client of the gateway at baseURL, an absolute http or https URL; a path in it is kept as a prefix. The error
// does not repeat the URL, which may hold a password by mistake. New does not connect.
//
// The transport is the client's own and cannot be replaced: what ErrNotSent claims rests on how this one reports connections.
func New(baseURL string) (*Client, error) {
	u, err := url.Parse(baseURL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" ||
		u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, errors.New("the gateway's URL must be http(s)://host[:port][/path], without credentials, query or fragment")
	}
	var http1 http.Protocols
	http1.SetHTTP1(true)
	return &Client{
		baseURL: strings.TrimRight(u.String(), "/"),
		transport: &http.Transport{
			Proxy:     nil,    // HTTP_PROXY in the environment must not put a stranger between us and the gateway
			Protocols: &http1, // one request to a connection: whether it was sent has a plain answer, and HTTP/2's own resends do not exist
			// The numbers bound only dials that outlive their request: net/http finishes those for whoever comes next.
			DialContext:         (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
			TLSHandshakeTimeout: 10 * time.Second,
			// More than can be in flight: a smaller pool would close and dial thousands of connections with every wave.
			MaxIdleConnsPerHost: 10_000,
			// Shorter than the keep-alive of common servers, so that it is mostly us who close an idle connection. One that the
			// server closes just as we write to it costs an ErrUnclear.
			IdleConnTimeout:        30 * time.Second,
			DisableCompression:     true, // the limit on the answer's size is a limit on what was sent
			MaxResponseHeaderBytes: 64 << 10,
			// A request and an answer have a few hundred bytes each. net/http's 4 KiB would be 30 MiB more for 5,000 payments in flight.
			WriteBufferSize: 1 << 10,
			ReadBufferSize:  1 << 10,
		},
	}, nil
}

// CloseIdleConnections lets go of the connections that no call is using.
func (c *Client) CloseIdleConnections() { c.transport.CloseIdleConnections() }

// What the gateway is asked for. The key travels in the Idempotency-Key header.
type (
	chargeRequest struct {
		Amount        int64  `json:"amount"`
		Currency      string `json:"currency"`
		PaymentMethod string `json:"payment_method"`
	}
	refundRequest struct {
		ChargeKey string `json:"charge_key"`
		Amount    int64  `json:"amount"`
	}
)

// Charge asks the gateway to carry out the intent: POST /charges or POST /refunds.
func (c *Client) Charge(ctx context.Context, intent payments.Intent) (payments.Outcome, error) {
	var request any = chargeRequest{intent.Amount, intent.Currency, intent.PaymentMethod}
	if intent.Kind == payments.IntentRefund {
		request = refundRequest{intent.ChargeKey, intent.Amount}
	}
	body, err := json.Marshal(request)
	if err != nil {
		return payments.Outcome{}, fmt.Errorf("%w: the request is not valid UTF-8", payments.ErrNotSent)
	}
	a, err := c.exchange(ctx, http.MethodPost, intent, "", body)
	if err != nil {
		return payments.Outcome{}, err
	}
	switch a.status {
	case http.StatusOK, http.StatusCreated:
		// "Still working" is no answer to the request to do it.
		return a.outcome(intent, payments.OutcomeApproved, payments.OutcomeDeclined, payments.OutcomeCanceled)
	case http.StatusConflict:
		var refusal struct {
			Error string `json:"error"`
		}
		if json.Unmarshal(a.body, &refusal) == nil && refusal.Error == "canceled" {
			return payments.Outcome{Status: payments.OutcomeCanceled}, nil
		}
	case http.StatusInternalServerError, http.StatusServiceUnavailable:
		if a.isObject() {
			return payments.Outcome{}, fmt.Errorf("%w: status %d", payments.ErrRefused, a.status)
		}
	}
	return a.unclear("")
}

// LookUp asks what the gateway knows of the intent: GET /charges/{key} or GET /refunds/{key}.
func (c *Client) LookUp(ctx context.Context, intent payments.Intent) (payments.Outcome, error) {
	a, err := c.exchange(ctx, http.MethodGet, intent, member(intent), nil)
	if err != nil {
		return payments.Outcome{}, err
	}
	switch {
	case a.status == http.StatusOK:
		return a.outcome(intent, payments.OutcomeApproved, payments.OutcomeDeclined, payments.OutcomeCanceled, payments.OutcomeProcessing)
	case a.status == http.StatusNotFound && a.isObject():
		return payments.Outcome{Status: payments.OutcomeNeverSeen}, nil
	case a.status == http.StatusNotFound:
		return payments.Outcome{Status: payments.OutcomeNotFound}, nil
	}
	return a.unclear("")
}

// Cancel asks the gateway never to carry out the intent, unless it already has: POST /charges/{key}/cancel or
// POST /refunds/{key}/cancel.
func (c *Client) Cancel(ctx context.Context, intent payments.Intent) (payments.Outcome, error) {
	a, err := c.exchange(ctx, http.MethodPost, intent, member(intent)+"/cancel", nil)
	if err != nil {
		return payments.Outcome{}, err
	}
	if a.status == http.StatusOK {
		return a.outcome(intent, payments.OutcomeApproved, payments.OutcomeDeclined, payments.OutcomeCanceled)
	}
	return a.unclear("")
}

var collections = map[payments.IntentKind]string{payments.IntentCharge: "/charges", payments.IntentRefund: "/refunds"}

// member is an intent's path within its collection.
func member(intent payments.Intent) string { return "/" + url.PathEscape(intent.Key) }

// exchange sends one request to a path within the intent's collection and reads the answer in full. Only the request with a body,
// the one that moves money, carries the idempotency key. Its errors are ErrNotSent and ErrUnclear.
func (c *Client) exchange(ctx context.Context, method string, intent payments.Intent, path string, body []byte) (answer, error) {
	collection, known := collections[intent.Kind]
	if !known || intent.Key == "" {
		return answer{}, fmt.Errorf("%w: the intent has no key, or is neither a charge nor a refund", payments.ErrNotSent)
	}
	// Without a connection nothing can have left. Once there is one, net/http writes at once and in the background, so whether it
	// had begun when something failed is in doubt, and stays unclear.
	var connected atomic.Bool
	traced := httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(httptrace.GotConnInfo) { connected.Store(true) }})
	req, err := http.NewRequestWithContext(traced, method, c.baseURL+collection+path, bytes.NewReader(body))
	if err != nil {
		return answer{}, fmt.Errorf("%w: the request could not be built", payments.ErrNotSent)
	}
	if body != nil {
		req.Header.Set("Idempotency-Key", intent.Key)
		req.Header.Set("Content-Type", "application/json")
		// net/http repeats a request by itself when a reused connection breaks, if it is "replayable". A POST becomes that by its
		// Idempotency-Key, as long as the body can be had again. It would be safe at this gateway, but repetition belongs to our
		// caller, who counts what was sent. (A GET moves nothing and may be repeated; a cancel has no such header.)
		req.GetBody = nil
	}
	// A trace goes on at the gateway. Without one this adds nothing.
	propagation.TraceContext{}.Inject(ctx, propagation.HeaderCarrier(req.Header))
	// The bare transport: no http.Client, so no redirects and no cookies.
	resp, err := c.transport.RoundTrip(req)
	if err != nil && !connected.Load() {
		return answer{}, fmt.Errorf("%w: %w", payments.ErrNotSent, err)
	}
	if err != nil {
		return answer{}, fmt.Errorf("%w: %w", payments.ErrUnclear, withoutQuotes(ctx, err))
	}
	defer resp.Body.Close()
	if resp.StatusCode == http.StatusSwitchingProtocols { // nobody asked for it, and its "body" outlives the context
		return answer{}, fmt.Errorf("%w: status %d", payments.ErrUnclear, resp.StatusCode)
	}
	content, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswerBytes+1))
	if err != nil {
		return answer{}, fmt.Errorf("%w: status %d, body cut: %w", payments.ErrUnclear, resp.StatusCode, withoutQuotes(ctx, err))
	}
	if len(content) > maxAnswerBytes {
		return answer{}, fmt.Errorf("%w: status %d, body too long", payments.ErrUnclear, resp.StatusCode)
	}
	return answer{resp.StatusCode, content}, nil
}

// withoutQuotes keeps the errors of connections and contexts as they are, and replaces those of net/http's parser, which quote
// what the other side has written.
func withoutQuotes(ctx context.Context, err error) error {
	var connection net.Error
	switch {
	case errors.As(err, &connection), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return err
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return errors.New("the connection broke, or what came was not HTTP")
}

// answer is what came back, complete as far as HTTP can tell.
type answer struct {
	status int
	body   []byte
}

// outcome reads what the gateway states about the intent, and accepts only the statuses that make sense where it was asked.
func (a answer) outcome(intent payments.Intent, accepted ...payments.OutcomeStatus) (payments.Outcome, error) {
	// Other members are the gateway's business. Duplicate names, trailing data and invalid UTF-8 are refused by the decoder.
	var said struct {
		Key         string                 `json:"key"`
		Status      payments.OutcomeStatus `json:"status"`
		ID          string                 `json:"id"`
		DeclineCode string                 `json:"decline_code"`
		Amount      int64                  `json:"amount"`
		Currency    string                 `json:"currency"`
		ChargeKey   string                 `json:"charge_key"`
	}
	if json.Unmarshal(a.body, &said) != nil {
		return a.unclear("not the gateway's JSON")
	}
	if said.Key != intent.Key {
		return a.unclear("about another key")
	}
	if !slices.Contains(accepted, said.Status) {
		return a.unclear("a status that is no answer")
	}
	if said.Status == payments.OutcomeCanceled || said.Status == payments.OutcomeProcessing {
		return payments.Outcome{Status: said.Status}, nil
	}
	refund := intent.Kind == payments.IntentRefund
	switch {
	case said.Amount != intent.Amount:
		return a.unclear("about another amount")
	case said.Currency != intent.Currency && !(refund && said.Currency == ""):
		return a.unclear("about another currency")
	case refund && said.ChargeKey != intent.ChargeKey && said.ChargeKey != "":
		return a.unclear("about another charge")
	case !storable(said.ID):
		return a.unclear("no usable id")
	}
	outcome := payments.Outcome{Status: said.Status, Reference: said.ID}
	if said.Status == payments.OutcomeDeclined {
		outcome.DeclineCode = said.DeclineCode
		if outcome.DeclineCode == "" {
			outcome.DeclineCode = unexplainedDecline
		}
		if !storable(outcome.DeclineCode) {
			return a.unclear("no usable decline code")
		}
	}
	return outcome, nil
}

// unclear is the answer that says nothing about the intent.
func (a answer) unclear(why string) (payments.Outcome, error) {
	if why != "" {
		why = ": " + why
	}
	return payments.Outcome{}, fmt.Errorf("%w: status %d%s", payments.ErrUnclear, a.status, why)
}

// isObject tells the gateway's JSON from the HTML or the empty page of something in between.
func (a answer) isObject() bool {
	value := jsontext.Value(a.body)
	return value.Kind() == '{' && value.IsValid()
}

func storable(name string) bool {
	unprintable := func(r rune) bool { return !unicode.IsPrint(r) }
	return name != "" && utf8.RuneCountInString(name) <= maxNameLength && !strings.ContainsFunc(name, unprintable)
}
