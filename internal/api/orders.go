package api

import (
	"net/http"

	"github.com/labstack/echo/v4"

	"example.com/payments/internal/payments"
)

// CreateOrder implements POST /v1/orders.
func (s *Server) CreateOrder(c echo.Context) error {
	object, err := readObject(c)
	if err != nil {
		return err
	}
	f := newFields(object)
	order := payments.NewOrder{
		Amount:    f.amount("amount"),
		Currency:  f.currency("currency"),
		Reference: f.text("reference", 255),
		Metadata:  f.metadata("metadata"),
	}
	if err := f.err(); err != nil {
		return err
	}
	var fields present
	fields.amount("amount", order.Amount)
	fields.text("currency", order.Currency)
	fields.optionalText("reference", order.Reference)
	fields.metadata("metadata", order.Metadata)
	order.Claim = claimOf(c, nil, fields)

	answer, err := s.Payments.CreateOrder(c.Request().Context(), order)
	if err != nil {
		return err
	}
	return writeAnswer(c, answer)
}

// CancelOrder implements POST /v1/orders/{id}/cancel.
func (s *Server) CancelOrder(c echo.Context, id OrderID) error {
	object, err := readObject(c)
	if err != nil {
		return err
	}
	if err := newFields(object).err(); err != nil {
		return err
	}
	orderID, err := pathID(id)
	if err != nil {
		return err
	}
	answer, err := s.Payments.CancelOrder(c.Request().Context(), claimOf(c, []string{orderID.String()}, nil), orderID)
	if err != nil {
		return err
	}
	return writeAnswer(c, answer)
}

// GetOrder implements GET /v1/orders/{id}.
func (s *Server) GetOrder(c echo.Context, id OrderID) error {
	orderID, err := pathID(id)
	if err != nil {
		return err
	}
	order, err := s.Payments.Order(c.Request().Context(), stateOf(c).merchantID, orderID)
	if err != nil {
		return err
	}
	return c.JSONBlob(http.StatusOK, mustJSON(orderResource(order)))
}

// ListOrders implements GET /v1/orders.
func (s *Server) ListOrders(c echo.Context, params ListOrdersParams) error {
	var q query
	filter := payments.OrderFilter{Status: q.oneOf("status", params.Status, orderStatuses)}
	page := q.page(params.Limit, params.Cursor)
	if err := q.err(); err != nil {
		return err
	}
	orders, next, err := s.Payments.Orders(c.Request().Context(), stateOf(c).merchantID, filter, page)
	if err != nil {
		return err
	}
	return c.JSONBlob(http.StatusOK, mustJSON(OrderList{Data: each(orders, orderResource), NextCursor: cursorOf(next)}))
}

var orderStatuses = []string{payments.OrderOpen, payments.OrderPaid, payments.OrderCanceled, payments.OrderRefunded}

func orderResource(order payments.Order) Order {
	return Order{
		ID:        order.ID,
		Status:    OrderStatus(order.Status),
		Amount:    order.Amount,
		Currency:  order.Currency,
		Reference: order.Reference,
		Metadata:  order.Metadata,
		CreatedAt: order.CreatedAt,
	}
}
