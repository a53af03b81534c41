package api

import (
	"maps"
	"net/http"

	"github.com/labstack/echo/v4"
)

// problemType is one kind of error as the client meets it. This table is the source of the answers, of the pages under /problems and
// of the status table in /docs/idempotency; the tests hold it against openapi.yaml.
type problemType struct {
	slug   string
	status int
	title  string
	// What the client is told when nothing more can be said: what happened, and what to do. It never repeats what was sent.
	detail string
	// What it means for the money, for the page.
	money string
	// What becomes of the key, for the page and the status table.
	key string
}

const (
	keyUntouched = "The key, if there was one, is as it was before."
	keyFree      = "The key is free: nothing was stored."
	keyStored    = "This is the key's answer. Every repeat gets it, until retention ends."
	keyContinues = "The key is still in progress. A repeat continues the same payment."

	moneyUntouched = "This request has moved no money."
	moneyUnknown   = "Money may have moved. A repeat with the same key finds out, and never charges twice."
)

var problemTypes = []problemType{
	{"request-malformed", http.StatusBadRequest, "The request is malformed", "The body is not the strict JSON that this API reads.", moneyUntouched, keyUntouched},
	{"validation-failed", http.StatusBadRequest, "The request is not valid", "Some fields are missing or have values that are not accepted. See errors for each of them.", moneyUntouched, keyUntouched},
	{"idempotency-key-missing", http.StatusBadRequest, "The idempotency key is missing", "Send an Idempotency-Key header with a value of your own that names this intent, for example a UUID.", moneyUntouched, keyUntouched},
	{"idempotency-key-invalid", http.StatusBadRequest, "The idempotency key is invalid", "Send one Idempotency-Key header of 1 to 255 visible ASCII characters.", moneyUntouched, keyUntouched},
	{"amount-mismatch", http.StatusBadRequest, "The amount is not the order's", "The amount and currency of a payment must be those of its order.", moneyUntouched, keyFree},
	{"unauthorized", http.StatusUnauthorized, "The credentials are missing or wrong", "Send Authorization: Bearer and your API key.", moneyUntouched, keyUntouched},
	{"payment-declined", http.StatusPaymentRequired, "The payment was declined", "The issuer has declined the payment. To try again, perhaps with another payment method, use a new key.", "Nothing was charged.", keyStored},
	{"payment-failed", http.StatusPaymentRequired, "The payment has failed", "The payment was closed with nothing charged, and this key can never charge. To try again, use a new key.", "Nothing was charged, and nothing ever will be under this key.", keyStored},
	{"refund-declined", http.StatusPaymentRequired, "The refund was declined", "The gateway has declined the refund. To try again, use a new key.", "Nothing was given back.", keyStored},
	{"refund-failed", http.StatusPaymentRequired, "The refund has failed", "The refund was closed with nothing given back, and this key never can. To try again, use a new key.", "Nothing was given back, and nothing ever will be under this key.", keyStored},
	{"not-found", http.StatusNotFound, "Not found", "There is nothing here.", moneyUntouched, keyFree},
	{"order-not-found", http.StatusNotFound, "The order was not found", "There is no order with this order_id.", moneyUntouched, keyFree},
	{"method-not-allowed", http.StatusMethodNotAllowed, "The method is not allowed", "This path does not take this method. See Allow for those it takes.", moneyUntouched, keyUntouched},
	{"idempotency-in-progress", http.StatusConflict, "A request with this key is in progress", "A request with this key is still in progress. Retry with the same key after the time in Retry-After.", "The request in progress may move money, once.", keyContinues},
	{"order-not-open", http.StatusConflict, "The order is not open", "The order is paid, canceled or refunded.", moneyUntouched, keyFree},
	{"order-payment-in-progress", http.StatusConflict, "The order is being paid", "Another payment of this order is in progress. Look at it, or retry after the time in Retry-After.", moneyUntouched, keyFree},
	{"payment-not-refundable", http.StatusConflict, "The payment cannot be refunded", "Only a payment that has succeeded can be refunded.", moneyUntouched, keyFree},
	{"refund-exceeds-payment", http.StatusConflict, "The refunds would exceed the payment", "What is left of the payment is less than this refund.", moneyUntouched, keyFree},
	{"idempotency-key-expired", http.StatusGone, "The idempotency key has expired", "This key was used, and the time for which its answer is kept has passed. See Location for what it was used for. For a new intent use a new key.", moneyUntouched, "The key is spent for ever."},
	{"content-too-large", http.StatusRequestEntityTooLarge, "The content is too large", "A request body has at most 64 KiB.", moneyUntouched, keyUntouched},
	{"unsupported-media-type", http.StatusUnsupportedMediaType, "The media type is not supported", "Send application/json in UTF-8, without a content coding.", moneyUntouched, keyUntouched},
	{"idempotency-key-reused", http.StatusUnprocessableEntity, "The idempotency key was used for another request", "This key was first used for another request. To repeat that request send exactly the same; for a new intent use a new key.", moneyUntouched, "The key keeps the answer, or the work, of the request that it was first used for."},
	{"rate-limited", http.StatusTooManyRequests, "Too many requests", "Retry after the time in Retry-After.", moneyUntouched, keyUntouched},
	{"internal-error", http.StatusInternalServerError, "Something went wrong here", "The fault is ours. Retry with the same key.", moneyUnknown, keyContinues},
	{"gateway-unavailable", http.StatusServiceUnavailable, "The gateway is unavailable", "The gateway cannot be reached or refuses, and has charged nothing. Retry with the same key.", "Nothing was charged.", keyContinues},
	{"storage-unavailable", http.StatusServiceUnavailable, "The storage is unavailable", "The service cannot reach its database at the moment. Retry with the same key.", "If the problem names a payment or a refund, money may have moved. Otherwise this request has moved none.", "If the problem names a payment or a refund, a repeat continues it. Otherwise the key is as it was before."},
	{"shutting-down", http.StatusServiceUnavailable, "The service is shutting down", "This replica is shutting down. Retry on a new connection.", moneyUntouched, keyUntouched},
	{"overloaded", http.StatusServiceUnavailable, "The service is overloaded", "Too many requests are in progress here. Retry after the time in Retry-After.", moneyUntouched, keyUntouched},
	{"fingerprint-recipe-unknown", http.StatusServiceUnavailable, "The key was used with a newer version of the service", "This replica cannot compare the request with the one that the key was first used for. Retry with the same key.", moneyUntouched, keyUntouched},
	{"gateway-timeout", http.StatusGatewayTimeout, "The outcome is unknown", "The gateway gave no clear answer in time. Retry with the same key to learn the outcome.", moneyUnknown, keyContinues},
}

// problem is what an error has come to: its type, and what is to be said in this case.
type problem struct {
	problemType
	detail     string // replaces the type's
	retryAfter int    // seconds; 0: none
	link       bool   // point to the key policy
	location   string
	subject    problemSubject
	fields     []fieldFault
	header     http.Header // more headers
}

// problemSubject are the extension members that name a payment or a refund and say how it stands.
type problemSubject struct {
	PaymentID   string `json:"payment_id,omitempty"`
	RefundID    string `json:"refund_id,omitempty"`
	DeclineCode string `json:"decline_code,omitempty"`
	Outcome     string `json:"outcome,omitempty"`
	Retry       string `json:"retry,omitempty"`
	StartedAt   string `json:"started_at,omitempty"`
}

// problemBody is the representation of RFC 9457, section 3.
type problemBody struct {
	Type     string `json:"type"`
	Title    string `json:"title"`
	Status   int    `json:"status"`
	Detail   string `json:"detail"`
	Instance string `json:"instance"`
	problemSubject
	Errors []fieldFault `json:"errors,omitempty"`
}

func newProblem(slug string) problem {
	for _, t := range problemTypes {
		if t.slug == slug {
			return problem{problemType: t, detail: t.detail}
		}
	}
	panic("api: no problem type " + slug)
}

const mediaTypeProblem = "application/problem+json"

// body renders the problem for the request with the given id.
func (p problem) body(publicURL, requestID string) []byte {
	return mustJSON(problemBody{
		Type:           publicURL + "/problems/" + p.slug,
		Title:          p.title,
		Status:         p.status,
		Detail:         p.detail,
		Instance:       requestID,
		problemSubject: p.subject,
		Errors:         p.fields,
	})
}

// policyLink points from an answer about a key to what this service promises for keys, as the draft wants it.
const policyLink = `</docs/idempotency>; rel="describedby"`

// write sends the problem.
func (p problem) write(c echo.Context, publicURL string) error {
	header := c.Response().Header()
	maps.Copy(header, p.header)
	if p.link {
		header.Set("Link", policyLink)
	}
	if p.location != "" {
		header.Set("Location", p.location)
	}
	if p.retryAfter > 0 {
		setRetryAfter(header, p.retryAfter)
	}
	return c.Blob(p.status, mediaTypeProblem, p.body(publicURL, requestID(c)))
}
