package strategies

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/google/uuid"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
)

// answers puts the outcomes into the words that the API has for them, so that what every strategy stores has the size and the price of what
// the service stores. It implements [payments.Answers] for payments; nothing else is asked of it here.
type answers struct {
	payments.Answers // nil: orders and refunds are not in the lab
}

// Path is where the payment would be found.
func (answers) Path(_ payments.Kind, id uuid.UUID) string { return "/v1/payments/" + id.String() }

// PaymentFinal is 201 with the payment, or 402 with the reason why there is none.
func (a answers) PaymentFinal(payment payments.Payment, requestID string) idempotency.Answer {
	status := http.StatusCreated
	if payment.Status != payments.StatusSucceeded {
		status = http.StatusPaymentRequired
	}
	body := mustJSON(struct {
		ID               uuid.UUID         `json:"id"`
		OrderID          uuid.UUID         `json:"order_id"`
		Status           string            `json:"status"`
		Amount           int64             `json:"amount"`
		Currency         string            `json:"currency"`
		PaymentMethod    string            `json:"payment_method"`
		DeclineCode      *string           `json:"decline_code"`
		FailureCode      *string           `json:"failure_code"`
		GatewayReference *string           `json:"gateway_reference"`
		AmountRefunded   int64             `json:"amount_refunded"`
		Metadata         map[string]string `json:"metadata"`
		CreatedAt        time.Time         `json:"created_at"`
	}{
		payment.ID, payment.OrderID, payment.Status, payment.Amount, payment.Currency, payment.PaymentMethod,
		payment.DeclineCode, payment.FailureCode, payment.GatewayReference, payment.AmountRefunded, payment.Metadata, payment.CreatedAt,
	})
	return idempotency.Answer{
		Status:    status,
		Headers:   map[string]string{"Content-Type": "application/json", "Location": a.Path(payments.KindPayment, payment.ID)},
		Body:      body,
		RequestID: requestID,
	}
}

// mustJSON encodes what always can be encoded: maps and structs of strings and numbers.
func mustJSON(v any) []byte {
	encoded, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return encoded
}
