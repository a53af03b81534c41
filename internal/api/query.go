package api

import (
	"encoding/base64"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/google/uuid"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
)

const (
	defaultLimit = 20
	maxLimit     = 100
)

// query reads the members of a query that a route knows, collecting every fault like [fields] does for a body. A member that a route does
// not know is ignored.
type query struct {
	faults []fieldFault
}

func (q *query) err() error {
	if len(q.faults) > 0 {
		return &validationError{faults: q.faults}
	}
	return nil
}

func (q *query) fault(name, code, detail string) {
	q.faults = append(q.faults, fieldFault{Pointer: pointerTo("/query", name), Code: code, Detail: detail})
}

// page reads limit and cursor.
func (q *query) page(limit, cursor *string) payments.Page {
	page := payments.Page{Limit: defaultLimit}
	if limit != nil {
		value, err := strconv.Atoi(*limit)
		switch {
		case errors.Is(err, strconv.ErrRange) && value > 0:
			q.fault("limit", faultTooLarge, fmt.Sprintf("This must be at most %d.", maxLimit))
		case err != nil || strconv.Itoa(value) != *limit:
			q.fault("limit", faultInvalid, "This must be an integer.")
		case value < 1:
			q.fault("limit", faultTooSmall, "This must be at least 1.")
		case value > maxLimit:
			q.fault("limit", faultTooLarge, fmt.Sprintf("This must be at most %d.", maxLimit))
		}
		page.Limit = value
	}
	if cursor != nil {
		raw, err := base64.RawURLEncoding.Strict().DecodeString(*cursor)
		id, idErr := uuid.FromBytes(raw)
		if err != nil || idErr != nil {
			q.fault("cursor", faultInvalid, "This must be the next_cursor of an earlier page.")
		}
		page.Cursor = &id
	}
	return page
}

// cursorOf is opaque to clients, so that what is in it may change.
func cursorOf(next *uuid.UUID) *string {
	if next == nil {
		return nil
	}
	cursor := base64.RawURLEncoding.EncodeToString(next[:])
	return &cursor
}

func (q *query) oneOf(name string, value *string, known []string) *string {
	if value != nil && !slices.Contains(known, *value) {
		q.fault(name, faultUnknownValue, "This is none of the values that the field can have.")
	}
	return value
}

func (q *query) uuid(name string, value *string) *uuid.UUID {
	if value == nil {
		return nil
	}
	id, ok := parseID(*value)
	if !ok {
		q.fault(name, faultInvalid, "This must be a UUID of 36 characters, hyphens included.")
	}
	return &id
}

func (q *query) idempotencyKey(name string, value *string) *idempotency.Key {
	if value == nil {
		return nil
	}
	key, err := idempotency.ParseKey([]string{*value})
	if err != nil {
		q.fault(name, faultInvalid, "This must be an idempotency key, as it was sent.")
	}
	return &key
}

// pathID reads an id out of a path. What is no id names nothing, so it is not found, like any other id that names nothing.
func pathID(text string) (uuid.UUID, error) {
	id, ok := parseID(text)
	if !ok {
		return uuid.Nil, payments.ErrNotFound
	}
	return id, nil
}

// parseID reads the form of 36 characters alone; uuid.Parse also reads braces, urn:uuid: and no hyphens.
func parseID(text string) (uuid.UUID, bool) {
	id, err := uuid.Parse(text)
	return id, err == nil && len(text) == 36
}

func each[From, To any](from []From, convert func(From) To) []To {
	to := make([]To, len(from))
	for i, value := range from {
		to[i] = convert(value)
	}
	return to
}
