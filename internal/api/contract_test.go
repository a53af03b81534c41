package api_test

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"example.com/payments/internal/api"
	"example.com/payments/internal/servicetest"
)

// The contract test walks every operation and every status that openapi.yaml declares for it, against the running service. That each
// answer is what the document declares, in status, headers, media type and body, is checked by the client, as in all tests.

// contractWorld has a replica for each state in which a replica answers differently.
type contractWorld struct {
	*world
	limited  *client // is allowed one request in a long while, and has had it
	draining *client
	broken   *client // panics as soon as it asks who the client is
	hurried  *client // gives the gateway no time
}

func newContractWorld(t *testing.T) contractWorld {
	w := setup(t, options{GatewayTimeout: 5 * time.Second})
	c := contractWorld{world: w}
	c.limited = w.NewReplica(options{RateLimit: 0.001}).As(w.Merchant)
	c.limited.Do("GET", "/v1/orders", "", "").Is(200)
	draining := w.NewReplica(options{})
	c.draining = draining.As(w.Merchant)
	draining.API.Drain()
	c.hurried = w.NewReplica(options{GatewayTimeout: 300 * time.Millisecond}).As(w.Merchant)

	broken := httptest.NewServer(api.New(api.Config{
		Merchants: panics{}, PublicURL: servicetest.PublicURL, Log: slog.New(slog.NewTextHandler(io.Discard, nil)),
		Ready: func(context.Context) error { panic("for a test") },
	}))
	t.Cleanup(broken.Close)
	brokenClient := *w.Client
	brokenClient.URL = broken.URL
	c.broken = &brokenClient
	return c
}

type panics struct{}

func (panics) Authenticate(context.Context, string) (uuid.UUID, error) { panic("for a test") }

// posts are valid requests that have not been made yet, by operation.
var posts = map[string]func(c *client) request{
	"createOrder": func(c *client) request {
		return request{"/v1/orders", c.NewKey(), `{"amount":1999,"currency":"EUR","reference":"basket","metadata":{"table":"4"}}`}
	},
	"cancelOrder": func(c *client) request {
		return request{"/v1/orders/" + c.NewOrder() + "/cancel", c.NewKey(), `{}`}
	},
	"createPayment": func(c *client) request { return payment.new(c, "ok") },
	"createRefund":  func(c *client) request { return refund.new(c, "ok") },
}

// gets are paths that are there, by operation.
var gets = map[string]func(c *client) string{
	"listOrders":        func(*client) string { return "/v1/orders" },
	"getOrder":          func(c *client) string { return "/v1/orders/" + c.NewOrder() },
	"listPayments":      func(*client) string { return "/v1/payments" },
	"getPayment":        func(c *client) string { return "/v1/payments/" + c.NewPayment("pm_ok") },
	"listRefunds":       func(c *client) string { return "/v1/payments/" + c.NewPayment("pm_ok") + "/refunds" },
	"getRefund":         func(c *client) string { return refund.new(c, "ok").from(c).Is(201).Header.Get("Location") },
	"livez":             func(*client) string { return "/livez" },
	"readyz":            func(*client) string { return "/readyz" },
	"docs":              func(*client) string { return "/docs" },
	"idempotencyPolicy": func(*client) string { return "/docs/idempotency" },
	"problem":           func(*client) string { return "/problems/payment-declined" },
	"openapiDocument":   func(*client) string { return "/openapi.yaml" },
}

// For a POST, ways to each status. success is what the operation answers when all is well.
func postWays(w contractWorld, operation string, success int) map[int]func() answer {
	valid := func() request { return posts[operation](w.Client) }
	ways := map[int]func() answer{
		success: func() answer { return valid().from(w.Client) },
		400:     func() answer { r := valid(); r.key = ""; return r.from(w.Client) },
		401:     func() answer { return valid().from(w.Client, "Authorization:") },
		404:     func() answer { r := valid(); return r.nowhere().from(w.Client) },
		410: func() answer {
			r := valid()
			r.from(w.Client).Is(success)
			w.MoveBack(r.key, 25*time.Hour)
			return r.from(w.Client)
		},
		413: func() answer { r := valid(); r.body = strings.Repeat(" ", 64<<10) + r.body; return r.from(w.Client) },
		415: func() answer { return valid().from(w.Client, "Content-Type: text/plain") },
		422: func() answer {
			r := valid()
			request{"/v1/orders", r.key, `{"amount":1,"currency":"EUR"}`}.from(w.Client).Is(201)
			return r.from(w.Client)
		},
		429: func() answer { return valid().from(w.limited) },
		500: func() answer { return valid().from(w.broken) },
		503: func() answer { return valid().from(w.draining) },
	}
	switch operation {
	case "cancelOrder":
		ways[409] = func() answer {
			r := valid()
			r.from(w.Client).Is(200)
			r.key = w.NewKey()
			return r.from(w.Client)
		}
	case "createPayment", "createRefund":
		s := payment
		if operation == "createRefund" {
			s = refund
		}
		ways[202] = func() answer { return valid().from(w.Client, "Prefer: respond-async") }
		ways[402] = func() answer { return s.new(w.Client, "declined").from(w.Client) }
		ways[409] = func() answer {
			r := valid() // Its ground may be a payment, which must pass.
			hold := w.Gateway.HoldBefore(s.post, 1)
			first := servicetest.Go(func() answer { return r.from(w.Client) })
			hold.Arrived()
			second := r.from(w.Client)
			hold.Release()
			first().Is(success)
			return second
		}
		ways[504] = func() answer {
			r := valid()
			defer w.Gateway.On(s.get, servicetest.Always, servicetest.Silent)()
			defer w.Gateway.On(s.post, servicetest.Always, servicetest.Silent)()
			return r.from(w.hurried)
		}
	}
	return ways
}

// nowhere is the same request about something that is not there.
func (r request) nowhere() request {
	missing := uuid.Must(uuid.NewV7()).String()
	segments := strings.Split(r.path, "/")
	if len(segments) > 3 {
		segments[3] = missing
		r.path = strings.Join(segments, "/")
		return r
	}
	before, after, _ := strings.Cut(r.body, `"order_id":"`)
	r.body = before + `"order_id":"` + missing + after[min(36, len(after)):]
	return r
}

// For a GET, ways to each status.
func getWays(w contractWorld, operation string) map[int]func() answer {
	get := func(c *client, path string, headers ...string) answer { return c.Do("GET", path, "", "", headers...) }
	path := func() string { return gets[operation](w.Client) }
	return map[int]func() answer{
		200: func() answer { return get(w.Client, path()) },
		400: func() answer { return get(w.Client, path()+"?limit=0") },
		401: func() answer { return get(w.Client, path(), "Authorization:") },
		404: func() answer { return get(w.Client, request{path: path()}.elsewhere()) },
		429: func() answer { return get(w.limited, path()) },
		500: func() answer { return get(w.broken, path()) },
		503: func() answer { return get(w.draining, path()) },
	}
}

func (r request) elsewhere() string {
	if strings.HasPrefix(r.path, "/problems/") {
		return "/problems/none"
	}
	return r.nowhere().path
}

// Nothing in these can fail: they answer from memory. The document declares 500 for them because that is what the service would say.
var cannotFail = []string{"livez", "docs", "idempotencyPolicy", "problem", "openapiDocument"}

func TestEveryStatusOfEveryOperationIsAsTheDocumentDeclaresIt(t *testing.T) {
	t.Parallel()
	w := newContractWorld(t)
	document := w.Document()
	for path, item := range document.Paths.Map() {
		for method, operation := range item.Operations() {
			if method == "HEAD" {
				continue
			}
			success := cmp.Or(map[string]int{"cancelOrder": 200}[operation.OperationID], 201)
			ways := getWays(w, operation.OperationID)
			if method == "POST" {
				ways = postWays(w, operation.OperationID, success)
			}
			for status := range operation.Responses.Map() {
				if status == "500" && slices.Contains(cannotFail, operation.OperationID) {
					continue
				}
				t.Run(fmt.Sprintf("%s %s %s", method, path, status), func(t *testing.T) {
					var code int
					_, err := fmt.Sscan(status, &code)
					require.NoError(t, err, "the document declares single statuses")
					way, known := ways[code]
					require.True(t, known, "no way is known to this answer; find one, or take it out of the document")
					way().Is(code)
				})
			}
		}
	}
}
