package chaos

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"time"
)

// Fault is one thing that fails, and is mended.
type Fault struct {
	Name  string
	begin beginning
	// holds is for what shows only when it outlasts a lease.
	holds bool
	// needs says what a world must have for it; nil is nothing.
	needs func(w *World) bool
}

// beginning makes something fail around one replica, or around all, and returns what mends it.
type beginning func(ctx context.Context, w *World, victim *replica) (mend func() error, err error)

func kill(_ context.Context, _ *World, r *replica) (func() error, error) {
	r.process.kill()
	return r.ensure, nil
}

func pause(_ context.Context, _ *World, r *replica) (func() error, error) {
	r.process.pause()
	return func() error { r.process.resume(); return nil }, nil
}

// drainLimit is longer than SHUTDOWN_TIMEOUT of the replicas.
const drainLimit = 15 * time.Second

// Faults is the catalogue. The matrix and the schedule draw from it.
var Faults = []Fault{
	{Name: "kill -9", begin: kill},
	{Name: "kill -9 of all replicas", begin: func(_ context.Context, w *World, _ *replica) (func() error, error) {
		for _, r := range w.replicas {
			r.process.kill()
		}
		return func() error {
			for _, r := range w.replicas {
				if err := r.ensure(); err != nil {
					return err
				}
			}
			return nil
		}, nil
	}},
	{Name: "SIGTERM", begin: func(_ context.Context, _ *World, r *replica) (func() error, error) {
		done := make(chan struct{})
		go func() { defer close(done); r.process.terminate(drainLimit) }()
		return func() error { <-done; return r.ensure() }, nil
	}},
	{Name: "SIGSTOP, SIGCONT", holds: true, begin: pause},
	{Name: "killed, its clock an hour ahead", holds: true, begin: clock(time.Hour)},
	{Name: "killed, its clock an hour behind", holds: true, begin: clock(-time.Hour)},

	gatewayFault(slow), gatewayFault(errorBefore), gatewayFault(errorAfter), gatewayFault(hangBefore), gatewayFault(hangAfter),
	gatewayFault(cutBefore), gatewayFault(cutAfter), gatewayFault(unavailable), gatewayFault(lying), gatewayFault(late),
	{Name: "gateway killed -9", begin: func(_ context.Context, w *World, _ *replica) (func() error, error) {
		w.gateway.kill()
		return w.gateway.start, nil
	}},

	{Name: "PostgreSQL stopped fast", begin: stopDatabase(syscall.SIGINT)},
	{Name: "PostgreSQL stopped immediate", begin: stopDatabase(syscall.SIGQUIT)},
	{Name: "pg_terminate_backend", begin: func(ctx context.Context, w *World, _ *replica) (func() error, error) {
		ctx, cancel := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			for ctx.Err() == nil {
				// Whatever stands in the way of this is mended by the next round.
				_, _ = w.database.current().Exec(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
					WHERE datname = 'payments' AND application_name <> 'chaos' AND pid <> pg_backend_pid() AND random() < 0.5`)
				time.Sleep(100 * time.Millisecond)
			}
		}()
		return func() error { cancel(); <-done; return nil }, nil
	}},
	{Name: "max_connections exhausted", begin: func(ctx context.Context, w *World, _ *replica) (func() error, error) {
		release, err := w.database.exhaust(ctx)
		return func() error { release(); return nil }, err
	}},
	{Name: "disk full", needs: func(w *World) bool { return w.database.onTmpfs }, begin: func(ctx context.Context, w *World, _ *replica) (func() error, error) {
		if err := w.database.fill(); err != nil {
			return nil, fmt.Errorf("fill the disk: %w", err)
		}
		w.database.useUpLog(ctx)
		return func() error {
			if err := w.database.free(); err != nil {
				return err
			}
			return w.database.restartIfDown(context.WithoutCancel(ctx))
		}, nil
	}},
	{Name: "session time zone Pacific/Kiritimati", needs: func(w *World) bool { return !w.PgBouncer }, begin: func(ctx context.Context, w *World, _ *replica) (func() error, error) {
		set := func(zone string) error {
			_, err := w.database.current().Exec(context.WithoutCancel(ctx), `ALTER DATABASE payments SET timezone = '`+zone+`'`)
			if err == nil { // New sessions only: the old ones go.
				_, err = w.database.current().Exec(context.WithoutCancel(ctx), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
					WHERE datname = 'payments' AND application_name = 'payments'`)
			}
			return err
		}
		return func() error { return set("UTC") }, set("Pacific/Kiritimati")
	}},

	network("database cut off", toDatabase, (*link).cut),
	network("database slow (300 ms each way)", toDatabase, func(l *link) error { return l.slow(300) }),
	network("database swallows", toDatabase, func(l *link) error { return l.swallow("upstream", "downstream") }),
	network("database hears nothing", toDatabase, func(l *link) error { return l.swallow("upstream") }),
	network("database's answers lost", toDatabase, func(l *link) error { return l.swallow("downstream") }),
	network("gateway cut off", toGateway, (*link).cut),
	network("gateway slow (300 ms each way)", toGateway, func(l *link) error { return l.slow(300) }),
	network("gateway swallows", toGateway, func(l *link) error { return l.swallow("upstream", "downstream") }),
	network("gateway hears nothing", toGateway, func(l *link) error { return l.swallow("upstream") }),
	network("gateway's answers lost", toGateway, func(l *link) error { return l.swallow("downstream") }),

	// The named points: the process dies or stops exactly there.
	at("kill -9 before the charge", beforeCharge, kill),
	at("kill -9 after the charge", afterCharge, kill),
	at("SIGSTOP after the charge", afterCharge, pause),
	{Name: "kill -9 after the reaper's cancel", begin: func(ctx context.Context, w *World, r *replica) (func() error, error) {
		d, err := w.reapersCancel(ctx, w.book, r)
		if err != nil {
			return nil, err
		}
		defer d.open()
		return kill(ctx, w, w.replicas[d.by])
	}},
}

// fault is the one of the name, if this world can have it.
func (w *World) fault(name string) (Fault, error) {
	for _, f := range slices.Concat(Faults, w.own) {
		switch {
		case f.Name != name:
		case f.needs != nil && !f.needs(w):
			return f, fmt.Errorf("this world cannot have %q", name)
		default:
			return f, nil
		}
	}
	return Fault{}, fmt.Errorf("no fault is called %q", name)
}

// errNobodyCame is what mending a fault says that has waited in vain for its moment, and so has not happened.
var errNobodyCame = errors.New("nobody came to the point")

// reapersCancel takes a payment of a client who leaves to where the gateway has canceled it for a reaper, and the reaper does not know yet.
func (w *World) reapersCancel(ctx context.Context, b *book, r *replica) (*door, error) {
	order, err := w.newOrder(ctx, b)
	if err != nil {
		return nil, err
	}
	o := b.payment(order, "pm_ok")
	o.leaves = true
	o.started = time.Now()
	return w.canceledByReaper(ctx, o, r, func() { go w.send(ctx, o, r.index, "") })
}

// canceledByReaper does it for a payment that start asks the replica for.
func (w *World) canceledByReaper(ctx context.Context, o *operation, r *replica, start func()) (*door, error) {
	before := w.gateway.shut(r.index, beforeCharge, w.gatewayKey(o))
	after := w.gateway.shut(anyReplica, afterCancel, w.gatewayKey(o))
	start()
	if err := await(before.reached, "the payment is claimed"); err != nil {
		return nil, err
	}
	r.process.kill()
	before.open()
	if err := r.ensure(); err != nil {
		return nil, err
	}
	return after, await(after.reached, "the reaper has canceled the payment")
}

func await(signal <-chan struct{}, what string) error {
	select {
	case <-signal:
		return nil
	case <-time.After(patience):
		return fmt.Errorf("waited in vain until %s", what)
	}
}

// clock kills the replica and starts it with another clock; mended is it by another kill.
func clock(offset time.Duration) beginning {
	return func(_ context.Context, _ *World, r *replica) (func() error, error) {
		again := func(offset time.Duration) error {
			r.process.kill()
			r.wrong.Store(int64(offset))
			return r.start()
		}
		usual := r.clock()
		return func() error { return again(usual) }, again(usual + offset)
	}
}

func gatewayFault(mode gatewayMode) Fault {
	return Fault{Name: "gateway: " + string(mode), holds: mode == hangBefore || mode == hangAfter, begin: func(_ context.Context, w *World, _ *replica) (func() error, error) {
		w.gateway.misbehave(mode)
		return func() error { w.gateway.misbehave(healthy); return nil }, nil
	}}
}

func stopDatabase(signal syscall.Signal) beginning {
	return func(ctx context.Context, w *World, _ *replica) (func() error, error) {
		return func() error { return w.database.start(context.WithoutCancel(ctx)) }, w.database.stop(signal)
	}
}

func toDatabase(r *replica) *link { return r.toDB }
func toGateway(r *replica) *link  { return r.toGateway }

func network(name string, which func(*replica) *link, fail func(*link) error) Fault {
	return Fault{Name: name, holds: true, begin: func(_ context.Context, _ *World, r *replica) (func() error, error) {
		return which(r).mend, fail(which(r))
	}}
}

// at begins another fault when a request of the victim has come to the moment. If none comes while the fault lasts, nothing happens, and
// mending it returns errNobodyCame.
func at(name string, when moment, what beginning) Fault {
	return Fault{Name: name, begin: func(ctx context.Context, w *World, r *replica) (func() error, error) {
		d := w.gateway.shut(r.index, when, "")
		ctx, cancel := context.WithCancel(ctx)
		type begun struct {
			mend func() error
			err  error
		}
		done := make(chan begun, 1)
		go func() {
			b := begun{mend: func() error { return errNobodyCame }}
			select {
			case <-d.reached:
				b.mend, b.err = what(ctx, w, r)
			case <-ctx.Done():
			}
			d.open()
			done <- b
		}()
		return func() error {
			cancel()
			b := <-done
			if b.err != nil {
				return b.err
			}
			return b.mend()
		}, nil
	}}
}
