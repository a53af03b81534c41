package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"example.com/payments/db"
	"example.com/payments/internal/api"
	"example.com/payments/internal/gateway"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

const (
	// A request's header arrives in one packet; five seconds are for the worst of networks.
	readHeaderTimeout = 5 * time.Second
	// A body has at most 64 KiB. A client that never sends it must not hold a connection, or a drain, for ever.
	bodyTimeout = 10 * time.Second
	// An idle connection is kept for a minute, longer than most clients keep theirs.
	idleTimeout = time.Minute
	// The longest that a client may wait for its answer is a wait of 20 s and an attempt after it; on top of that the answer has this long
	// to leave.
	writeMargin = 30 * time.Second
	// Many times what the headers of this API need.
	maxHeaderBytes = 32 << 10
	// How often a service that is not ready looks whether it has become so.
	readyInterval = 500 * time.Millisecond
)

type serveCommand struct {
	databaseSettings
	storySettings
	gatewaySettings
	httpSettings
	adminSettings
	logSettings
	testKeys bool
}

func (c *serveCommand) check() error {
	var f faults
	c.databaseSettings.check(&f)
	c.storySettings.check(&f)
	c.gatewaySettings.check(&f)
	c.httpSettings.check(&f, c.storySettings, c.databaseSettings)
	return f.err()
}

// Run serves until ctx ends, then drains. Whatever cannot work is refused before anything is begun.
func (c *serveCommand) Run(ctx context.Context) error {
	return c.serve(ctx, func(net.Addr) error { return nil })
}

// serve tells started the address once requests are answered there.
func (c *serveCommand) serve(ctx context.Context, started func(net.Addr) error) error {
	if err := c.check(); err != nil {
		return err
	}
	log := c.logger()
	client, err := gateway.New(c.GatewayURL)
	if err != nil {
		return fmt.Errorf("GATEWAY_URL: %w", err)
	}
	traces, err := startTracing(ctx, log)
	if err != nil {
		return err
	}
	// One of the connections is kept for the renewal of leases, so that a full pool costs nobody a lease.
	pool, err := c.open(ctx, postgres.Options{MaxConns: c.DBMaxConns - 1, Tracer: traces.queries()})
	if err != nil {
		return err
	}
	defer pool.Close()
	renewals, err := c.open(ctx, postgres.Options{MaxConns: 1, MinConns: 1})
	if err != nil {
		return err
	}
	defer renewals.Close()

	if err := ready(ctx, pool); errors.Is(err, errDirty) {
		return err
	} else if err != nil {
		log.WarnContext(ctx, "not ready, and trying again", "error", err)
		go untilReady(ctx, pool, log)
	}
	listener, err := net.Listen("tcp", c.ListenAddr)
	if err != nil {
		return fmt.Errorf("LISTEN_ADDR: %w", err)
	}
	defer listener.Close()
	adminListener, err := net.Listen("tcp", c.AdminAddr)
	if err != nil {
		return fmt.Errorf("ADMIN_ADDR: %w", err)
	}
	registry := newRegistry(map[string]*postgres.Pool{"requests": pool, "renewals": renewals})
	settings := c.settings()
	settings.Metrics = registry

	service := payments.New(pool, renewals, client, answersFor(c.PublicURL), settings, log)
	readiness := &readiness{pool: renewals, limit: readinessLimit(c.LeaseTTL)}
	handler := api.New(api.Config{
		Payments:     service,
		Merchants:    payments.NewMerchants(pool, c.testKeys),
		Ready:        readiness.check,
		PublicURL:    strings.TrimRight(c.PublicURL, "/"),
		KeyRetention: c.KeyRetention,
		InFlightMax:  c.GatewayTimeout + payments.RecordBudget,
		RateLimit:    c.RateLimit,
		MaxInFlight:  c.MaxInFlight,
		Metrics:      registry,
		Log:          log,
	})
	server := &http.Server{
		Handler:           limitBodyTime(bodyTimeout, traces.requests(handler)),
		ReadHeaderTimeout: readHeaderTimeout,
		IdleTimeout:       idleTimeout,
		WriteTimeout:      api.MaxWait + c.GatewayTimeout + payments.RecordBudget + writeMargin,
		MaxHeaderBytes:    maxHeaderBytes,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		// OPTIONS * is a path like any other that there is not.
		DisableGeneralOptionsHandler: true,
	}

	// The background goes on while requests drain: their leases must be renewed. It stops last.
	background, stopBackground := context.WithCancel(context.WithoutCancel(ctx))
	defer stopBackground()
	var group errgroup.Group
	group.Go(func() error { return service.Run(background) })
	group.Go(func() error { return serveHTTP(background, adminListener, adminHandler(registry), log) })
	serving := make(chan error, 1)
	go func() { serving <- server.Serve(listener) }()
	log.InfoContext(ctx, "serving", "address", listener.Addr().String(), "gateway", c.GatewayURL, "admin", adminListener.Addr().String())

	err = started(listener.Addr())
	if err == nil {
		select {
		case err = <-serving:
		case <-ctx.Done():
		}
	}
	log.Info("draining", "timeout", c.ShutdownTimeout)
	err = errors.Join(err, c.drain(handler, service, server))
	stopBackground()
	err = errors.Join(err, group.Wait())
	traces.stop()
	log.Info("stopped")
	return err
}

// limitBodyTime gives a request's body some time to arrive. net/http lifts the deadline when the body has been read to its end, so it
// cannot pass for a hang-up while a payment is taken; it also ends the reading of a body that no handler wanted.
func limitBodyTime(limit time.Duration, handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Body != http.NoBody {
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(limit)) // Its one error is that w has no deadlines.
		}
		handler.ServeHTTP(w, r)
	})
}

// drain refuses what is new and lets what has begun come to its end.
func (c *serveCommand) drain(handler *api.Server, service *payments.Service, server *http.Server) error {
	ctx, cancel := context.WithTimeout(context.Background(), c.ShutdownTimeout)
	defer cancel()
	handler.Drain()
	service.StopWaiting()
	err := server.Shutdown(ctx)
	if err == nil {
		err = service.Drain(ctx)
	}
	if err != nil {
		_ = server.Close()
		return fmt.Errorf("drain was cut off by SHUTDOWN_TIMEOUT (%s), and the payments still in flight are left to their leases: %w", c.ShutdownTimeout, err)
	}
	return nil
}

func (c *serveCommand) open(ctx context.Context, options postgres.Options) (*postgres.Pool, error) {
	options.AcquireTimeout = c.DBAcquireTimeout
	pool, err := postgres.Open(context.WithoutCancel(ctx), string(c.DatabaseURL), options)
	if err != nil {
		return nil, fmt.Errorf("DATABASE_URL: %w", err)
	}
	return pool, nil
}

var errDirty = errors.New("a migration has failed half way")

// ready says whether the database is there and has the schema that this build needs. A newer one will do: migrations only add.
func ready(ctx context.Context, pool *postgres.Pool) error {
	version, err := db.Status(ctx, pool)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", payments.ErrStorageUnavailable, err)
	case version.Dirty:
		return fmt.Errorf("%w: %w: the schema is marked dirty at version %d", payments.ErrStorageUnavailable, errDirty, version.Number)
	case version.Number < db.Needed():
		return fmt.Errorf("%w: the schema is at version %d and this build needs %d; run payments migrate up",
			payments.ErrStorageUnavailable, version.Number, db.Needed())
	}
	return nil
}

// untilReady tells when the service has become ready, and why not whenever the reason changes.
func untilReady(ctx context.Context, pool *postgres.Pool, log *slog.Logger) {
	last := ""
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(readyInterval):
		}
		err := ready(ctx, pool)
		if err == nil {
			log.InfoContext(ctx, "ready")
			return
		}
		if err.Error() != last {
			last = err.Error()
			log.WarnContext(ctx, "not ready, and trying again", "error", err)
		}
	}
}

func answersFor(publicURL string) api.Answers {
	return api.Answers{PublicURL: strings.TrimRight(publicURL, "/")}
}

// serveHTTP runs a small server of the command line until ctx ends.
func serveHTTP(ctx context.Context, listener net.Listener, handler http.Handler, log *slog.Logger, closers ...io.Closer) error {
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: readHeaderTimeout, IdleTimeout: idleTimeout,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	serving := make(chan error, 1)
	go func() { serving <- server.Serve(listener) }()
	var err error
	select {
	case err = <-serving:
	case <-ctx.Done():
	}
	for _, closer := range closers {
		err = errors.Join(err, closer.Close())
	}
	shutdown, cancel := context.WithTimeout(context.Background(), readHeaderTimeout)
	defer cancel()
	return errors.Join(err, server.Shutdown(shutdown))
}
