package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/url"
	"os"
	"time"

	"github.com/jackc/pgx/v5"

	"example.com/payments/internal/gateway"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

// Every setting is an environment variable, and a flag of the same name. What a default argues with is said in its help.

type databaseSettings struct {
	DatabaseURL      secret        `name:"database-url" env:"DATABASE_URL" help:"Address of the PostgreSQL database."`
	DBMaxConns       int32         `name:"db-max-conns" env:"DB_MAX_CONNS" default:"20" help:"Database connections of this process, all together."`
	DBAcquireTimeout time.Duration `name:"db-acquire-timeout" env:"DB_ACQUIRE_TIMEOUT" default:"2s" help:"How long a request waits for a connection."`
}

type logSettings struct {
	LogLevel  slog.Level `env:"LOG_LEVEL" default:"INFO" help:"DEBUG, INFO, WARN or ERROR."`
	LogFormat logFormat  `env:"LOG_FORMAT" default:"text" help:"text or json."`
}

type logFormat string

func (f *logFormat) UnmarshalText(text []byte) error {
	*f = logFormat(text)
	if *f != "text" && *f != "json" {
		return errors.New("must be text or json")
	}
	return nil
}

// storySettings are the times that payments are taken by.
type storySettings struct {
	GatewayTimeout time.Duration `env:"GATEWAY_TIMEOUT" default:"10s" help:"Budget of one attempt at the gateway, repetitions included."`
	LeaseTTL       time.Duration `name:"lease-ttl" env:"LEASE_TTL" default:"5s" help:"How soon a dead process is noticed; renewed by its holder while it works."`
	ReapInterval   time.Duration `env:"REAP_INTERVAL" default:"1s" help:"How often stale payments are looked at."`
	ReapAfter      time.Duration `env:"REAP_AFTER" default:"1m" help:"How long a stale payment that the gateway has never seen waits for its client."`
	KeyRetention   time.Duration `env:"KEY_RETENTION" default:"24h" help:"How long an answer is kept after it is final."`
}

type gatewaySettings struct {
	GatewayURL string `name:"gateway-url" env:"GATEWAY_URL" help:"Address of the external gateway."`
}

type publicSettings struct {
	PublicURL string `name:"public-url" env:"PUBLIC_URL" default:"http://localhost:8080" help:"How clients reach the service; begins the type of every problem."`
}

type httpSettings struct {
	publicSettings
	ListenAddr      string        `env:"LISTEN_ADDR" default:":8080" help:"Address to listen on."`
	RateLimit       float64       `env:"RATE_LIMIT" default:"0" help:"Requests per second and merchant; 0 is no limit."`
	MaxInFlight     int           `env:"MAX_IN_FLIGHT" default:"10000" help:"Requests at once, beyond which the service answers that it is overloaded; 0 is no limit."`
	ShutdownTimeout time.Duration `env:"SHUTDOWN_TIMEOUT" default:"25s" help:"How long payments in flight may take to end when the process is stopped."`
}

// serviceSettings are for a command that does a part of what serve does. They have to be serve's: they decide what is canceled, and are in
// the answers that are stored.
type serviceSettings struct {
	databaseSettings
	storySettings
	gatewaySettings
	publicSettings
	logSettings
}

// with runs a command on the service. Nothing of it runs in the background.
func (s serviceSettings) with(ctx context.Context, command func(*payments.Service) error) error {
	var f faults
	s.databaseSettings.check(&f)
	s.storySettings.check(&f)
	s.gatewaySettings.check(&f)
	s.publicSettings.check(&f)
	if f.err() != nil {
		return f.err()
	}
	client, err := gateway.New(s.GatewayURL)
	if err != nil {
		return fmt.Errorf("GATEWAY_URL: %w", err)
	}
	return withPool(ctx, s.databaseSettings, func(pool *postgres.Pool) error {
		return command(payments.New(pool, pool, client, answersFor(s.PublicURL), s.settings(), s.logger()))
	})
}

// secret is a value that is never printed.
type secret string

func (secret) String() string { return "[secret]" }

func (s storySettings) settings() payments.Settings {
	host, err := os.Hostname()
	if err != nil {
		host = "unknown host"
	}
	return payments.Settings{
		Holder:         fmt.Sprintf("%s pid %d", host, os.Getpid()),
		LeaseTTL:       s.LeaseTTL,
		GatewayTimeout: s.GatewayTimeout,
		KeyRetention:   s.KeyRetention,
		ReapInterval:   s.ReapInterval,
		ReapAfter:      s.ReapAfter,
	}
}

// faults are the settings that are wrong, one sentence each, so that all of them are told at once.
type faults []string

// check adds a fault unless ok holds.
func (f *faults) check(ok bool, format string, args ...any) {
	if !ok {
		*f = append(*f, fmt.Sprintf(format, args...))
	}
}

func (s databaseSettings) check(f *faults) {
	s.DatabaseURL.check(f)
	s.checkLimits(f)
}

// check does not repeat the address, nor pgx's error, which quotes what it could not read: somewhere in there is the password.
func (s secret) check(f *faults) {
	if s == "" {
		f.check(false, "DATABASE_URL must be set")
		return
	}
	_, err := pgx.ParseConfig(string(s))
	why := ""
	if missing, ok := errors.AsType[*fs.PathError](err); ok {
		why = ": " + missing.Error()
	}
	f.check(err == nil, "DATABASE_URL cannot be read; it looks like postgres://user:password@host:5432/database%s", why)
}

func (s databaseSettings) checkLimits(f *faults) {
	f.check(s.DBMaxConns >= 2, "DB_MAX_CONNS (%d) must be at least 2: one connection is kept for the renewal of leases", s.DBMaxConns)
	f.check(s.DBAcquireTimeout > 0, "DB_ACQUIRE_TIMEOUT (%s) must be more than 0", s.DBAcquireTimeout)
}

// check knows no default: a gateway that was guessed has never seen a payment, and on its word the paid ones would be closed as failed.
func (s gatewaySettings) check(f *faults) {
	if s.GatewayURL == "" {
		f.check(false, "GATEWAY_URL must be set")
		return
	}
	_, err := gateway.New(s.GatewayURL)
	f.check(err == nil, "GATEWAY_URL: %v", err)
}

func (s storySettings) check(f *faults) {
	f.check(s.GatewayTimeout > 0, "GATEWAY_TIMEOUT (%s) must be more than 0", s.GatewayTimeout)
	f.check(s.LeaseTTL >= 500*time.Millisecond, "LEASE_TTL (%s) must be at least 500ms: a lease is renewed every third of it", s.LeaseTTL)
	f.check(s.ReapInterval >= time.Millisecond, "REAP_INTERVAL (%s) must be at least 1ms", s.ReapInterval)
	f.check(s.ReapInterval <= s.LeaseTTL, "REAP_INTERVAL (%s) must not exceed LEASE_TTL (%s)", s.ReapInterval, s.LeaseTTL)
	f.check(s.ReapAfter > s.LeaseTTL, "REAP_AFTER (%s) must exceed LEASE_TTL (%s): a client's repeat comes after its lease has ended", s.ReapAfter, s.LeaseTTL)
	f.check(s.KeyRetention > 0, "KEY_RETENTION (%s) must be more than 0", s.KeyRetention)
}

func (s httpSettings) check(f *faults, story storySettings, database databaseSettings) {
	f.check(s.MaxInFlight >= 0, "MAX_IN_FLIGHT (%d) must not be negative", s.MaxInFlight)
	f.check(s.RateLimit >= 0, "RATE_LIMIT (%g) must not be negative", s.RateLimit)
	f.check(s.ShutdownTimeout >= story.GatewayTimeout+payments.RecordBudget,
		"SHUTDOWN_TIMEOUT (%s) must be at least GATEWAY_TIMEOUT (%s) and %s more: a payment in flight would be cut off by a deploy",
		s.ShutdownTimeout, story.GatewayTimeout, payments.RecordBudget)
	f.check(database.DBAcquireTimeout*3 < story.LeaseTTL*2,
		"DB_ACQUIRE_TIMEOUT (%s) must be less than two thirds of LEASE_TTL (%s): a lease would be lost to a full pool",
		database.DBAcquireTimeout, story.LeaseTTL)
	s.publicSettings.check(f)
}

func (s publicSettings) check(f *faults) {
	u, err := url.Parse(s.PublicURL)
	f.check(err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "", "PUBLIC_URL (%s) must be http(s)://host[:port][/path]", s.PublicURL)
}

func (s logSettings) logger() *slog.Logger {
	options := &slog.HandlerOptions{Level: s.LogLevel}
	if s.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(os.Stderr, options))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, options))
}
