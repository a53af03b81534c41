package api

import (
	"context"
	"net/http"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"example.com/payments/internal/payments"
)

// TwinPath is where the twin of POST /v1/payments is served.
const TwinPath = "/v1/twin"

// ServeTwin adds the twin of POST /v1/payments without idempotency, for the benchmark that tells what idempotency costs: the same way in
// and the same way out, but no key, no fingerprint and no stored answer. pay does the business and returns the payment as it has ended. It
// must be called before there are requests.
func (s *Server) ServeTwin(pay func(ctx context.Context, merchantID uuid.UUID, payment payments.NewPayment) (payments.Payment, error)) {
	s.echo.POST(TwinPath, func(c echo.Context) error {
		object, err := readObject(c)
		if err != nil {
			return err
		}
		f := newFields(object)
		request := payments.NewPayment{
			OrderID:       f.uuid("order_id"),
			Amount:        f.amount("amount"),
			Currency:      f.currency("currency"),
			PaymentMethod: f.paymentMethod("payment_method"),
			Metadata:      f.metadata("metadata"),
		}
		if err := f.err(); err != nil {
			return err
		}
		payment, err := pay(c.Request().Context(), stateOf(c).merchantID, request)
		if err != nil {
			return err
		}
		c.Response().Header().Set(echo.HeaderLocation, Answers{}.Path(payments.KindPayment, payment.ID))
		return c.JSONBlob(http.StatusCreated, mustJSON(paymentResource(payment)))
	}, s.authenticate, s.limitRate, s.readBody)
}
