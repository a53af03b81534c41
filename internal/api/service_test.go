package api_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"example.com/payments/internal/servicetest"
)

// What each test needs of the world; see package servicetest.
type (
	options = servicetest.Options
	world   = servicetest.World
	client  = servicetest.Client
	answer  = servicetest.Answer
)

func setup(t *testing.T, o options) *world {
	t.Helper()
	return servicetest.New(t, o)
}

// facts runs one sub-test for each fact.
func facts(t *testing.T, list []fact) {
	t.Helper()
	for _, f := range list {
		t.Run(f.name, func(t *testing.T) {
			t.Parallel()
			f.test(t)
		})
	}
}

type fact struct {
	name string
	test func(t *testing.T)
}

// request is a POST, so it can be repeated.
type request struct{ path, key, body string }

func (r request) from(c *client, headers ...string) answer {
	return c.Do("POST", r.path, r.key, r.body, headers...)
}

// story is what is made once: a payment, or a refund. What is promised for both is tested for both.
type story struct {
	name              string
	member            string // what a problem calls it
	post, get, cancel string // the gateway's routes
	resources         string // the path of what is made
	table             string
	// new makes the ground for a request and returns the request. The gateway treats it as it treats pm_<token>.
	new     func(c *client, token string) request
	changed func(body string) string // another request
	ledger  func(w *world) []servicetest.Entry
}

var payment = story{
	name: "payment", member: "payment_id", resources: "/v1/payments/", table: "payments",
	post: servicetest.PostCharge, get: servicetest.GetCharge, cancel: servicetest.CancelCharge,
	new: func(c *client, token string) request {
		return request{"/v1/payments", c.NewKey(), servicetest.PayBody(c.NewOrder(), "pm_"+token)}
	},
	changed: func(body string) string { return strings.Replace(body, "1999", "2000", 1) },
	ledger:  func(w *world) []servicetest.Entry { return w.Gateway.Charges() },
}

var refund = story{
	name: "refund", member: "refund_id", resources: "/v1/refunds/", table: "refunds",
	post: servicetest.PostRefund, get: servicetest.GetRefund, cancel: servicetest.CancelRefund,
	new: func(c *client, token string) request {
		return request{"/v1/payments/" + c.NewPayment("pm_refund_"+token) + "/refunds", c.NewKey(), `{"amount":500}`}
	},
	changed: func(body string) string { return strings.Replace(body, "500", "501", 1) },
	ledger:  func(w *world) []servicetest.Entry { return w.Gateway.Refunds() },
}

// id is that of the payment or refund which the answer is about.
func (s story) id(a answer) string {
	if a.Status < 300 {
		return a.Member("id")
	}
	return a.Member(s.member)
}

// path is where the payment or refund of the answer is to be found.
func (s story) path(a answer) string { return s.resources + s.id(a) }

// status is the status that the payment or refund of the answer has now.
func (s story) status(c *client, a answer) string {
	return c.Do("GET", s.path(a), "", "").Is(200).Member("status")
}

// once checks that all there is of the story is one resource, and at most one entry in the gateway's ledger.
func (s story) once(t *testing.T, w *world) {
	t.Helper()
	require.Equal(t, 1, w.Rows(s.table))
	require.LessOrEqual(t, len(s.ledger(w)), 1)
}

// leaveBehind has a worker die with the request, before the gateway has it or after it has done it, and lets the worker's lease end.
func (s story) leaveBehind(w *world, token string, charged bool) request {
	req := s.new(w.Client, token)
	dead := w.NewReplica(options{Gateway: servicetest.Dies(charged)})
	if _, err := dead.As(w.Merchant).Try(w.Context(), "POST", req.path, req.key, req.body); err == nil {
		panic("a dead worker has answered")
	}
	w.ExpireLease(req.key)
	return req
}

// cancelAtGateway leaves what a reaper leaves that died between its cancel and its record.
func (s story) cancelAtGateway(w *world, req request) {
	gatewayKey := w.GatewayKey(s.table, w.Key(req.key).ResourceID)
	w.Gateway.Do("POST", strings.Replace(strings.TrimPrefix(s.cancel, "POST "), "{key}", gatewayKey, 1))
}

// onceAmongTwins says what is wrong with the answers to n twins, of which one is fresh and the others are replays or came too early.
func onceAmongTwins(answers []answer) error {
	counts := servicetest.Count(answers)
	if counts["201 fresh"] != 1 || counts["201 fresh"]+counts["201 replay"]+counts["409 idempotency-in-progress"] != len(answers) {
		return fmt.Errorf("not once: %v", counts)
	}
	return nil
}

// exactly says what is wrong with the answers if they are not of these kinds.
func exactly(answers []answer, want map[string]int) error {
	if got := servicetest.Count(answers); !maps.Equal(got, want) {
		return fmt.Errorf("want %v, got %v", want, got)
	}
	return nil
}

// with replaces members of a JSON object; nil leaves one out.
func with(body string, changes map[string]any) string {
	var members map[string]any
	decoder := json.NewDecoder(strings.NewReader(body))
	decoder.UseNumber()
	if err := decoder.Decode(&members); err != nil {
		panic(err)
	}
	for name, value := range changes {
		if value == nil {
			delete(members, name)
		} else {
			members[name] = value
		}
	}
	changed, err := json.Marshal(members)
	if err != nil {
		panic(err)
	}
	return string(changed)
}

func quoted(key string) string { return fmt.Sprintf("%q", key) }

type pgxConn = pgx.Conn
