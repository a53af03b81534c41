package strategies

import (
	"context"
	"fmt"
	"os"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"example.com/payments/internal/dbtest"
	"example.com/payments/internal/idempotency/strategies/devredis"
)

func TestMain(m *testing.M) {
	code := dbtest.Run(m)
	if server, err := sharedRedis.peek(); server != nil && err == nil {
		_ = server.Stop()
	}
	if code == 0 {
		pays.Wait()
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// sharedRedis is the one server of this binary's tests: a key's name begins with its merchant, and each test has its own.
var sharedRedis onceRedis

type onceRedis struct {
	mu     sync.Mutex
	server *devredis.Server
	err    error
}

func (o *onceRedis) get(t testing.TB) *devredis.Server {
	t.Helper()
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.server == nil && o.err == nil {
		o.server, o.err = devredis.Start(context.Background())
	}
	if o.err != nil {
		t.Fatalf("no Redis for this test: %v", o.err)
	}
	return o.server
}

func (o *onceRedis) peek() (*devredis.Server, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.server, o.err
}

// TestRedisUsed says in the test's output which Redis the suite has run against. In CI it must be a real one.
func TestRedisUsed(t *testing.T) {
	t.Parallel()
	server := sharedRedis.get(t)
	switch {
	case server.Real():
		t.Log("redis_set_nx is tested against", server.Source())
	case os.Getenv("CI") != "":
		t.Fatal("CI tests against a real Redis: install redis-server, so that it is on PATH")
	default:
		t.Skip("redis_set_nx is not tested against a real Redis, but against " + server.Source())
	}
}
