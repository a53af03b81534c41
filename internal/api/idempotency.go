package api

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/labstack/echo/v4"

	"example.com/payments/internal/idempotency"
)

// requireKey refuses a request without a key that can be used, and puts the echo of the key on every answer from here on.
func requireKey(next echo.HandlerFunc) echo.HandlerFunc {
	return func(c echo.Context) error {
		key, err := idempotency.ParseKey(c.Request().Header.Values("Idempotency-Key"))
		if err != nil {
			return err
		}
		stateOf(c).key = key
		c.Response().Header().Set("Idempotency-Key", key.Header())
		return next(c)
	}
}

// claimOf is what the request wants its key for. The route is the template that the router has matched, written as the contract
// writes it; the parameters belong to the fingerprint, so the same key on another route or another resource is another request.
func claimOf(c echo.Context, params []string, fields []idempotency.Field) idempotency.Claim {
	state := stateOf(c)
	mode := idempotency.ModeSync
	if state.prefer.respondAsync {
		mode = idempotency.ModeAsync
	}
	return idempotency.Claim{
		MerchantID: state.merchantID,
		Key:        state.key,
		Request: idempotency.Request{
			Method: c.Request().Method,
			Route:  routeTemplate(c.Path()),
			Params: params,
			Fields: fields,
		},
		RequestID:   requestID(c),
		TraceParent: traceParent(c.Request().Context()),
		Mode:        mode,
		Report:      &state.report,
	}
}

// routeTemplate writes echo's /v1/payments/:id/refunds as /v1/payments/{id}/refunds.
func routeTemplate(path string) string {
	segments := strings.Split(path, "/")
	for i, segment := range segments {
		if name, ok := strings.CutPrefix(segment, ":"); ok {
			segments[i] = "{" + name + "}"
		}
	}
	return strings.Join(segments, "/")
}

// present collects the fields that a request has, for its fingerprint.
type present []idempotency.Field

func (p *present) text(name, value string) {
	*p = append(*p, idempotency.Field{Name: name, Value: value})
}

func (p *present) optionalText(name string, value *string) {
	if value != nil {
		p.text(name, *value)
	}
}

func (p *present) amount(name string, value int64) {
	p.text(name, strconv.FormatInt(value, 10))
}

// metadata that is empty means the same as metadata that is absent.
func (p *present) metadata(name string, value map[string]string) {
	if len(value) > 0 {
		p.text(name, idempotency.MapValue(value))
	}
}

// writeAnswer sends an answer of a key. Fresh or replayed, the body leaves through here, and it is the stored one.
func writeAnswer(c echo.Context, answer idempotency.Answer) error {
	header := c.Response().Header()
	for name, value := range answer.Headers {
		header.Set(name, value)
	}
	header.Set("Idempotent-Replayed", strconv.FormatBool(answer.Replayed))
	if !answer.ExpiresAt.IsZero() {
		header.Set("Idempotency-Expires", answer.ExpiresAt.UTC().Format(http.TimeFormat))
	}
	if answer.Replayed && answer.RequestID != "" {
		header.Set("Original-Request-Id", answer.RequestID)
		linkTrace(c.Request().Context(), answer.TraceParent)
	}
	if answer.Status == http.StatusAccepted {
		setRetryAfter(header, retrySoon)
	}
	setPreferenceApplied(c, answer.Status == http.StatusAccepted, answer.Waited)
	return c.Blob(answer.Status, answer.Headers[echo.HeaderContentType], answer.Body)
}

// setPreferenceApplied names those of the client's preferences that made a difference (RFC 7240, section 3).
func setPreferenceApplied(c echo.Context, accepted, waited bool) {
	prefer := stateOf(c).prefer
	var applied []string
	if accepted && prefer.respondAsync {
		applied = append(applied, "respond-async")
	}
	if waited {
		applied = append(applied, "wait="+strconv.Itoa(int(prefer.wait/time.Second)))
	}
	if len(applied) > 0 {
		c.Response().Header().Set("Preference-Applied", strings.Join(applied, ", "))
	}
}

// waitOf is how long the client would wait for another request's answer; nil when it did not say.
func waitOf(c echo.Context) *time.Duration {
	prefer := stateOf(c).prefer
	if !prefer.waitSet {
		return nil
	}
	return &prefer.wait
}
