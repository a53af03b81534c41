// Package idempotency gives each key at most one answer. A key is in progress while an attempt holds its lease, and final once an
// answer is stored. It knows nothing of payments: what a key is for is a route, a resource id and a fingerprint to it.
//
//	(no row) ──claim──▶ in_progress ──record──▶ done     the gateway gave the last word
//	                      │  ▲    └────record──▶ failed   closed after the gateway's cancel: nothing was done
//	                      │  └─ take over (next attempt)
//	                      └─ lease expired or released: stale
//
// The claim and the record are written together with the resource they are about, so their statements are with the resource's
// queries (PaymentClaim, PaymentRecord). Here is what is the same for every resource: the name ([Key]), the comparison of requests
// ([Fingerprint]), the judgement of a claim's losers ([Record.Judge]), the lease ([Leases], [TakeOver], [Release]), the waiting
// ([Waiters]) and the end of retention ([Purge]).
//
// A lease protects the client's patience, not the money: two holders at once, after a pause or a clock fault, are expected. Each has
// its own lease id, every write names the lease id it was made under, and only the present one matches.
//
// When the database is away nothing here guesses. Errors rise as they are; whoever holds a lease loses it by time, and a key whose
// holder has died waits, stale, for its client or the reaper.
package idempotency
