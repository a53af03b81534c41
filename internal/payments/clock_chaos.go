//go:build chaos

package payments

import (
	"encoding/binary"
	"os"
	"time"

	"github.com/google/uuid"
)

// clockOffset is how wrong this process's clock is. One that cannot be read would make a clock that is right, and a test that shows nothing.
var clockOffset = func() time.Duration {
	text := os.Getenv("CLOCK_OFFSET")
	if text == "" {
		return 0
	}
	offset, err := time.ParseDuration(text)
	if err != nil {
		panic("payments: CLOCK_OFFSET: " + err.Error())
	}
	return offset
}()

func now() time.Time { return time.Now().Add(clockOffset) }

// newUUID shifts the 48 bits of a UUIDv7 that are milliseconds.
func newUUID() uuid.UUID {
	id := uuid.Must(uuid.NewV7())
	shifted := binary.BigEndian.Uint64(id[:8]) + uint64(clockOffset.Milliseconds())<<16
	binary.BigEndian.PutUint64(id[:8], shifted)
	return id
}
