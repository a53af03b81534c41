package strategies

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
)

// TestConformance is what every strategy promises that is meant to be used.
func TestConformance(t *testing.T) {
	t.Parallel()
	for _, kind := range Kinds() {
		if kind.MeasuredOnly {
			continue
		}
		t.Run(kind.Name, func(t *testing.T) {
			t.Parallel()
			ground := newGround(t, kind)
			for _, promise := range promises {
				t.Run(promise.name, func(t *testing.T) {
					t.Parallel()
					hold(t, kind, promise.name, promise.kept(ground.world(t)))
				})
			}
		})
	}
}

// hold asserts that a promise is kept, or, where the kind says that it is not, that it is broken. An improvement fails the test as a
// regression does: what the kind says of itself must be changed with it.
func hold(t *testing.T, kind Kind, promise string, err error) {
	t.Helper()
	because, broken := kind.Broken[promise]
	switch {
	case !broken && err != nil:
		t.Errorf("%s does not keep the promise: %v", kind.Name, err)
	case broken && err == nil:
		t.Errorf("%s keeps a promise that it says it cannot keep (%s)", kind.Name, because)
	case broken:
		t.Logf("broken, as %s says: %v. %s", kind.Name, err, because)
	}
}

// Every broken promise of every kind must be one that is tested.
func TestBrokenPromisesAreNamesOfTests(t *testing.T) {
	t.Parallel()
	names := map[string]bool{PromiseDurable: true}
	for _, promise := range promises {
		names[promise.name] = true
	}
	for _, kind := range Kinds() {
		for name := range kind.Broken {
			require.True(t, names[name], "%s says that it breaks %s, which nothing tests", kind.Name, name)
		}
	}
}

// promises are the suite. What a promise returns is how it was broken; what goes wrong on the way there fails the test.
var promises = []struct {
	name string
	kept func(*world) error
}{
	{"OneOfFiftyWinsAndOneChargeIsMade", func(w *world) error {
		replicas := []*process{w.process(), w.process()}
		req := w.request("gate-of-50")
		winners, err := race(50, func(i int) (idempotency.Answer, error) { return replicas[i%2].Pay(context.Background(), repeat(req)) })
		return errors.Join(err, expect(winners, 1, "winners"), expect(w.charges(req), 1, "charges"), expect(w.payments("succeeded"), 1, "payments"))
	}},

	{"ARepeatGetsTheSameBytes", func(w *world) error {
		p := w.process()
		req := w.request("replay")
		first := must(p.Pay(w.t.Context(), req))
		second, err := p.Pay(w.t.Context(), repeat(req))
		return errors.Join(err, expect(first.Replayed, false, "first is a replay"), expect(second.Replayed, true, "second is a replay"),
			expect(string(second.Body), string(first.Body), "body"), expect(second.Status, first.Status, "status"),
			expect(second.Headers["Location"], first.Headers["Location"], "location"), expect(second.RequestID, first.RequestID, "request"),
			expect(w.charges(req), 1, "charges"))
	}},

	{PromiseSpent, func(w *world) error {
		p := w.process()
		req := w.request("spent")
		first := must(p.Pay(w.t.Context(), req))
		w.endRetention(req)
		spent := func() error {
			// Whatever it asks for: that it is spent comes before that it was used for something else.
			for _, again := range []payments.NewPayment{repeat(req), w.request("spent")} {
				answer, err := p.Pay(w.t.Context(), again)
				expired, ok := errors.AsType[*idempotency.ExpiredError](err)
				if !ok && err == nil {
					require.Equal(w.t, string(first.Body), string(answer.Body), "not the key's only payment")
					return fmt.Errorf("a repeat got %d with the first one's payment", answer.Status)
				}
				if !ok {
					return fmt.Errorf("a repeat met %w", err)
				}
				if err := expect(expired.ResourcePath, first.Headers["Location"], "location"); err != nil {
					return err
				}
			}
			return nil
		}
		err := spent()
		if err == nil {
			_, purgeErr := idempotency.NewPurger(w.admin, slog.New(slog.DiscardHandler)).RunOnce(w.t.Context())
			require.NoError(w.t, purgeErr)
			err = spent() // for ever: also when the answer has been stripped
		}
		require.Equal(w.t, 1, w.charges(req))
		return err
	}},

	{"ATwinIsToldThatItIsInFlight", func(w *world) error {
		p, gate := w.process(), newGate(w.t)
		p.gateway.Arrived = gate.stop
		req := w.request("in-flight")
		first := p.start(req)
		gate.await(w.t)
		_, err := p.Pay(w.t.Context(), repeat(req))
		if !isInFlight(err) {
			return fmt.Errorf("the twin met %w", err)
		}
		gate.pass()
		return errors.Join(wait(w.t, first).err, expect(w.charges(req), 1, "charges"))
	}},

	// By its id, so that a client may look it up instead of asking again.
	{PromiseNamed, func(w *world) error {
		p, gate := w.process(), newGate(w.t)
		p.gateway.Arrived = gate.stop
		req := w.request("named")
		first := p.start(req)
		gate.await(w.t)
		inFlight, ok := errors.AsType[*idempotency.InFlightError](second(p.Pay(w.t.Context(), repeat(req))))
		require.True(w.t, ok)
		var id uuid.UUID
		require.NoError(w.t, w.admin.QueryRow(w.t.Context(), "SELECT id FROM payments WHERE order_id = $1", req.OrderID).Scan(&id))
		gate.pass()
		require.NoError(w.t, wait(w.t, first).err)
		return expect(inFlight.Record.ResourceID, id, "payment in flight")
	}},

	{"HoldsNoConnectionWhileTheGatewayIsSlow", func(w *world) error {
		p, gate := w.process(), newGate(w.t)
		p.gateway.Arrived = gate.stop
		first := p.start(w.request("no-connection"))
		gate.await(w.t)
		acquired := int(p.db.Stat().AcquiredConns())
		var open int
		require.NoError(w.t, w.admin.QueryRow(w.t.Context(),
			"SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND xact_start IS NOT NULL", p.name).Scan(&open))
		gate.pass()
		return errors.Join(wait(w.t, first).err, expect(acquired, 0, "connections held"), expect(open, 0, "transactions open"))
	}},

	{"AnotherRequestUnderTheKeyIsAMismatch", func(w *world) error {
		p, gate := w.process(), newGate(w.t)
		p.gateway.Arrived = gate.stop
		req := w.request("mismatch")
		other := w.request("mismatch") // another order
		first := p.start(req)
		gate.await(w.t)
		_, during := p.Pay(w.t.Context(), other)
		gate.pass()
		err := wait(w.t, first).err
		_, after := p.Pay(w.t.Context(), other)
		for _, got := range []error{during, after} {
			if !errors.Is(got, idempotency.ErrKeyReused) {
				return fmt.Errorf("the other request met %w", got)
			}
		}
		return errors.Join(err, expect(w.payments("succeeded"), 1, "payments"))
	}},

	{"TwinsForTwoOrdersAreOneWinnerAndMismatches", func(w *world) error {
		p := w.process()
		requests := []payments.NewPayment{w.request("two-orders"), w.request("two-orders")}
		winners, err := race(20, func(i int) (idempotency.Answer, error) { return p.Pay(context.Background(), repeat(requests[i%2])) }, idempotency.ErrKeyReused)
		return errors.Join(err, expect(winners, 1, "winners"), expect(w.charges(requests[0]), 1, "charges"))
	}},

	{"ASecondKeyCannotPayTheOrderAgain", func(w *world) error {
		p, gate := w.process(), newGate(w.t)
		p.gateway.Arrived = gate.stop
		req := w.request("first-key")
		first := p.start(req)
		gate.await(w.t)
		_, during := p.Pay(w.t.Context(), w.requestFor(req.OrderID, "second-key"))
		gate.pass()
		err := wait(w.t, first).err
		_, after := p.Pay(w.t.Context(), w.requestFor(req.OrderID, "second-key"))
		if !errors.Is(during, payments.ErrOrderPaymentInProgress) || !errors.Is(after, payments.ErrOrderNotOpen) {
			return fmt.Errorf("the second key met %v, then %v", during, after)
		}
		return err
	}},

	{"AFailedWriteFreesTheKey", func(w *world) error {
		p := w.process()
		req := w.requestFor(w.order("canceled"), "failed-write")
		_, refused := p.Pay(w.t.Context(), req)
		if !errors.Is(refused, payments.ErrOrderNotOpen) {
			return fmt.Errorf("a canceled order was answered with %w", refused)
		}
		bad := w.request("failed-write")
		bad.PaymentMethod = refusedByDatabase
		if _, err := p.Pay(w.t.Context(), bad); err == nil {
			return errors.New("a payment that the database refuses was taken")
		}
		// Any request may have the key now, even another.
		answer, err := p.Pay(w.t.Context(), w.request("failed-write"))
		return errors.Join(err, expect(answer.Replayed, false, "a replay"))
	}},

	// The process dies after it has claimed, wherever that is, and before the payment is written.
	{PromiseTogether, func(w *world) error {
		dead, alive := w.process(), w.process()
		req := w.request("crash-before-write")
		// The test keeps the order locked, so the claim can write nothing.
		tx, err := w.admin.Begin(w.t.Context())
		require.NoError(w.t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		_, err = tx.Exec(w.t.Context(), "SELECT FROM orders WHERE id = $1 FOR UPDATE", req.OrderID)
		require.NoError(w.t, err)
		ended := dead.start(req)
		w.awaitLockWait(dead)
		dead.kill()
		wait(w.t, ended)
		require.NoError(w.t, tx.Rollback(w.t.Context()))

		_, got := alive.Pay(w.t.Context(), repeat(req))
		if isInFlight(got) {
			var inFlight *idempotency.InFlightError
			errors.As(got, &inFlight)
			w.endLease(req)
			require.NoError(w.t, second(alive.Pay(w.t.Context(), repeat(req))), "after the lease has ended")
			require.Equal(w.t, 1, w.charges(req))
			return fmt.Errorf("a repeat is told that it is in flight, for %s more, and nobody is at work", inFlight.Record.LeaseLeft.Round(time.Second))
		}
		return errors.Join(got, expect(w.charges(req), 1, "charges"))
	}},

	{"ACrashBetweenClaimAndChargeIsResumedAndChargedOnce", func(w *world) error {
		dead, alive, gate := w.process(), w.process(), newGate(w.t)
		dead.gateway.Arrived = gate.stop
		req := w.request("crash-before-charge")
		dead.start(req)
		gate.await(w.t)
		dead.kill()
		_, early := alive.Pay(w.t.Context(), repeat(req))
		if !isInFlight(early) {
			return fmt.Errorf("before the lease had ended a repeat met %w", early)
		}
		w.endLease(req)
		answer, err := alive.Pay(w.t.Context(), repeat(req))
		return errors.Join(err, expect(answer.Replayed, false, "a replay"), expect(w.charges(req), 1, "charges"), expect(w.payments("succeeded"), 1, "payments"))
	}},

	{"ACrashBetweenChargeAndRecordIsFoundOutAndNotChargedAgain", func(w *world) error {
		dead, alive, gate := w.process(), w.process(), newGate(w.t)
		dead.gateway.Charged = gate.stop
		req := w.request("crash-after-charge")
		dead.start(req)
		gate.await(w.t)
		dead.kill()
		w.endLease(req)
		_, err := alive.Pay(w.t.Context(), repeat(req))
		return errors.Join(err, expect(w.charges(req), 1, "charges"), expect(w.payments("succeeded"), 1, "payments"))
	}},

	{"OneOfTwentyTakesAStaleKeyOver", func(w *world) error {
		dead, alive, gate := w.process(), w.process(), newGate(w.t)
		dead.gateway.Arrived = gate.stop
		req := w.request("stale")
		dead.start(req)
		gate.await(w.t)
		dead.kill()
		w.endLease(req)
		winners, err := race(20, func(int) (idempotency.Answer, error) { return alive.Pay(context.Background(), repeat(req)) })
		return errors.Join(err, expect(winners, 1, "winners"), expect(w.charges(req), 1, "charges"))
	}},

	// The first holder was paused, not dead. It comes back when another has the key, and then when that one has ended.
	{"ALateHolderChangesNothingAndAnswersWithWhatIsStored", func(w *world) error {
		late, alive, lateGate := w.process(), w.process(), newGate(w.t)
		late.gateway.Charged = lateGate.stop
		req := w.request("late")
		lateEnded := late.start(req)
		lateGate.await(w.t)
		w.endLease(req)
		answer := must(alive.Pay(w.t.Context(), repeat(req)))
		before := w.versions()
		lateGate.pass()
		got := wait(w.t, lateEnded)
		return errors.Join(got.err, expect(string(got.answer.Body), string(answer.Body), "body"), expect(w.charges(req), 1, "charges"),
			expect(w.versions(), before, "version of the payment's row"))
	}},

	{"ALateHolderIsToldThatAnotherIsAtWork", func(w *world) error {
		late, alive, lateGate, aliveGate := w.process(), w.process(), newGate(w.t), newGate(w.t)
		late.gateway.Arrived = lateGate.stop
		alive.gateway.Charged = aliveGate.stop
		req := w.request("late-and-another-at-work")
		lateEnded := late.start(req)
		lateGate.await(w.t)
		w.endLease(req)
		aliveEnded := alive.start(repeat(req))
		aliveGate.await(w.t)
		lateGate.pass()
		got := wait(w.t, lateEnded)
		if !isInFlight(got.err) {
			return fmt.Errorf("the late holder was answered %q, %v", got.answer.Body, got.err)
		}
		status := w.payments("processing")
		aliveGate.pass()
		// It was sent before its holder was paused, so this gateway, which knows no keys, has charged twice. A real one would not.
		return errors.Join(wait(w.t, aliveEnded).err, expect(status, 1, "payments still processing"))
	}},

	// The holder has made sure that it holds the key and writes; the write takes longer than the lease.
	{PromiseOneWrite, func(w *world) error {
		slow, other, charged := w.process(), w.process(), newGate(w.t)
		slow.gateway.Charged = charged.stop
		req := w.request("slow-write")
		slowEnded := slow.start(req)
		charged.await(w.t)
		// The test keeps the payment's row locked, so the write does not come to its end.
		tx, err := w.admin.Begin(w.t.Context())
		require.NoError(w.t, err)
		defer func() { _ = tx.Rollback(context.Background()) }()
		_, err = tx.Exec(w.t.Context(), "SELECT FROM payments WHERE order_id = $1 FOR UPDATE", req.OrderID)
		require.NoError(w.t, err)
		charged.pass()
		w.awaitLockWait(slow)
		if w.kind.Redis {
			w.endLease(req)
		} else {
			// The row of the key is locked by the write itself, so nobody can end its lease, and neither can the test.
			_, err := w.admin.Exec(w.t.Context(), "SET LOCAL lock_timeout = '50ms'; UPDATE idempotency_keys SET lease_expires_at = now() WHERE merchant_id = '"+w.merchantID.String()+"'")
			require.ErrorContains(w.t, err, "55P03")
		}
		atTheGateway := make(chan struct{}, 10)
		asked := func(context.Context, payments.Intent) { atTheGateway <- struct{}{} }
		other.gateway.Arrived, other.gateway.LookedUp = asked, asked
		otherEnded := other.start(repeat(req))
		select {
		case <-atTheGateway:
			err = errors.New("another has become the holder while the first one writes")
		case got := <-otherEnded:
			otherEnded <- got
		case <-w.lockWait(other): // for the end of the write
		}
		require.NoError(w.t, tx.Rollback(w.t.Context()))
		got := wait(w.t, otherEnded)
		if got.err != nil && !isInFlight(got.err) {
			return got.err
		}
		return errors.Join(err, wait(w.t, slowEnded).err, expect(w.charges(req), 1, "charges"))
	}},
}

// race sends requests from one gate and counts those that win. A loser gets the stored answer, is told that another request is at work, or
// meets one of the errors that are allowed; anything else is returned.
func race(n int, pay func(i int) (idempotency.Answer, error), allowed ...error) (winners int, err error) {
	var start, done sync.WaitGroup
	start.Add(1)
	ended := make([]paid, n)
	for i := range ended {
		done.Go(func() {
			start.Wait()
			answer, err := pay(i)
			ended[i] = paid{answer, err}
		})
	}
	start.Done()
	done.Wait()
	for _, got := range ended {
		switch {
		case got.err == nil && !got.answer.Replayed:
			winners++
		case got.err == nil, isInFlight(got.err), slices.ContainsFunc(allowed, func(err error) bool { return errors.Is(got.err, err) }):
		default:
			return winners, fmt.Errorf("a loser met %w", got.err)
		}
	}
	return winners, nil
}

// awaitLockWait returns when a session of the process waits for a lock.
func (w *world) awaitLockWait(p *process) {
	w.t.Helper()
	select {
	case <-w.lockWait(p):
	case <-time.After(20 * time.Second):
		w.t.Fatal("no session of the process waits for a lock")
	}
}

// lockWait is closed when a session of the process waits for a lock, or the test ends.
func (w *world) lockWait(p *process) <-chan struct{} {
	waits := make(chan struct{})
	ctx := w.t.Context()
	go func() {
		defer close(waits)
		for ctx.Err() == nil {
			var waiting bool
			err := w.admin.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1 AND wait_event_type = 'Lock')", p.name).Scan(&waiting)
			if err == nil && waiting {
				return
			}
			time.Sleep(2 * time.Millisecond)
		}
	}()
	return waits
}

func isInFlight(err error) bool {
	_, ok := errors.AsType[*idempotency.InFlightError](err)
	return ok
}

func expect[T comparable](got, want T, what string) error {
	if got != want {
		return fmt.Errorf("%s: got %v, want %v", what, got, want)
	}
	return nil
}

func must(answer idempotency.Answer, err error) idempotency.Answer {
	if err != nil {
		panic(err)
	}
	return answer
}

func second(_ idempotency.Answer, err error) error { return err }
