package api

import (
	"net/http"

	"github.com/labstack/echo/v4"

	"example.com/payments/internal/payments"
)

// CreateRefund implements POST /v1/payments/{id}/refunds.
func (s *Server) CreateRefund(c echo.Context, id PaymentID) error {
	object, err := readObject(c)
	if err != nil {
		return err
	}
	f := newFields(object)
	refund := payments.NewRefund{
		Amount: f.optionalAmount("amount"),
		Reason: f.text("reason", 255),
		Wait:   waitOf(c),
	}
	if err := f.err(); err != nil {
		return err
	}
	if refund.PaymentID, err = pathID(id); err != nil {
		return err
	}
	var fields present
	if refund.Amount != nil {
		fields.amount("amount", *refund.Amount)
	}
	fields.optionalText("reason", refund.Reason)
	refund.Claim = claimOf(c, []string{refund.PaymentID.String()}, fields)

	answer, err := s.Payments.CreateRefund(c.Request().Context(), refund)
	if err != nil {
		return err
	}
	return writeAnswer(c, answer)
}

// GetRefund implements GET /v1/refunds/{id}.
func (s *Server) GetRefund(c echo.Context, id RefundID) error {
	refundID, err := pathID(id)
	if err != nil {
		return err
	}
	refund, err := s.Payments.Refund(c.Request().Context(), stateOf(c).merchantID, refundID)
	if err != nil {
		return err
	}
	return c.JSONBlob(http.StatusOK, mustJSON(refundResource(refund)))
}

// ListRefunds implements GET /v1/payments/{id}/refunds.
func (s *Server) ListRefunds(c echo.Context, id PaymentID, params ListRefundsParams) error {
	var q query
	page := q.page(params.Limit, params.Cursor)
	if err := q.err(); err != nil {
		return err
	}
	paymentID, err := pathID(id)
	if err != nil {
		return err
	}
	refunds, next, err := s.Payments.RefundsOfPayment(c.Request().Context(), stateOf(c).merchantID, paymentID, page)
	if err != nil {
		return err
	}
	return c.JSONBlob(http.StatusOK, mustJSON(RefundList{Data: each(refunds, refundResource), NextCursor: cursorOf(next)}))
}

func refundResource(refund payments.Refund) Refund {
	return Refund{
		ID:               refund.ID,
		PaymentID:        refund.PaymentID,
		Status:           RefundStatus(refund.Status),
		Amount:           refund.Amount,
		Currency:         refund.Currency,
		Reason:           refund.Reason,
		FailureCode:      refund.FailureCode,
		GatewayReference: refund.GatewayReference,
		CreatedAt:        refund.CreatedAt,
	}
}
