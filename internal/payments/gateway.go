package payments

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"

	"github.com/google/uuid"
)

// Gateway is what the story needs of the external payment system: make the intent happen, look it up, and make sure that it
// never happens. Each call is one exchange over the network; patience and repetition belong to the caller (see charge.go).
//
// The gateway enters an intent's key before it works, answers a second Charge of a key with the first's outcome, and remembers
// keys for ever. That is what makes a repeated Charge safe.
//
// Every method returns an [Outcome] that the gateway itself stated about exactly this intent, or one of the errors
// [ErrNotSent], [ErrRefused], [ErrUnclear], which callers tell apart with errors.Is. A context that ends is no error of its
// own: it is one of the three, by what had been sent when it ended.
type Gateway interface {
	// Charge asks for the money to be moved. It returns a final outcome.
	Charge(ctx context.Context, intent Intent) (Outcome, error)
	// LookUp asks what became of the intent. It moves nothing, and returns any [OutcomeStatus]. It never returns ErrRefused.
	LookUp(ctx context.Context, intent Intent) (Outcome, error)
	// Cancel makes sure that an intent which has not happened never will. It returns [OutcomeCanceled], or the outcome the
	// intent already has. It never returns ErrRefused.
	Cancel(ctx context.Context, intent Intent) (Outcome, error)
}

// The three ways in which the gateway can leave an exchange without an outcome.
var (
	// ErrNotSent: no byte of the request left this process (the dial failed, or the context had ended before).
	ErrNotSent = errors.New("gateway: request was not sent")
	// ErrRefused: the gateway itself answered in full that it did not carry out the request: its own JSON 500 or 503. That is
	// not yet "nothing was charged": a 500 may come after the charge.
	ErrRefused = errors.New("gateway: request was refused")
	// ErrUnclear: anything else. A time-out or a reset after sending, a 502 or 504, an answer that cannot be understood or is
	// about something else. The money may have moved.
	ErrUnclear = errors.New("gateway: answer is unclear")
)

// IntentKind says which of the gateway's two ledgers an intent belongs to.
type IntentKind string

const (
	IntentCharge IntentKind = "charge"
	IntentRefund IntentKind = "refund"
)

// Intent is one movement of money that the gateway is asked for, under the one key that names it for ever.
type Intent struct {
	Kind     IntentKind
	Key      string // the gateway key of this intent, see GatewayKey
	Amount   int64  // minor units
	Currency string // ISO 4217

	PaymentMethod string // charges only
	ChargeKey     string // refunds only: the gateway key of the charge that is refunded
}

// OutcomeStatus is the gateway's word on an intent.
type OutcomeStatus string

const (
	OutcomeApproved   OutcomeStatus = "approved"   // money has moved
	OutcomeDeclined   OutcomeStatus = "declined"   // the issuer said no; final
	OutcomeCanceled   OutcomeStatus = "canceled"   // nothing has moved and nothing ever will
	OutcomeProcessing OutcomeStatus = "processing" // the gateway is working on it; nothing is known yet
	OutcomeNeverSeen  OutcomeStatus = "never_seen" // the gateway does not know the key at this moment
	// OutcomeNotFound: a 404 that may be of something in between. It is enough to send again, or to ask for a cancel, under the same key;
	// it is not the gateway's word that nothing was charged.
	OutcomeNotFound OutcomeStatus = "not_found"
)

// Outcome is what the gateway says about an intent.
type Outcome struct {
	Status      OutcomeStatus
	Reference   string // the gateway's id of the charge or refund, when approved or declined
	DeclineCode string // when declined
}

// Final reports whether nothing about the intent can change any more.
func (o Outcome) Final() bool {
	return o.Status == OutcomeApproved || o.Status == OutcomeDeclined || o.Status == OutcomeCanceled
}

// GatewayKey derives the key under which the gateway knows an intent: the lower-case hex SHA-256 of the kind, the merchant's id
// and the merchant's idempotency key, joined by newlines. It depends on nothing that the database could lose, so the same intent
// meets the same charge even when the claim itself was lost (an old backup, an asynchronous failover).
func GatewayKey(kind IntentKind, merchantID uuid.UUID, idempotencyKey string) string {
	sum := sha256.Sum256([]byte(string(kind) + "\n" + merchantID.String() + "\n" + idempotencyKey))
	return hex.EncodeToString(sum[:])
}
