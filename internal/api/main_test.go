package api_test

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"example.com/payments/internal/dbtest"
	"example.com/payments/internal/servicetest"
)

// TestMain also sees to it that nothing outlives the tests: what is started is stopped.
func TestMain(m *testing.M) {
	servicetest.MoreAtOnce()
	code := dbtest.Run(m)
	// The register of merchants lives as long as the process, and its cache cannot be stopped.
	cache := goleak.IgnoreAnyFunction("github.com/hashicorp/golang-lru/v2/expirable.NewLRU[...].func1")
	if err := goleak.Find(cache); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}
