package api

import (
	"math"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/hashicorp/golang-lru/v2/expirable"
	"golang.org/x/time/rate"
)

const (
	// As many merchants as may be active at once before the quietest of them gets a full bucket back too early.
	rateLimitedMerchants = 10_000
	// A bucket that nobody has drawn from for this long is full again at any rate that is worth limiting.
	rateLimitMemory = 10 * time.Minute
)

// rateLimiter gives each merchant a token bucket: perSecond requests a second, and a burst of one second's worth, at least one. It counts
// in this process alone; n replicas let n times as much through.
type rateLimiter struct {
	perSecond float64
	mu        sync.Mutex // a merchant's first two requests must not get a bucket each
	buckets   *expirable.LRU[uuid.UUID, *rate.Limiter]
}

// newRateLimiter returns nil, which limits nothing, for a rate of zero.
func newRateLimiter(perSecond float64) *rateLimiter {
	if perSecond == 0 {
		return nil
	}
	return &rateLimiter{
		perSecond: perSecond,
		buckets:   expirable.NewLRU[uuid.UUID, *rate.Limiter](rateLimitedMerchants, nil, rateLimitMemory),
	}
}

// admit reports whether the merchant may send a request now, and if not, after how long.
func (l *rateLimiter) admit(merchantID uuid.UUID) (wait time.Duration, ok bool) {
	if l == nil {
		return 0, true
	}
	reservation := l.bucket(merchantID).Reserve()
	if wait = reservation.Delay(); wait == 0 {
		return 0, true
	}
	reservation.Cancel()
	return wait, false
}

func (l *rateLimiter) bucket(merchantID uuid.UUID) *rate.Limiter {
	l.mu.Lock()
	defer l.mu.Unlock()
	bucket, ok := l.buckets.Get(merchantID)
	if !ok {
		bucket = rate.NewLimiter(rate.Limit(l.perSecond), max(1, int(math.Ceil(l.perSecond))))
	}
	l.buckets.Add(merchantID, bucket) // Again, too: it is forgotten so long after its last use, not after its first.
	return bucket
}

// rateLimitedError carries how long the client should stay away.
type rateLimitedError struct {
	wait time.Duration
}

func (e *rateLimitedError) Error() string { return "too many requests" }
