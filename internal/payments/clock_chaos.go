//go:build chaos

package payments

import (
	"encoding/binary"
	"os"
	"time"

	"github.com/google/uuid"
)

// clockOffset is how wrong this process's clock is.
var clockOffset, _ = time.ParseDuration(os.Getenv("CLOCK_OFFSET"))

func now() time.Time { return time.Now().Add(clockOffset) }

// newUUID shifts the 48 bits of a UUIDv7 that are milliseconds.
func newUUID() uuid.UUID {
	id := uuid.Must(uuid.NewV7())
	shifted := binary.BigEndian.Uint64(id[:8]) + uint64(clockOffset.Milliseconds())<<16
	binary.BigEndian.PutUint64(id[:8], shifted)
	return id
}
