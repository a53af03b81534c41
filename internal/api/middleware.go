package api

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"runtime/debug"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
)

// maxBodyBytes is many times what the largest valid request has, and little enough to be read whole before it is judged.
const maxBodyBytes = 64 << 10

// begin names the request, answers whatever goes wrong further in, a panic included, and writes the request's one line of log. The line
// never has a body, a credential, or a key in the clear.
func (s *Server) begin(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		started := time.Now()
		state := &requestState{
			// Ours and not the client's: it names one request, and it is written into answers and logs as it is.
			requestID: uuid.Must(uuid.NewV7()).String(),
			prefer:    parsePrefer(c.Request().Header.Values("Prefer")),
		}
		c.Set(stateKey, state)
		c.Response().Header().Set("X-Request-Id", state.requestID)

		err := recovered(c, next)
		if err != nil {
			s.writeError(err, c)
		}
		took := time.Since(started)
		s.metrics.observe(c, took)
		nameSpan(c)
		s.logRequest(c, took, err)
		return nil
	}
}

// recovered turns a panic before the claim into an error. One after the claim never comes as far as this: see payments.Service.
func recovered(c echo.Context, next echo.HandlerFunc) (err error) {
	defer func() {
		value := recover()
		if value == http.ErrAbortHandler { //nolint:errorlint // net/http compares it so as well
			panic(value)
		}
		if value != nil {
			err = &payments.PanicError{Value: value, Stack: debug.Stack()}
		}
	}()
	return next(c)
}

// writeError answers with the problem that the error comes to.
func (s *Server) writeError(err error, c echo.Context) {
	if c.Response().Committed {
		return
	}
	if inFlight, ok := errors.AsType[*idempotency.InFlightError](err); ok {
		setPreferenceApplied(c, false, inFlight.Waited)
	}
	if err := problemOf(err).write(c, s.PublicURL); err != nil {
		s.Log.DebugContext(c.Request().Context(), "client did not take its answer", "request_id", requestID(c), "error", err)
	}
}

func (s *Server) logRequest(c echo.Context, took time.Duration, err error) {
	state := stateOf(c)
	status := c.Response().Status
	attributes := []slog.Attr{
		slog.String("request_id", state.requestID),
		slog.String("method", methodLabel(c.Request().Method)),
		slog.String("route", routeTemplate(c.Path())),
		slog.Int("status", status),
		slog.Float64("duration_ms", float64(took.Microseconds())/1000),
	}
	if state.merchantID != uuid.Nil {
		attributes = append(attributes, slog.Any("merchant", state.merchantID))
	}
	if state.key != "" {
		attributes = append(attributes, slog.Any("key", state.key))
	}
	if state.report.Result != "" {
		attributes = append(attributes, slog.String("claim", string(state.report.Result)), slog.String("resource", state.report.ResourcePath))
	}
	level := slog.LevelInfo
	if err != nil {
		attributes = append(attributes, slog.String("error", err.Error()))
	}
	if status >= http.StatusInternalServerError {
		level = slog.LevelError
	}
	if panicked, ok := errors.AsType[*payments.PanicError](err); ok {
		attributes = append(attributes, slog.String("stack", string(panicked.Stack)))
	}
	s.Log.LogAttrs(c.Request().Context(), level, "request", attributes...)
}

// refuseWhileDraining comes before the router, so a replica that goes away refuses every path but the one that says it is alive.
func (s *Server) refuseWhileDraining(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if s.draining.Load() && c.Request().URL.Path != "/livez" {
			return errShuttingDown
		}
		return next(c)
	}
}

// limitInFlight refuses what would only make everything slower. The health of the process can be asked for at any load.
func (s *Server) limitInFlight(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if path := c.Request().URL.Path; s.MaxInFlight == 0 || path == "/livez" || path == "/readyz" {
			return next(c)
		}
		defer s.inFlight.Add(-1)
		if s.inFlight.Add(1) > int64(s.MaxInFlight) {
			return errOverloaded
		}
		return next(c)
	}
}

// authenticate lets in whoever has an API key.
func (s *Server) authenticate(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		credentials := c.Request().Header.Values(echo.HeaderAuthorization)
		if len(credentials) != 1 {
			return errUnauthorized
		}
		scheme, apiKey, _ := strings.Cut(credentials[0], " ")
		if !strings.EqualFold(scheme, "Bearer") {
			return errUnauthorized
		}
		merchantID, err := s.Merchants.Authenticate(c.Request().Context(), strings.TrimSpace(apiKey))
		if err != nil {
			return err
		}
		stateOf(c).merchantID = merchantID
		c.Response().Header().Set(echo.HeaderCacheControl, "no-store")
		return next(c)
	}
}

// limitRate refuses what a merchant sends beyond its rate.
func (s *Server) limitRate(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if wait, ok := s.limiter.admit(stateOf(c).merchantID); !ok {
			return &rateLimitedError{wait: wait}
		}
		return next(c)
	}
}

// refuseOptions makes OPTIONS a method like any other: echo would answer it by itself, for every route and without credentials.
func refuseOptions(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if allow, ok := c.Get(echo.ContextKeyHeaderAllow).(string); ok {
			c.Response().Header().Set(echo.HeaderAllow, strings.TrimPrefix(allow, http.MethodOptions+", "))
			return echo.ErrMethodNotAllowed
		}
		return next(c)
	}
}

// readQuery refuses a query that cannot be read. echo would drop what it does not understand, and the answer would look as if nothing had
// been asked for.
func readQuery(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		if _, err := url.ParseQuery(c.Request().URL.RawQuery); err != nil {
			return &validationError{faults: []fieldFault{{Pointer: "/query", Code: faultInvalid, Detail: "The query is not well formed."}}}
		}
		return next(c)
	}
}

// mayBeEmpty are the operations for which an absent body is {}. Without a body there is no media type to be wrong.
var mayBeEmpty = map[string]bool{
	"/v1/orders/:id/cancel":    true,
	"/v1/payments/:id/refunds": true,
}

// readBody judges media type and size, in this order, and reads the body whole: it is small. A body that does not arrive is told of when it
// is the JSON's turn, see readObject.
func (s *Server) readBody(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		request := c.Request()
		if request.ContentLength > maxBodyBytes {
			// It says so itself, and is not invited to send it. Without the close net/http would wait for it all the same.
			c.Response().Header().Set(echo.HeaderConnection, "close")
			if err := checkMediaType(request.Header); err != nil {
				return err
			}
			return errContentTooLarge
		}
		state := stateOf(c)
		state.body, state.bodyErr = io.ReadAll(http.MaxBytesReader(c.Response(), request.Body, maxBodyBytes))
		if absent := len(state.body) == 0 && state.bodyErr == nil; absent && mayBeEmpty[c.Path()] {
			state.body = []byte("{}")
		} else if err := checkMediaType(request.Header); err != nil {
			return err
		}
		if _, tooLarge := errors.AsType[*http.MaxBytesError](state.bodyErr); tooLarge {
			return errContentTooLarge
		}
		return next(c)
	}
}

// readObject is where the JSON of a request is judged. Nothing is claimed for a request that has not arrived whole.
func readObject(c echo.Context) (jsonObject, error) {
	state := stateOf(c)
	if state.bodyErr != nil {
		return nil, fmt.Errorf("%w: %w", malformed("The body has not arrived whole."), state.bodyErr)
	}
	return readStrictJSON(state.body)
}
