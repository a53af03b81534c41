//go:build !chaos

package payments

import (
	"time"

	"github.com/google/uuid"
)

// now and newUUID are where this process's clock comes into what is stored and shown. Whatever must be right however wrong the clock is,
// goes by the database's. The tests under faults build with a clock that is wrong: see clock_chaos.go.
func now() time.Time { return time.Now() }

func newUUID() uuid.UUID { return uuid.Must(uuid.NewV7()) }
