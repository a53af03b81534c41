package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"sync"
	"time"

	"github.com/IBM/pgxpoolprometheus"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"example.com/payments/internal/postgres"
)

// adminSettings are for who runs the service. The admin listener has no authentication, so by default only this machine reaches it.
type adminSettings struct {
	AdminAddr string `env:"ADMIN_ADDR" default:"127.0.0.1:0" help:"Address of /metrics and /debug/pprof; port 0 takes a free one and logs it."`
}

// newRegistry has what every process of ours counts: the Go runtime, the process, and its pools.
func newRegistry(pools map[string]*postgres.Pool) *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	for name, pool := range pools {
		registry.MustRegister(pgxpoolprometheus.NewCollector(pool, map[string]string{"pool": name}))
	}
	return registry
}

// adminHandler serves the metrics and the profiles, but not the command line: the database's password may be in it.
func adminHandler(registry *prometheus.Registry) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

// readinessAge is how old an answer of /readyz may be. Anybody may ask it, and as often as they like; the database is asked only so often.
const readinessAge = 200 * time.Millisecond

// readiness asks the database whether it is as this build needs it, on the connection that is kept for the renewals: a pool that is full of
// requests must not make the replica look dead.
type readiness struct {
	pool  *postgres.Pool
	limit time.Duration

	mu    sync.Mutex
	asked time.Time
	err   error
}

func (r *readiness) check(ctx context.Context) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.asked) > readinessAge {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.limit)
		r.err = ready(ctx, r.pool)
		cancel()
		r.asked = time.Now()
	}
	return r.err
}

// readinessLimit is how long the database may take to say that it is ready. A renewal comes when a third of its lease has gone, may wait
// for this, and has then to be carried out before the lease ends.
func readinessLimit(leaseTTL time.Duration) time.Duration {
	return max(leaseTTL/4, 250*time.Millisecond)
}

type healthCommand struct {
	ListenAddr string `env:"LISTEN_ADDR" default:":8080" help:"Address that the service listens on."`
}

// Run asks the service on this machine whether it is alive: a container's health check, for images without curl.
func (c *healthCommand) Run(ctx context.Context) error {
	host, port, err := net.SplitHostPort(c.ListenAddr)
	if err != nil {
		return fmt.Errorf("LISTEN_ADDR: %w", err)
	}
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "localhost"
	}
	ctx, cancel := context.WithTimeout(ctx, readHeaderTimeout)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(host, port)+"/livez", nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("/livez answered %d", response.StatusCode)
	}
	return nil
}
