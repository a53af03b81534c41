// Package dbtest gives each test a PostgreSQL database of its own: real, migrated, empty, and shared with nobody.
//
// A test binary calls [Main] from its TestMain, and each test calls [New]:
//
//	func TestMain(m *testing.M) { dbtest.Main(m) }
//
//	func TestPayment(t *testing.T) {
//		t.Parallel()
//		pool := dbtest.Pool(t, dbtest.New(t))
//
// The first New of a binary starts a throw-away server (see devdb) and migrates one database, of which each test gets a copy;
// that takes tens of milliseconds. Main stops and deletes the server. After a panic or a kill it is stopped all the same, and
// its directory is deleted by the next run.
//
// If DATABASE_URL is set, the databases are made on that server instead, by a role that has to be allowed to. They are dropped
// when their test has passed, and kept when it has failed.
//
// A test that cannot have a database fails and says how to get one. None is ever skipped for it.
package dbtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"example.com/payments/db"
	"example.com/payments/internal/devdb"
)

// One minute: the start of a server takes a second or two, several at once on a busy machine ten times that.
const timeout = time.Minute

// cluster is where this binary's databases are made.
type cluster struct {
	url      string        // of the database from which the others are made
	server   *devdb.Server // nil if DATABASE_URL names the server
	template string        // the migrated database

	mu    sync.Mutex // CREATE DATABASE comes one at a time: it insists on being alone with the template.
	admin *pgx.Conn
}

var (
	inMain atomic.Bool
	opened atomic.Pointer[cluster] // Set as soon as there is something to close, so even if open fails half way.
	shared = sync.OnceValues(open)
)

// Main runs the tests and exits. It belongs in TestMain.
func Main(m *testing.M) { os.Exit(Run(m)) }

// Run is Main for a TestMain that has something else to do before it exits.
func Run(m *testing.M) int {
	inMain.Store(true)
	code := m.Run()
	if c := opened.Load(); c != nil {
		if err := c.close(); err != nil {
			fmt.Fprintln(os.Stderr, "dbtest:", err)
			return max(code, 1)
		}
	}
	return code
}

// New returns the URL of a fresh database that has all migrations and no rows but theirs.
func New(t testing.TB) string {
	t.Helper()
	if !inMain.Load() {
		t.Fatal("dbtest.New without dbtest.Main: add func TestMain(m *testing.M) { dbtest.Main(m) }, which stops the server")
	}
	c, err := shared()
	if err != nil {
		t.Fatalf("no database for this test: %v", err)
	}
	name := newName("test")
	if err := c.exec("CREATE DATABASE " + name + " TEMPLATE " + c.template); err != nil {
		t.Fatalf("make a database for this test: %v", err)
	}
	t.Cleanup(func() {
		switch {
		case c.server != nil: // It is deleted whole: a DROP would only cost a checkpoint.
		case t.Failed():
			t.Logf("the database is kept for a look at it: %s", name)
		default:
			if err := c.exec("DROP DATABASE " + name + " WITH (FORCE)"); err != nil {
				t.Errorf("drop the test's database: %v", err)
			}
		}
	})
	return withDatabase(c.url, name)
}

// Pool opens a pool whose sessions are in UTC, and closes it when the test ends.
func Pool(t testing.TB, databaseURL string) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(databaseURL)
	if err != nil {
		t.Fatal(err)
	}
	config.ConnConfig.RuntimeParams["timezone"] = "UTC"
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

func open() (*cluster, error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	c := &cluster{url: os.Getenv("DATABASE_URL"), template: newName("template")}
	source := "DATABASE_URL"
	if c.url == "" {
		var err error
		if c.server, err = devdb.Start(ctx, devdb.Options{Throwaway: true, Log: os.Stderr}); err != nil {
			return nil, err
		}
		opened.Store(c)
		c.url, source = c.server.URL("postgres"), c.server.Source()
	}
	if testing.Verbose() {
		fmt.Fprintln(os.Stderr, "dbtest: using", source)
	}
	var err error
	if c.admin, err = pgx.Connect(ctx, c.url); err != nil {
		return nil, err
	}
	opened.Store(c)
	// Not from template1, the default: on a shared server somebody may be connected to it.
	if err := c.exec("CREATE DATABASE " + c.template + " TEMPLATE template0"); err != nil {
		return nil, err
	}
	return c, db.Up(ctx, withDatabase(c.url, c.template))
}

func (c *cluster) close() error {
	var errs []error
	if c.admin != nil {
		if c.server == nil {
			errs = append(errs, c.exec("DROP DATABASE IF EXISTS "+c.template+" WITH (FORCE)"))
		}
		errs = append(errs, c.admin.Close(context.Background()))
	}
	if c.server != nil {
		errs = append(errs, c.server.Stop())
	}
	return errors.Join(errs...)
}

// exec does not take the test's context: one that ended in the middle would close the connection that all tests share.
func (c *cluster) exec(sql string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	_, err := c.admin.Exec(ctx, sql)
	return err
}

// newName returns a name that needs no quotes and that no other run has.
func newName(kind string) string { return "payments_" + kind + "_" + strings.ToLower(rand.Text()[:12]) }

// withDatabase returns the address of another database on the same server. DATABASE_URL may have either of PostgreSQL's forms.
func withDatabase(address, name string) string {
	if u, err := url.Parse(address); err == nil && u.Scheme != "" {
		u.Path = "/" + name
		return u.String()
	}
	return address + " dbname=" + name // The last one counts.
}
