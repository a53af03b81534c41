package payments

import (
	"errors"
	"fmt"

	"github.com/google/uuid"
)

// Refusals by the rules of the business. They write nothing and leave the key free.
var (
	ErrNotFound               = errors.New("not found")
	ErrOrderNotFound          = errors.New("order is not there")
	ErrOrderNotOpen           = errors.New("order is not open")
	ErrAmountMismatch         = errors.New("amount or currency is not the order's")
	ErrOrderPaymentInProgress = errors.New("another payment of the order is in progress")
	ErrPaymentNotRefundable   = errors.New("payment has not succeeded")
	ErrRefundExceedsPayment   = errors.New("refunds would exceed the payment")
)

// ErrStorageUnavailable: the database could not be asked, or did not answer in time. Alone it means that the gateway has not been asked for
// anything. The key may be claimed all the same, by a statement whose answer was lost; a repeat finds out.
var ErrStorageUnavailable = errors.New("database is unavailable")

// What an attempt can end with instead of an outcome. They come inside an [UnfinishedError].
var (
	// ErrOutcomeUnknown: money may have moved.
	ErrOutcomeUnknown = errors.New("outcome is unknown")
	// ErrNotCharged: no money has moved, by this attempt or any before it.
	ErrNotCharged = errors.New("gateway is unavailable and has not charged")
)

// PanicError is a panic that was caught. After a claim it comes inside an [UnfinishedError], and the key has been released.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// Kind is what a key was claimed for.
type Kind string

const (
	KindPayment Kind = "payment"
	KindRefund  Kind = "refund"
)

// Subject names the payment or refund that an answer is about.
type Subject struct {
	Kind Kind
	ID   uuid.UUID
	Path string
}

// UnfinishedError: an attempt has ended and its key has no answer yet. A repeat with the same key continues the same payment. Cause
// is [ErrOutcomeUnknown], [ErrNotCharged], [ErrStorageUnavailable] or a [*PanicError].
type UnfinishedError struct {
	Subject Subject
	Cause   error
}

func (e *UnfinishedError) Error() string {
	return fmt.Sprintf("%s %s is unfinished: %v", e.Subject.Kind, e.Subject.ID, e.Cause)
}

func (e *UnfinishedError) Unwrap() error { return e.Cause }
