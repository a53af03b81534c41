package api

import (
	"errors"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
)

// How long a client should stay away when nothing better is known: the shortest that whole seconds can say.
const retrySoon = 1

var (
	errUnauthorized    = errors.New("credentials are missing or wrong")
	errContentTooLarge = errors.New("content is too large")
	errShuttingDown    = errors.New("shutting down")
	errOverloaded      = errors.New("too many requests in flight")
)

// errorTable is the one place where errors become answers. The first row that fits decides. What has more to say than its slug, says it
// in problemOf.
var errorTable = []struct {
	err        error
	slug       string
	retryAfter int
	link       bool
}{
	{err: errShuttingDown, slug: "shutting-down", retryAfter: retrySoon},
	{err: errOverloaded, slug: "overloaded", retryAfter: retrySoon},
	{err: errUnauthorized, slug: "unauthorized"},
	{err: payments.ErrUnauthorized, slug: "unauthorized"},
	{err: errMediaTypeUnsupported, slug: "unsupported-media-type"},
	{err: errContentCodingUnsupported, slug: "unsupported-media-type"},
	{err: errContentTooLarge, slug: "content-too-large"},

	{err: idempotency.ErrKeyMissing, slug: "idempotency-key-missing", link: true},
	{err: idempotency.ErrKeyInvalid, slug: "idempotency-key-invalid", link: true},
	{err: idempotency.ErrKeyReused, slug: "idempotency-key-reused", link: true},
	{err: idempotency.ErrRecipeUnknown, slug: "fingerprint-recipe-unknown", retryAfter: retrySoon},

	{err: payments.ErrNotFound, slug: "not-found"},
	{err: payments.ErrOrderNotFound, slug: "order-not-found"},
	{err: payments.ErrOrderNotOpen, slug: "order-not-open"},
	{err: payments.ErrAmountMismatch, slug: "amount-mismatch"},
	{err: payments.ErrOrderPaymentInProgress, slug: "order-payment-in-progress", retryAfter: retrySoon},
	{err: payments.ErrPaymentNotRefundable, slug: "payment-not-refundable"},
	{err: payments.ErrRefundExceedsPayment, slug: "refund-exceeds-payment"},

	{err: payments.ErrOutcomeUnknown, slug: "gateway-timeout", retryAfter: retrySoon},
	{err: payments.ErrNotCharged, slug: "gateway-unavailable", retryAfter: retrySoon},
	{err: payments.ErrStorageUnavailable, slug: "storage-unavailable", retryAfter: retrySoon},
}

// problemOf turns any error into a problem. What nobody has foreseen is an internal error, and tells nothing.
func problemOf(err error) problem {
	p := newProblem("internal-error")
	for _, row := range errorTable {
		if errors.Is(err, row.err) {
			p = newProblem(row.slug)
			p.retryAfter, p.link = row.retryAfter, row.link
			break
		}
	}
	switch p.slug {
	case "unauthorized":
		p.header = http.Header{"Www-Authenticate": {`Bearer realm="payments"`}}
	case "shutting-down":
		p.header = http.Header{"Connection": {"close"}}
	}
	switch {
	case errors.Is(err, errMediaTypeUnsupported):
		p.header = http.Header{"Accept": {echo.MIMEApplicationJSON}}
	case errors.Is(err, errContentCodingUnsupported):
		p.header = http.Header{"Accept-Encoding": {"identity"}}
	}

	var invalidKey *idempotency.InvalidKeyError
	var malformed *malformedError
	var validation *validationError
	var expired *idempotency.ExpiredError
	var inFlight *idempotency.InFlightError
	var unfinished *payments.UnfinishedError
	var limited *rateLimitedError
	var fromEcho *echo.HTTPError
	switch {
	case errors.As(err, &limited):
		p = newProblem("rate-limited")
		p.retryAfter = wholeSeconds(limited.wait)
	case errors.As(err, &invalidKey):
		p.detail = invalidKey.Reason
	case errors.As(err, &malformed):
		p = newProblem("request-malformed")
		p.detail = malformed.reason
	case errors.As(err, &validation):
		p = newProblem("validation-failed")
		p.fields = validation.faults
	case errors.As(err, &expired):
		p = newProblem("idempotency-key-expired")
		p.location, p.link = expired.ResourcePath, true
	case errors.As(err, &inFlight):
		p = inFlightProblem(inFlight)
	case errors.As(err, &unfinished):
		p.location = unfinished.Subject.Path
		p.subject = subjectOf(unfinished.Subject.Kind, unfinished.Subject.ID.String())
		p.subject.Outcome, p.subject.Retry = "unknown", "same-key"
		if errors.Is(err, payments.ErrNotCharged) {
			p.subject.Outcome = "not-charged"
		}
	case errors.As(err, &fromEcho) && fromEcho.Code == http.StatusNotFound:
		p = newProblem("not-found")
	case errors.As(err, &fromEcho) && fromEcho.Code == http.StatusMethodNotAllowed:
		p = newProblem("method-not-allowed")
	}
	return p
}

func inFlightProblem(inFlight *idempotency.InFlightError) problem {
	record := inFlight.Record
	p := newProblem("idempotency-in-progress")
	p.retryAfter = wholeSeconds(record.LeaseLeft)
	p.location, p.link = record.ResourcePath, true
	kind := payments.KindPayment
	if record.Route == payments.RouteCreateRefund {
		kind = payments.KindRefund
	}
	p.subject = subjectOf(kind, record.ResourceID.String())
	p.subject.StartedAt = record.StartedAt.UTC().Format(time.RFC3339Nano)
	return p
}

// wholeSeconds rounds up, and is never less than what Retry-After can say.
func wholeSeconds(d time.Duration) int {
	return max(int(math.Ceil(d.Seconds())), retrySoon)
}

func setRetryAfter(header http.Header, seconds int) {
	header.Set("Retry-After", strconv.Itoa(seconds))
}

func subjectOf(kind payments.Kind, id string) problemSubject {
	if kind == payments.KindRefund {
		return problemSubject{RefundID: id}
	}
	return problemSubject{PaymentID: id}
}
