// Package api is HTTP in, HTTP out. It reads a request strictly, hands it to package payments, and writes what comes back; it decides
// nothing about money and knows no SQL.
//
// What is decided before the story begins is decided in one fixed order, and the order is the order of the middleware below: draining,
// route and method, credentials, rate, media type, size, key. The handlers go on with JSON, fields and fingerprint. An error rises untouched to
// one table (errors.go), from which the answers, the problem pages and the tests are made.
//
// The types and the list of routes are generated from openapi.yaml. echo is known here and in cmd/payments only.
package api

import (
	"context"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
)

// Merchants knows whose an API key is. It returns [payments.ErrUnauthorized] or [payments.ErrStorageUnavailable].
type Merchants interface {
	Authenticate(ctx context.Context, apiKey string) (uuid.UUID, error)
}

// Config is what a Server is built from.
type Config struct {
	Payments  *payments.Service
	Merchants Merchants
	// Ready says why the service cannot take requests, in a sentence for the operator; nil when it can.
	Ready        func(context.Context) error
	PublicURL    string                // begins the type of every problem; never taken from a request
	KeyRetention time.Duration         // how long an answer is kept; for the key policy
	InFlightMax  time.Duration         // how long one attempt takes at most; for the key policy
	RateLimit    float64               // requests per second and merchant; 0 is no limit
	MaxInFlight  int                   // requests at once; 0 is no limit
	Metrics      prometheus.Registerer // where to count; nil: nowhere
	Log          *slog.Logger
}

// Server answers HTTP. It is an [http.Handler].
type Server struct {
	Config
	echo     *echo.Echo
	limiter  *rateLimiter
	metrics  *metrics
	draining atomic.Bool
	inFlight atomic.Int64
}

var _ ServerInterface = (*Server)(nil)

// New builds the server and its routes.
func New(config Config) *Server {
	s := &Server{Config: config, echo: echo.New(), limiter: newRateLimiter(config.RateLimit), metrics: newMetrics(config.Metrics)}
	s.echo.HTTPErrorHandler = s.writeError
	s.echo.Pre(s.begin, s.refuseWhileDraining, s.limitInFlight)
	s.echo.Use(refuseOptions)

	// Per route, not as a group: a group's middleware answers 404 where 405 is due.
	read := []echo.MiddlewareFunc{s.authenticate, s.limitRate}
	list := []echo.MiddlewareFunc{s.authenticate, s.limitRate, readQuery}
	write := []echo.MiddlewareFunc{s.authenticate, s.limitRate, s.readBody, requireKey}
	RegisterHandlersWithOptions(withHEAD{s.echo}, s, RegisterHandlersOptions{
		OperationMiddlewares: map[string][]echo.MiddlewareFunc{
			"createOrder": write, "listOrders": list, "getOrder": read, "cancelOrder": write,
			"createPayment": write, "listPayments": list, "getPayment": read,
			"createRefund": write, "listRefunds": list, "getRefund": read,
		},
	})
	return s
}

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) { s.echo.ServeHTTP(w, r) }

// Drain makes the server refuse new requests. Those under way go on.
func (s *Server) Drain() { s.draining.Store(true) }

// withHEAD adds HEAD wherever there is GET.
type withHEAD struct{ *echo.Echo }

func (r withHEAD) GET(path string, handler echo.HandlerFunc, middleware ...echo.MiddlewareFunc) *echo.Route {
	r.Echo.HEAD(path, handler, middleware...)
	return r.Echo.GET(path, handler, middleware...)
}

// requestState is what the middleware finds out about a request.
type requestState struct {
	requestID  string
	merchantID uuid.UUID
	key        idempotency.Key
	prefer     preferences
	body       []byte
	bodyErr    error              // why the body has not arrived whole
	report     idempotency.Report // what became of the claim
}

const stateKey = "state"

func stateOf(c echo.Context) *requestState { return c.Get(stateKey).(*requestState) }

func requestID(c echo.Context) string { return stateOf(c).requestID }
