package payments_test

import (
	"testing"

	"example.com/payments/internal/dbtest"
	"example.com/payments/internal/servicetest"
)

func TestMain(m *testing.M) {
	servicetest.MoreAtOnce()
	dbtest.Main(m)
}
