// Package strategies has the ways in which people claim an idempotency key, side by side, to be compared and measured. Only cmd/claimlab
// imports it; the service knows one way and has no interface for another.
//
// Five of them are as good as their kind allows:
//
//	on_conflict       INSERT … ON CONFLICT DO NOTHING: the service itself, payments.Service.CreatePayment
//	unique_violation  INSERT, and 23505 by the constraint's name; the loser reads in a second transaction
//	row_lock          SELECT … FOR UPDATE on the order, look, INSERT
//	advisory_lock     pg_advisory_xact_lock on a 64-bit hash of the key, look, INSERT
//	redis_set_nx      SET … NX PX in Redis, the payment in PostgreSQL
//
// All five give up their lock before they call the gateway. Three more are what people also write, for the measurement only:
//
//	check_then_act      SELECT, then INSERT
//	row_lock_held       row_lock, with the transaction open until the gateway has answered
//	advisory_lock_held  advisory_lock, likewise
//
// A strategy's file begins with what is its own, in the order in which it happens: Pay, claim, and then, where they differ from the others',
// write, record, release. What the strategies share that keep their claims in the service's own table is in keys.go.
//
// What each of the five promises is one suite, conformance_test.go. A promise that a strategy cannot keep is in its [Kind], by name, with the
// reason; the suite then asserts that it is broken.
//
// None of them knows Prefer: respond-async, and all but the service try a write once where the service tries for five seconds.
package strategies
