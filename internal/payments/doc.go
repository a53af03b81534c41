// Package payments is the story: an order is paid once, whatever is repeated and whatever fails.
//
// One payment is three verbs. Claim writes the idempotency key and the pending payment in one statement. Charge asks the gateway to
// move the money, with no transaction open and no connection held. Record writes the outcome, the answer that every repeat will get,
// the order and the event in one statement. Read create.go first; refund.go is the same story for money given back, and once.go is
// what the two share.
//
//	payment, refund:   processing ─▶ succeeded | declined | failed
//	order:             open ─▶ paid ─▶ refunded,   open ─▶ canceled
//
// What a crash leaves behind is always one of two things: nothing, or a key in progress with its resource processing. The client's
// repeat takes such a key over, asks the gateway what became of it, and only if the gateway has never seen it sends it again, under
// the same gateway key. The [Reaper] does the same for clients that never come back, except that it never sends: it cancels.
//
// Errors are sentinels and small types (errors.go). None of them is stored: only final outcomes are.
package payments
