package idempotency

import (
	"errors"
	"fmt"
	"time"
)

var (
	// ErrKeyReused: the key was first used for another request. The stored answer is never shown to such a request.
	ErrKeyReused = errors.New("idempotency key was used for another request")
	// ErrNoRecord: nobody has claimed the key.
	ErrNoRecord = errors.New("idempotency key has no record")
)

// ExpiredError: the key is spent and its answer's retention has passed. The resource is still to be found at its path.
type ExpiredError struct {
	ResourcePath string
}

func (e *ExpiredError) Error() string { return "idempotency key has expired" }

// InFlightError: another request with the same key is at work on it, or was until a moment ago.
type InFlightError struct {
	Record Record
	Waited bool // the request's own wait for the answer was in vain
}

func (e *InFlightError) Error() string {
	return fmt.Sprintf("idempotency key is in progress, attempt %d, lease left %s", e.Record.Attempt, e.Record.LeaseLeft.Round(time.Millisecond))
}
