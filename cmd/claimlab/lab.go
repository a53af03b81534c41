package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"example.com/payments/db"
	"example.com/payments/internal/devdb"
	"example.com/payments/internal/idempotency/strategies"
	"example.com/payments/internal/idempotency/strategies/devredis"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

// serverSettings say which servers to use.
type serverSettings struct {
	DatabaseURL string `name:"database-url" env:"DATABASE_URL" help:"Measure on this PostgreSQL, by a role that may create databases; else on one of the lab's own."`
	RedisURL    string `name:"redis-url" env:"REDIS_URL" help:"Measure on this Redis; else on a redis-server from PATH, else on an embedded miniredis."`
}

// acquireTimeout is the service's default.
const acquireTimeout = 2 * time.Second

// lab has the servers.
type lab struct {
	address        string // of the database from which the others are made
	postgresSource string
	redisSource    string
	redisOptions   *redis.Options // of REDIS_URL
	redisServer    *devredis.Server
	ownPostgres    bool
	merchantID     uuid.UUID
	closers        []func() error

	mu        *sync.Mutex // CREATE DATABASE comes one at a time.
	admin     *pgx.Conn
	databases []string
}

// openLab brings up what the settings do not name.
func openLab(ctx context.Context, s serverSettings, log io.Writer) (_ *lab, err error) {
	l := &lab{merchantID: uuid.Must(uuid.NewV7()), mu: new(sync.Mutex)}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.close())
		}
	}()
	l.address, l.postgresSource = s.DatabaseURL, "DATABASE_URL"
	if s.DatabaseURL == "" {
		server, err := devdb.Start(ctx, devdb.Options{Throwaway: true, Log: log})
		if err != nil {
			return nil, err
		}
		l.closers = append(l.closers, server.Stop)
		l.address, l.postgresSource, l.ownPostgres = server.URL("postgres"), "the lab's own, "+server.Source(), true
	}
	if s.RedisURL != "" {
		if l.redisOptions, err = redis.ParseURL(s.RedisURL); err != nil {
			return nil, fmt.Errorf("REDIS_URL: %w", err)
		}
		l.redisOptions.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
		l.redisSource = "REDIS_URL"
	} else {
		if l.redisServer, err = devredis.Start(ctx); err != nil {
			return nil, err
		}
		l.closers = append(l.closers, l.redisServer.Stop)
		l.redisSource = "the lab's own, " + l.redisServer.Source()
		if l.redisServer.Real() {
			l.redisSource += ", nothing kept on disk"
		}
	}
	if l.admin, err = pgx.Connect(ctx, l.address); err != nil {
		return nil, err
	}
	if l.ownPostgres {
		// What works in the background would fall into some cells and not into others: no checkpoint and no vacuum within a run, but between
		// its slices. fsync and synchronous_commit stay on.
		for _, setting := range []string{"autovacuum = off", "checkpoint_timeout = '1h'", "max_wal_size = '8GB'"} {
			if _, err := l.admin.Exec(ctx, "ALTER SYSTEM SET "+setting); err != nil {
				return nil, err
			}
		}
		if _, err := l.admin.Exec(ctx, "SELECT pg_reload_conf()"); err != nil {
			return nil, err
		}
	}
	return l, nil
}

// close leaves nothing behind: on a server of somebody else's the lab's databases and keys are removed.
func (l *lab) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var errs []error
	if l.redisOptions != nil {
		errs = append(errs, l.forgetKeys(ctx))
	}
	if l.admin != nil {
		if !l.ownPostgres {
			for _, name := range l.databases {
				_, err := l.admin.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)")
				errs = append(errs, err)
			}
		}
		errs = append(errs, l.admin.Close(ctx))
	}
	for _, closer := range l.closers {
		errs = append(errs, closer())
	}
	return errors.Join(errs...)
}

// forgetKeys deletes the lab's own keys, which all bear its merchant.
func (l *lab) forgetKeys(ctx context.Context) error {
	client := l.redis()
	defer client.Close()
	keys := client.Scan(ctx, 0, "*"+l.merchantID.String()+"*", 1000).Iterator()
	for keys.Next(ctx) {
		if err := client.Del(ctx, keys.Val()).Err(); err != nil {
			return err
		}
	}
	return keys.Err()
}

// redis returns a client that the caller closes.
func (l *lab) redis() *redis.Client {
	if l.redisServer != nil {
		return l.redisServer.Client()
	}
	options := *l.redisOptions
	return redis.NewClient(&options)
}

// database makes a migrated database that has what the kind needs, and the lab's merchant. It returns the address.
func (l *lab) database(ctx context.Context, kind strategies.Kind) (string, error) {
	name := "claimlab_" + strings.ToLower(rand.Text()[:12])
	if err := l.createDatabase(ctx, name); err != nil {
		return "", err
	}
	address := withDatabase(l.address, name)
	if err := db.Up(ctx, address); err != nil {
		return "", err
	}
	conn, err := pgx.Connect(ctx, address)
	if err != nil {
		return "", err
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, kind.Prepare); err != nil {
		return "", fmt.Errorf("prepare the database for %s: %w", kind.Name, err)
	}
	_, err = conn.Exec(ctx, "INSERT INTO merchants (id, name) VALUES ($1, 'claimlab')", l.merchantID)
	return address, err
}

func (l *lab) createDatabase(ctx context.Context, name string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.databases = append(l.databases, name)
	_, err := l.admin.Exec(ctx, "CREATE DATABASE "+name+" TEMPLATE template0")
	return err
}

// withDatabase returns the address of another database on the same server. DATABASE_URL may have either of PostgreSQL's forms.
func withDatabase(address, name string) string {
	if u, err := url.Parse(address); err == nil && u.Scheme != "" {
		u.Path = "/" + name
		return u.String()
	}
	return address + " dbname=" + name // The last one counts.
}

// orders makes open orders and returns their ids.
func (l *lab) orders(ctx context.Context, conn *pgx.Conn, n int) ([]uuid.UUID, error) {
	ids := make([]uuid.UUID, n)
	now := time.Now().UTC()
	_, err := conn.CopyFrom(ctx, pgx.Identifier{"orders"},
		[]string{"merchant_id", "id", "status", "amount", "currency", "metadata", "created_at"},
		pgx.CopyFromSlice(n, func(i int) ([]any, error) {
			ids[i] = uuid.Must(uuid.NewV7())
			return []any{l.merchantID, ids[i], payments.OrderOpen, int64(strategies.Amount), strategies.Currency, map[string]string{}, now}, nil
		}))
	return ids, err
}

// settings are the service's, with a lease that no cell outlasts and that redis_set_nx accepts.
func (l *lab) settings() payments.Settings {
	return payments.Settings{
		Holder: "claimlab", LeaseTTL: time.Minute, GatewayTimeout: 30 * time.Second, KeyRetention: 10 * time.Minute,
		ReapInterval: time.Hour, ReapAfter: 2 * time.Hour, // There is nothing to reap.
	}
}

// parts opens the connections that a strategy needs, with every exchange counted. close closes them.
func (l *lab) parts(ctx context.Context, address string, pool int, gateway payments.Gateway, tracer *tracer) (_ strategies.Parts, close func(), err error) {
	options := postgres.Options{MaxConns: int32(pool), AcquireTimeout: acquireTimeout}
	if tracer != nil {
		options.Tracer = tracer
	}
	db, err := postgres.Open(ctx, address, options)
	if err != nil {
		return strategies.Parts{}, nil, err
	}
	renewals, err := postgres.Open(ctx, address, postgres.Options{MaxConns: 1, AcquireTimeout: acquireTimeout})
	if err != nil {
		db.Close()
		return strategies.Parts{}, nil, err
	}
	client := l.redis()
	if tracer != nil {
		client.AddHook(tracer)
	}
	return strategies.Parts{
			DB: db, Renewals: renewals, Redis: client, Gateway: gateway, Settings: l.settings(), Log: slog.New(slog.DiscardHandler),
		}, func() {
			db.Close()
			renewals.Close()
			_ = client.Close()
		}, nil
}
