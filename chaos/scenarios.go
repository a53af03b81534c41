package chaos

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Scenario is the shortest way to one fault. The service comes through it; the mutant of the same name does not.
type Scenario struct {
	Name   string // of the patch in mutants/, without .patch
	What   string
	Breaks string // what does not hold of the mutant; a violation begins with it
	run    func(ctx context.Context, w *World, b *book) error
}

// Run lets it happen and checks the invariants.
func (s Scenario) Run(ctx context.Context, w *World) ([]Violation, error) {
	b := &book{}
	if err := s.run(ctx, w, b); err != nil {
		return nil, err
	}
	return w.Check(ctx, b)
}

// Scenarios has one for each mutant.
var Scenarios = []Scenario{
	{"fencing-removed", "a process that was stopped after the charge comes back when another has recorded", "what is final never changes",
		stoppedAfterTheCharge},
	{"gateway-key-per-attempt", "a process is killed after the charge, and the client comes back", "every charge in the ledger is one of ours",
		func(ctx context.Context, w *World, b *book) error {
			return killedAfterTheCharge(ctx, w, b, true)
		}},
	{"reaper-fails-by-time", "a process is killed after the charge, and nobody comes back", "every approved charge is one that succeeded",
		func(ctx context.Context, w *World, b *book) error {
			return killedAfterTheCharge(ctx, w, b, false)
		}},
	{"claim-for-share", "second keys come for an order whose payment is being recorded", "there is no deadlock",
		secondKeysDuringTheRecord},
	{"cancel-in-one-statement", "an order is canceled while the claim of a payment is under way", "what is final never changes",
		cancelDuringTheClaim},
	{"refund-by-sum", "refunds that are too much together are claimed at one moment", "the service never asks for more than is left of a charge",
		refundsAtOnce},
	{"refund-by-half", "a refund is asked for", "the gateway is asked for what the client has asked for",
		func(ctx context.Context, w *World, b *book) error {
			payment, err := w.newPayment(ctx, b)
			if err != nil {
				return err
			}
			w.complete(ctx, b.refund(payment, payment.amount/2), anyRandom())
			return nil
		}},
}

// chargedAt takes a payment at the first replica as far as the ledger. wait returns when the request has got its answer, or none.
func chargedAt(ctx context.Context, w *World, b *book, method string) (o *operation, d *door, wait func(), err error) {
	order, err := w.newOrder(ctx, b)
	if err != nil {
		return nil, nil, nil, err
	}
	o = b.payment(order, method)
	o.started = time.Now()
	d = w.gateway.shut(0, afterCharge, w.gatewayKey(o))
	var first sync.WaitGroup
	first.Go(func() { w.send(ctx, o, 0, "") })
	select {
	case <-d.reached:
		return o, d, first.Wait, nil
	case <-time.After(patience):
		return nil, nil, nil, fmt.Errorf("no charge was asked for: %v", o.calls)
	}
}

func stoppedAfterTheCharge(ctx context.Context, w *World, b *book) error {
	o, d, wait, err := chargedAt(ctx, w, b, "pm_declined")
	if err != nil {
		return err
	}
	w.replicas[0].process.pause()
	err = eventually(ctx, "another replica has answered", func() bool { return w.send(ctx, o, 1, "").isFinal() })
	w.replicas[0].process.resume()
	d.open()
	wait()
	return err
}

func killedAfterTheCharge(ctx context.Context, w *World, b *book, returns bool) error {
	o, d, wait, err := chargedAt(ctx, w, b, "pm_ok")
	if err != nil {
		return err
	}
	o.leaves = !returns
	w.replicas[0].process.kill()
	wait()
	d.open()
	if err := w.replicas[0].ensure(); err != nil {
		return err
	}
	if returns {
		return eventually(ctx, "the client has its answer", func() bool { return w.send(ctx, o, 1, "").isFinal() })
	}
	return w.awaitUp(ctx)
}

func secondKeysDuringTheRecord(ctx context.Context, w *World, b *book) error {
	for range 30 {
		order, err := w.newOrder(ctx, b)
		if err != nil {
			return err
		}
		pay := func() *operation { return b.payment(order, "pm_ok") }
		first := pay()
		first.started = time.Now()
		var all sync.WaitGroup
		paid := make(chan struct{})
		all.Go(func() {
			defer close(paid)
			w.complete(ctx, first, anyRandom())
		})
		time.Sleep(w.Settings.Latency / 2)
		for i := range 8 {
			second := pay()
			all.Go(func() {
				for {
					select {
					case <-paid:
						second.refuse(call{})
						return
					default:
						w.send(ctx, second, i%len(w.replicas), "")
					}
				}
			})
		}
		all.Wait()
	}
	return nil
}

func cancelDuringTheClaim(ctx context.Context, w *World, b *book) error {
	order, err := w.newOrder(ctx, b)
	if err != nil {
		return err
	}
	payment, cancel := b.payment(order, "pm_ok"), b.cancel(order.answer().resource)
	// A twin's claim that has not ended: the payment's claim locks the order, and then waits to see whether the key is taken.
	tx, err := w.database.current().Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	_, err = tx.Exec(ctx, `INSERT INTO idempotency_keys
		SELECT (jsonb_populate_record(k, jsonb_build_object('key', $1::text))).* FROM idempotency_keys k WHERE key = $2`, payment.key, order.key)
	if err != nil {
		return err
	}
	var all sync.WaitGroup
	all.Go(func() { w.complete(ctx, payment, anyRandom()) })
	if err := w.lockWaits(ctx, 1); err != nil {
		return err
	}
	all.Go(func() { w.complete(ctx, cancel, anyRandom()) })
	if err := w.lockWaits(ctx, 2); err != nil {
		return err
	}
	err = tx.Rollback(ctx)
	all.Wait()
	return err
}

func refundsAtOnce(ctx context.Context, w *World, b *book) error {
	payment, err := w.newPayment(ctx, b)
	if err != nil {
		return err
	}
	// Their claims all wait for the payment's row, with snapshots from before any of them has written.
	tx, err := w.database.current().Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	if _, err := tx.Exec(ctx, "SELECT FROM payments WHERE id = $1 FOR UPDATE", payment.answer().resource); err != nil {
		return err
	}
	var all sync.WaitGroup
	const refunds = 3
	for range refunds {
		refund := b.refund(payment, payment.amount*6/10)
		all.Go(func() { w.complete(ctx, refund, anyRandom()) })
	}
	if err := w.lockWaits(ctx, refunds); err != nil {
		return err
	}
	err = tx.Rollback(ctx)
	all.Wait()
	return err
}
