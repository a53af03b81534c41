// Package simulator is a payment gateway to develop and test against: slow, fallible, reached over real HTTP like any other, and
// exact about the one thing a gateway must be exact about. A key has at most one charge, for ever.
//
//	POST /charges               Idempotency-Key: <key>  {"amount", "currency", "payment_method"}
//	POST /refunds               Idempotency-Key: <key>  {"charge_key", "amount"}
//	GET  /charges/{key}         the charge · {"key", "status": "processing"} · {"key", "status": "canceled"} · 404
//	POST /charges/{key}/cancel  the charge it already has · {"key", "status": "canceled"}
//	GET  /charges               {"data": […]}: all charges, approved and declined, in the order in which they were made
//
// and the last three alike under /refunds. A key's states:
//
//	     ┌── cut, or refused ──┐
//	     ▼                     │
//	never seen ── POST ──▶ processing ──▶ approved | declined
//	     │
//	     └── cancel ──▶ canceled
//
// A key is worked on by one request at a time, in the order in which they came. So a second POST waits for the first, and gets its
// charge; a cancel that meets a POST at work waits for it too, and comes too late unless that POST ends without a charge. A POST
// whose client leaves before the charge is made is cut: it charges nothing, now or later, and the next in line becomes the first.
//
// What is final is in the ledger, on disk, before anybody is told. A crash at any moment leaves either the charge or nothing.
//
// The payment method decides how a charge goes; any well-formed one not named here is approved.
//
//	pm_declined            declined, generic_decline
//	pm_insufficient_funds  declined, insufficient_funds
//	pm_slow                approved, after three times the latency
//	pm_error_before        500 and nothing charged, every time
//	pm_error_after         charged, then 500
//	pm_hang_after          charged, then silence until the client leaves
//	pm_drop_after          charged, then the connection is cut
//
// What happens "after" happens to the one POST that makes the charge; a later one finds it, and gets it with 200. To have the same
// happen to a refund, charge pm_refund_declined, pm_refund_error_after and so on: the charge is approved, and its refunds go the
// way of the token without "refund_". That part is the simulator's own.
//
// A refund of what is no approved charge, or of more than is left of one, is declined (charge_not_refundable,
// amount_exceeds_charge). Some gateways answer 4xx there, which leaves the caller without a final word on the key.
package simulator
