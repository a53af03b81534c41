package api

import (
	"net/http"

	"github.com/labstack/echo/v4"

	"example.com/payments/internal/payments"
)

// CreatePayment implements POST /v1/payments.
func (s *Server) CreatePayment(c echo.Context) error {
	object, err := readObject(c)
	if err != nil {
		return err
	}
	f := newFields(object)
	payment := payments.NewPayment{
		OrderID:       f.uuid("order_id"),
		Amount:        f.amount("amount"),
		Currency:      f.currency("currency"),
		PaymentMethod: f.paymentMethod("payment_method"),
		Metadata:      f.metadata("metadata"),
		Wait:          waitOf(c),
	}
	if err := f.err(); err != nil {
		return err
	}
	var fields present
	fields.text("order_id", payment.OrderID.String())
	fields.amount("amount", payment.Amount)
	fields.text("currency", payment.Currency)
	fields.text("payment_method", payment.PaymentMethod)
	fields.metadata("metadata", payment.Metadata)
	payment.Claim = claimOf(c, nil, fields)

	answer, err := s.Payments.CreatePayment(c.Request().Context(), payment)
	if err != nil {
		return err
	}
	return writeAnswer(c, answer)
}

// GetPayment implements GET /v1/payments/{id}.
func (s *Server) GetPayment(c echo.Context, id PaymentID) error {
	paymentID, err := pathID(id)
	if err != nil {
		return err
	}
	payment, err := s.Payments.Payment(c.Request().Context(), stateOf(c).merchantID, paymentID)
	if err != nil {
		return err
	}
	return c.JSONBlob(http.StatusOK, mustJSON(paymentResource(payment)))
}

// ListPayments implements GET /v1/payments.
func (s *Server) ListPayments(c echo.Context, params ListPaymentsParams) error {
	var q query
	filter := payments.PaymentFilter{
		OrderID:        q.uuid("order_id", params.OrderID),
		Status:         q.oneOf("status", params.Status, paymentStatuses),
		IdempotencyKey: q.idempotencyKey("idempotency_key", params.IdempotencyKey),
	}
	page := q.page(params.Limit, params.Cursor)
	if err := q.err(); err != nil {
		return err
	}
	list, next, err := s.Payments.Payments(c.Request().Context(), stateOf(c).merchantID, filter, page)
	if err != nil {
		return err
	}
	return c.JSONBlob(http.StatusOK, mustJSON(PaymentList{Data: each(list, paymentResource), NextCursor: cursorOf(next)}))
}

var paymentStatuses = []string{payments.StatusProcessing, payments.StatusSucceeded, payments.StatusDeclined, payments.StatusFailed}

func paymentResource(payment payments.Payment) Payment {
	return Payment{
		ID:               payment.ID,
		OrderID:          payment.OrderID,
		Status:           PaymentStatus(payment.Status),
		Amount:           payment.Amount,
		Currency:         payment.Currency,
		PaymentMethod:    payment.PaymentMethod,
		DeclineCode:      payment.DeclineCode,
		FailureCode:      payment.FailureCode,
		GatewayReference: payment.GatewayReference,
		AmountRefunded:   payment.AmountRefunded,
		Metadata:         payment.Metadata,
		CreatedAt:        payment.CreatedAt,
	}
}
