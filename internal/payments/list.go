package payments

import (
	"context"
	"errors"

	"github.com/google/uuid"

	"example.com/payments/internal/dbsqlc"
	"example.com/payments/internal/idempotency"
)

// Page is one page of a list, newest first. The cursor is the id of the last resource of the page before; since ids grow with time,
// what is inserted meanwhile shifts nothing.
type Page struct {
	Limit  int
	Cursor *uuid.UUID // nil: the first page
}

func (p Page) before() uuid.UUID {
	if p.Cursor != nil {
		return *p.Cursor
	}
	return uuid.Max
}

// max asks for one more than the page has: if it comes, there is a next page.
func (p Page) max() int32 { return int32(p.Limit) + 1 }

// cut makes a page of the rows, and the cursor of the next page if there is one.
func cut[Row, Resource any](page Page, rows []Row, convert func(Row) Resource, id func(Resource) uuid.UUID) ([]Resource, *uuid.UUID) {
	more := len(rows) > page.Limit
	if more {
		rows = rows[:page.Limit]
	}
	resources := make([]Resource, len(rows))
	for i, row := range rows {
		resources[i] = convert(row)
	}
	if !more {
		return resources, nil
	}
	next := id(resources[len(resources)-1])
	return resources, &next
}

// OrderFilter narrows a list of orders; nil fields do not.
type OrderFilter struct {
	Status *string
}

// Orders lists a merchant's orders. A status is sought by reading on, page after page, so a rare one makes a slow list.
func (s *Service) Orders(ctx context.Context, merchantID uuid.UUID, filter OrderFilter, page Page) ([]Order, *uuid.UUID, error) {
	rows, err := s.queries.OrderList(ctx, s.db, dbsqlc.OrderListParams{
		MerchantID: merchantID, Status: filter.Status, Before: page.before(), Max: page.max(),
	})
	if err != nil {
		return nil, nil, storageError(err)
	}
	orders, next := cut(page, rows, orderFromRow, func(o Order) uuid.UUID { return o.ID })
	return orders, next, nil
}

// PaymentFilter narrows a list of payments; nil fields do not.
type PaymentFilter struct {
	OrderID        *uuid.UUID
	Status         *string
	IdempotencyKey *idempotency.Key
}

// Payments lists a merchant's payments. An idempotency key finds its payment for ever, also after its answer's retention.
func (s *Service) Payments(ctx context.Context, merchantID uuid.UUID, filter PaymentFilter, page Page) ([]Payment, *uuid.UUID, error) {
	if filter.IdempotencyKey != nil {
		payments, err := s.paymentsOfKey(ctx, merchantID, filter, page)
		return payments, nil, err
	}
	var rows []dbsqlc.Payment
	var err error
	if filter.OrderID != nil {
		rows, err = s.queries.PaymentListOfOrder(ctx, s.db, dbsqlc.PaymentListOfOrderParams{
			MerchantID: merchantID, OrderID: *filter.OrderID, Status: filter.Status, Before: page.before(), Max: page.max(),
		})
	} else {
		rows, err = s.queries.PaymentList(ctx, s.db, dbsqlc.PaymentListParams{
			MerchantID: merchantID, Status: filter.Status, Before: page.before(), Max: page.max(),
		})
	}
	if err != nil {
		return nil, nil, storageError(err)
	}
	payments, next := cut(page, rows, paymentFromRow, func(p Payment) uuid.UUID { return p.ID })
	return payments, next, nil
}

// paymentsOfKey is the list of the one payment that a key was used for, or an empty one.
func (s *Service) paymentsOfKey(ctx context.Context, merchantID uuid.UUID, filter PaymentFilter, page Page) ([]Payment, error) {
	record, err := idempotency.Get(ctx, s.db, merchantID, *filter.IdempotencyKey)
	switch {
	case errors.Is(err, idempotency.ErrNoRecord):
		return []Payment{}, nil
	case err != nil:
		return nil, storageError(err)
	case record.Route != RouteCreatePayment:
		return []Payment{}, nil
	}
	payment, err := s.Payment(ctx, merchantID, record.ResourceID)
	if err != nil {
		return nil, err
	}
	before := page.before()
	switch {
	case filter.OrderID != nil && payment.OrderID != *filter.OrderID,
		filter.Status != nil && payment.Status != *filter.Status,
		string(payment.ID[:]) >= string(before[:]):
		return []Payment{}, nil
	}
	return []Payment{payment}, nil
}
