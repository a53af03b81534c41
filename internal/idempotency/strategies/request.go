package strategies

import (
	"strconv"

	"github.com/google/uuid"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
)

// Amount and Currency are those of all the lab's orders.
const (
	Amount   = 1999
	Currency = "EUR"
)

// NewRequest is what the API would make of a client's POST /v1/payments.
func NewRequest(merchantID, orderID uuid.UUID, key idempotency.Key) payments.NewPayment {
	const paymentMethod = "pm_ok"
	return payments.NewPayment{
		Claim: idempotency.Claim{
			MerchantID: merchantID, Key: key, Mode: idempotency.ModeSync, RequestID: uuid.NewString(),
			Request: idempotency.Request{
				Method: "POST", Route: "/v1/payments",
				Fields: []idempotency.Field{
					{Name: "order_id", Value: orderID.String()},
					{Name: "amount", Value: strconv.Itoa(Amount)},
					{Name: "currency", Value: Currency},
					{Name: "payment_method", Value: paymentMethod},
				},
			},
		},
		OrderID: orderID, Amount: Amount, Currency: Currency, PaymentMethod: paymentMethod, Metadata: map[string]string{},
	}
}
