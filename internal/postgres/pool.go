// Package postgres opens the service's connections and says what PostgreSQL's refusals mean. It knows nothing of payments.
//
// A [Pool] differs from pgxpool's in two ways: the wait for a connection has a limit of its own, so that a caller can tell "nothing
// was sent" from "it may have been carried out", and so has every statement. No pool of this package ever holds a connection
// between two statements, except inside [Pool.BeginFunc].
package postgres

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	pgxuuid "github.com/vgarvardt/pgx-google-uuid/v5"
)

// StatementTimeout bounds one statement. The slowest of them, a batch of the purge, takes tens of milliseconds; whatever takes five
// seconds waits for a lock or for a server that has gone.
const StatementTimeout = 5 * time.Second

// ErrNoConnection means that no connection could be had within the limit: whatever was asked for was not sent.
var ErrNoConnection = errors.New("no database connection within the limit")

// Options are what a pool needs beside the address.
type Options struct {
	MaxConns       int32
	MinConns       int32 // kept open, so that they are there when the server takes no new ones
	AcquireTimeout time.Duration
	Tracer         pgx.QueryTracer // may be nil
}

// Pool implements dbsqlc.DBTX. Its errors wrap pgx's own; [ErrNoConnection] is the one of its own.
type Pool struct {
	pool           *pgxpool.Pool
	acquireTimeout time.Duration
}

// Open prepares a pool and connects to nothing yet: a service starts while its database is away. The error is about the address.
func Open(ctx context.Context, databaseURL string, opts Options) (*Pool, error) {
	config, err := pgxpool.ParseConfig(databaseURL)
	if err != nil {
		return nil, err
	}
	config.MaxConns = opts.MaxConns
	config.MinConns = opts.MinConns
	config.PingTimeout = opts.AcquireTimeout
	if config.ConnConfig.ConnectTimeout == 0 {
		config.ConnConfig.ConnectTimeout = opts.AcquireTimeout
	}
	if opts.Tracer != nil {
		config.ConnConfig.Tracer = opts.Tracer
	}
	// Every statement here is written for READ COMMITTED: a row that a statement has waited for is read again. A default of the database or
	// the role that says otherwise would let an order be canceled while it is paid.
	config.ConnConfig.RuntimeParams["default_transaction_isolation"] = "read committed"
	// The server ends what a dead client has left behind; the margin lets the client's own timer speak first.
	setDefault(config.ConnConfig.RuntimeParams, "statement_timeout", milliseconds(StatementTimeout+time.Second))
	setDefault(config.ConnConfig.RuntimeParams, "lock_timeout", milliseconds(StatementTimeout))
	setDefault(config.ConnConfig.RuntimeParams, "idle_in_transaction_session_timeout", milliseconds(2*StatementTimeout))
	setDefault(config.ConnConfig.RuntimeParams, "application_name", "payments")
	// Whatever the server's time zone and this process's, a time read is in UTC; and an id goes as the bytes that it is, not by way of its text.
	config.AfterConnect = func(_ context.Context, conn *pgx.Conn) error {
		pgxuuid.Register(conn.TypeMap())
		conn.TypeMap().RegisterType(&pgtype.Type{
			Name: "timestamptz", OID: pgtype.TimestamptzOID, Codec: &pgtype.TimestamptzCodec{ScanLocation: time.UTC},
		})
		return nil
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	return &Pool{pool: pool, acquireTimeout: opts.AcquireTimeout}, nil
}

func setDefault(params map[string]string, name, value string) {
	if _, set := params[name]; !set {
		params[name] = value
	}
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// closeTimeout is how long a server may take to say goodbye. One that is frozen never does, and the process has to end.
const closeTimeout = 2 * time.Second

// Close waits until all connections have come back and are closed, but not longer than two seconds.
func (p *Pool) Close() {
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		p.pool.Close()
	}()
	select {
	case <-closed:
	case <-time.After(closeTimeout):
	}
}

// AcquireTimeout is how long a caller waits for a connection.
func (p *Pool) AcquireTimeout() time.Duration { return p.acquireTimeout }

// Stat is a snapshot of the pool.
func (p *Pool) Stat() *pgxpool.Stat { return p.pool.Stat() }

// begin acquires a connection and starts the statement's clock. done gives both back.
func (p *Pool) begin(ctx context.Context) (conn *pgxpool.Conn, statementCtx context.Context, done func(), err error) {
	acquireCtx, cancel := context.WithTimeout(ctx, p.acquireTimeout)
	defer cancel()
	conn, err = p.pool.Acquire(acquireCtx)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("%w: %w", ErrNoConnection, err)
	}
	statementCtx, cancelStatement := context.WithTimeout(ctx, StatementTimeout)
	return conn, statementCtx, func() {
		cancelStatement()
		conn.Release()
	}, nil
}

func (p *Pool) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	conn, ctx, done, err := p.begin(ctx)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	defer done()
	return conn.Exec(ctx, sql, args...)
}

func (p *Pool) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	conn, ctx, done, err := p.begin(ctx)
	if err != nil {
		return nil, err
	}
	rows, err := conn.Query(ctx, sql, args...)
	if err != nil {
		done()
		return nil, err
	}
	return &poolRows{Rows: rows, done: done}, nil
}

func (p *Pool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	conn, ctx, done, err := p.begin(ctx)
	if err != nil {
		return poolRow{err: err}
	}
	return poolRow{row: conn.QueryRow(ctx, sql, args...), done: done}
}

// BeginFunc runs fn in one transaction, all of it within [StatementTimeout], and commits when fn returns nil.
func (p *Pool) BeginFunc(ctx context.Context, fn func(ctx context.Context, tx pgx.Tx) error) error {
	conn, ctx, done, err := p.begin(ctx)
	if err != nil {
		return err
	}
	defer done()
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error { return fn(ctx, tx) })
}

// poolRow gives its connection back when it is scanned, which sqlc's code does at once and once.
type poolRow struct {
	row  pgx.Row
	done func()
	err  error
}

func (r poolRow) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	defer r.done()
	return r.row.Scan(dest...)
}

// poolRows gives its connection back when it is closed.
type poolRows struct {
	pgx.Rows
	done func()
}

func (r *poolRows) Close() {
	r.Rows.Close()
	if r.done != nil {
		r.done()
		r.done = nil
	}
}
