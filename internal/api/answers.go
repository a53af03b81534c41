package api

import (
	"encoding/json"
	"net/http"

	"github.com/google/uuid"
	"github.com/labstack/echo/v4"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
)

// Answers puts the story's outcomes into HTTP. It implements [payments.Answers]: what it returns is stored, and every repeat gets it.
type Answers struct {
	PublicURL string // begins the type of every problem
}

var _ payments.Answers = Answers{}

// Path is the resource's path, which is all that Location says.
func (a Answers) Path(kind payments.Kind, id uuid.UUID) string {
	if kind == payments.KindRefund {
		return "/v1/refunds/" + id.String()
	}
	return "/v1/payments/" + id.String()
}

func orderPath(id uuid.UUID) string { return "/v1/orders/" + id.String() }

// OrderCreated is 201 with the order.
func (a Answers) OrderCreated(order payments.Order) idempotency.Answer {
	return newAnswer(http.StatusCreated, echo.MIMEApplicationJSON, orderPath(order.ID), mustJSON(orderResource(order)))
}

// OrderCanceled is 200 with the order.
func (a Answers) OrderCanceled(order payments.Order) idempotency.Answer {
	return newAnswer(http.StatusOK, echo.MIMEApplicationJSON, orderPath(order.ID), mustJSON(orderResource(order)))
}

// PaymentFinal is 201 with the payment, or 402 with the reason why there is none.
func (a Answers) PaymentFinal(payment payments.Payment, requestID string) idempotency.Answer {
	path := a.Path(payments.KindPayment, payment.ID)
	var p problem
	switch payment.Status {
	case payments.StatusSucceeded:
		return newAnswer(http.StatusCreated, echo.MIMEApplicationJSON, path, mustJSON(paymentResource(payment)))
	case payments.StatusDeclined:
		p = newProblem("payment-declined")
		p.subject = problemSubject{PaymentID: payment.ID.String(), DeclineCode: *payment.DeclineCode}
	case payments.StatusFailed:
		p = newProblem("payment-failed")
		p.subject = problemSubject{PaymentID: payment.ID.String(), Outcome: "not-charged", Retry: "new-key"}
	default:
		panic("api: payment is not final: " + payment.Status)
	}
	return newAnswer(p.status, mediaTypeProblem, path, p.body(a.PublicURL, requestID))
}

// PaymentAccepted is 202 with the payment as it stands.
func (a Answers) PaymentAccepted(payment payments.Payment) idempotency.Answer {
	return newAnswer(http.StatusAccepted, echo.MIMEApplicationJSON, a.Path(payments.KindPayment, payment.ID), mustJSON(paymentResource(payment)))
}

// RefundFinal is 201 with the refund, or 402 with the reason why there is none.
func (a Answers) RefundFinal(refund payments.Refund, requestID string) idempotency.Answer {
	path := a.Path(payments.KindRefund, refund.ID)
	var p problem
	switch refund.Status {
	case payments.StatusSucceeded:
		return newAnswer(http.StatusCreated, echo.MIMEApplicationJSON, path, mustJSON(refundResource(refund)))
	case payments.StatusDeclined:
		p = newProblem("refund-declined")
		p.subject = problemSubject{RefundID: refund.ID.String(), DeclineCode: *refund.FailureCode}
	case payments.StatusFailed:
		p = newProblem("refund-failed")
		p.subject = problemSubject{RefundID: refund.ID.String(), Outcome: "not-charged", Retry: "new-key"}
	default:
		panic("api: refund is not final: " + refund.Status)
	}
	return newAnswer(p.status, mediaTypeProblem, path, p.body(a.PublicURL, requestID))
}

// RefundAccepted is 202 with the refund as it stands.
func (a Answers) RefundAccepted(refund payments.Refund) idempotency.Answer {
	return newAnswer(http.StatusAccepted, echo.MIMEApplicationJSON, a.Path(payments.KindRefund, refund.ID), mustJSON(refundResource(refund)))
}

func newAnswer(status int, mediaType, location string, body []byte) idempotency.Answer {
	return idempotency.Answer{
		Status:  status,
		Headers: map[string]string{echo.HeaderContentType: mediaType, echo.HeaderLocation: location},
		Body:    body,
	}
}

// mustJSON encodes what always can be encoded: structs of strings, numbers and times.
func mustJSON(v any) []byte {
	encoded, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return encoded
}
