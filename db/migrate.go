// Package db holds the schema: the migrations, embedded in the binary, and the little that runs and reads them.
//
// Replicas of the service never migrate; they only read the version (see [Status]). `payments migrate up` migrates, and so do
// `payments dev` and the tests. Several may start at once: they wait for each other on PostgreSQL's advisory lock, at most
// [LockTimeout] each. A migration that fails half way is rolled back and leaves the version marked dirty. Nothing here ever forces
// a version: whether the schema is as it should be is for a person to judge.
package db

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"
	"time"

	"github.com/golang-migrate/migrate/v4"
	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
)

//go:embed migrations/*.sql
var migrations embed.FS

// LockTimeout bounds each wait of a migration for a lock, be it another migration's or a table's. 15 seconds outlast a migration
// that another replica's start is running, and end before an operator begins to wonder.
const LockTimeout = 15 * time.Second

// ErrLocked means that a lock was not free within [LockTimeout].
var ErrLocked = fmt.Errorf("another session has held the lock for %s", LockTimeout)

// Querier is the part of a pgx connection or pool that reading the version needs.
type Querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Version is where a database's schema stands. Number 0 is a database that was never migrated.
type Version struct {
	Number uint
	Dirty  bool // a migration failed half way; see the package comment
}

// Needed is the version that this build's queries were written for. A newer one is fine: migrations only add.
func Needed() uint {
	names, err := fs.Glob(migrations, "migrations/*.up.sql")
	if err != nil || len(names) == 0 {
		panic("db: no migrations are embedded")
	}
	last := strings.TrimPrefix(names[len(names)-1], "migrations/")
	number, err := strconv.ParseUint(last[:strings.Index(last, "_")], 10, 32)
	if err != nil {
		panic("db: a migration's name does not begin with its number: " + last)
	}
	return uint(number)
}

// Status reads the version without taking any lock.
func Status(ctx context.Context, querier Querier) (Version, error) {
	var version Version
	err := querier.QueryRow(ctx, "SELECT version, dirty FROM schema_migrations LIMIT 1").Scan(&version.Number, &version.Dirty)
	var pgErr *pgconn.PgError
	switch {
	case errors.Is(err, pgx.ErrNoRows), errors.As(err, &pgErr) && pgErr.Code == "42P01": // undefined_table
		return Version{}, nil
	case err != nil:
		return Version{}, fmt.Errorf("read schema version: %w", err)
	}
	return version, nil
}

// Up applies all migrations that the database does not have yet. A database that has them all is no error, and neither is one that a
// newer build has taken further: migrations only add.
func Up(ctx context.Context, databaseURL string) error {
	return run(ctx, databaseURL, "migrate up", func(m *migrate.Migrate) error {
		if number, dirty, err := m.Version(); err == nil && !dirty && number > Needed() {
			return migrate.ErrNoChange
		}
		return m.Up()
	})
}

// Down takes the given number of migrations back, newest first; with them go the tables they made and all that is in them. If there
// are fewer it takes those back and returns an error.
func Down(ctx context.Context, databaseURL string, steps int) error {
	return run(ctx, databaseURL, "migrate down", func(m *migrate.Migrate) error {
		number, _, err := m.Version()
		switch {
		case errors.Is(err, migrate.ErrNilVersion):
			return errors.New("there is no migration to take back")
		case err == nil && number > Needed():
			return fmt.Errorf("the database is at version %d, and this build knows the way back from %d at most", number, Needed())
		case err != nil:
			return err
		}
		err = m.Steps(-steps)
		if short, ok := errors.AsType[migrate.ErrShortLimit](err); ok {
			return fmt.Errorf("%d migrations were taken back, and there are no more", steps-int(short.Short))
		}
		return err
	})
}

func run(ctx context.Context, databaseURL, what string, apply func(*migrate.Migrate) error) error {
	config, err := pgx.ParseConfig(databaseURL)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	config.RuntimeParams["lock_timeout"] = strconv.FormatInt(LockTimeout.Milliseconds(), 10)

	database := stdlib.OpenDB(*config)
	defer database.Close()
	if err := database.PingContext(ctx); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	driver, err := migratepgx.WithInstance(database, &migratepgx.Config{})
	if err != nil {
		return fmt.Errorf("%s: %w", what, explain(err))
	}
	source, err := iofs.New(migrations, "migrations")
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	m, err := migrate.NewWithInstance("embedded", source, "pgx5", driver)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	defer m.Close()
	// PostgreSQL ends the wait for the lock by itself; the library's own timer would leave the waiting session behind.
	m.LockTimeout = 2 * LockTimeout

	stop := context.AfterFunc(ctx, func() { m.GracefulStop <- true })
	defer stop()
	err = apply(m)
	if err == nil || errors.Is(err, migrate.ErrNoChange) {
		err = context.Cause(ctx) // The library says nothing when it was stopped between two migrations.
	}
	if err != nil {
		return fmt.Errorf("%s: %w", what, explain(err))
	}
	return nil
}

// explain adds what an operator needs to know to the two endings that the library reports in its own words.
func explain(err error) error {
	if dirty, ok := errors.AsType[migrate.ErrDirty](err); ok {
		return fmt.Errorf("migration %d failed half way and was rolled back; look at the schema, then set the version by hand: %w", dirty.Version, err)
	}
	if errors.Is(err, migrate.ErrLockTimeout) || strings.Contains(err.Error(), "SQLSTATE 55P03") { // lock_not_available; the library does not wrap
		return fmt.Errorf("%w: %w", ErrLocked, err)
	}
	return err
}
