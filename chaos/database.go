package chaos

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"example.com/payments/db"
	"example.com/payments/internal/devdb"
)

const (
	maxConnections = 100
	// The disk that can be full. A busy half hour needs a third of it; the write-ahead log is kept short.
	diskBytes = 2 << 30
)

// database is the harness's own PostgreSQL. Its port is another one after each restart; the links are led there.
type database struct {
	dir     string
	onTmpfs bool
	log     io.Writer
	moved   func(address string) error
	// cluster, if not nil, looks after the database, instead of a server of its own.
	cluster *cluster

	mu        sync.Mutex
	server    *devdb.Server
	pool      *pgxpool.Pool // the harness's own way in, through no link
	deadlocks int           // in the logs of servers that have ended
}

func newDatabase(ctx context.Context, dir string, log io.Writer) (*database, error) {
	d := &database{dir: dir, log: log, moved: func(string) error { return nil }}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return nil, err
	}
	if os.Geteuid() == 0 {
		err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size="+strconv.Itoa(diskBytes)+",mode=0755")
		if d.onTmpfs = err == nil; err != nil {
			fmt.Fprintf(log, "no tmpfs, so the disk cannot be full in this run: %v\n", err)
		}
	}
	if err := d.start(ctx); err != nil {
		return d, err
	}
	if err := d.server.CreateDatabase(ctx, "payments"); err != nil {
		return d, err
	}
	return d, d.prepare(ctx, "ALTER SYSTEM SET max_wal_size = '256MB'", "SELECT pg_reload_conf()")
}

// newExternalDatabase takes a cluster's.
func newExternalDatabase(ctx context.Context, c *cluster) (*database, error) {
	d := &database{cluster: c, moved: func(string) error { return nil }}
	conn, err := pgx.Connect(ctx, c.url("postgres"))
	if err != nil {
		return d, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, "CREATE DATABASE payments"); err != nil {
		return d, err
	}
	if d.pool, err = pgxpool.New(ctx, d.url()+"&application_name=chaos&timezone=UTC"); err != nil {
		return d, err
	}
	return d, d.prepare(ctx)
}

// prepare migrates, and adds the audit trail.
func (d *database) prepare(ctx context.Context, statements ...string) error {
	if err := db.Up(ctx, d.url()); err != nil {
		return err
	}
	for _, sql := range append(statements, auditSQL) {
		if _, err := d.pool.Exec(ctx, sql); err != nil {
			return fmt.Errorf("prepare the database: %w", err)
		}
	}
	return nil
}

func (d *database) start(ctx context.Context) error {
	server, err := devdb.Start(ctx, devdb.Options{DataDir: d.dir, MaxConnections: maxConnections})
	if err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, server.URL("payments")+"&application_name=chaos&timezone=UTC")
	if err != nil {
		return errors.Join(err, server.Stop())
	}
	d.mu.Lock()
	if d.pool != nil {
		go d.pool.Close()
	}
	d.server, d.pool = server, pool
	d.mu.Unlock()
	return d.moved(d.address())
}

// stop ends the server with a signal to its postmaster: SIGINT is a fast shutdown, SIGQUIT an immediate one, which recovers at the start.
func (d *database) stop(signal syscall.Signal) error {
	content, err := os.ReadFile(filepath.Join(d.dir, "data", "postmaster.pid"))
	if err == nil {
		first, _, _ := strings.Cut(string(content), "\n")
		pid, err := strconv.Atoi(first)
		if err != nil {
			return fmt.Errorf("read postmaster.pid: %w", err)
		}
		_ = syscall.Kill(pid, signal) // The one error is that it has exited.
	}
	_ = d.server.Stop()                   // That it had died is what was wanted.
	d.deadlocks, err = d.countDeadlocks() // The next start truncates the log.
	return err
}

// countDeadlocks counts those of all servers that there were.
func (d *database) countDeadlocks() (int, error) {
	if d.cluster != nil {
		return d.cluster.deadlocks()
	}
	content, err := os.ReadFile(filepath.Join(d.dir, "server.log"))
	return d.deadlocks + bytes.Count(content, []byte("deadlock detected")), err
}

func (d *database) current() *pgxpool.Pool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.pool
}

func (d *database) url() string {
	if d.cluster != nil {
		return d.cluster.url("payments")
	}
	return d.server.URL("payments")
}

func (d *database) address() string {
	u, err := url.Parse(d.url())
	if err != nil {
		panic(err) // devdb makes it.
	}
	return u.Host
}

func (d *database) urlVia(address string, parameters ...string) string {
	u, err := url.Parse(d.url())
	if err != nil {
		panic(err) // devdb makes it.
	}
	if d.cluster == nil {
		u.Host = address
	}
	for _, p := range parameters {
		u.RawQuery += "&" + p
	}
	return u.String()
}

// restartIfDown starts a server that has given up, as it does when its disk stays full.
func (d *database) restartIfDown(ctx context.Context) error {
	for range 20 {
		probe, cancel := context.WithTimeout(ctx, time.Second)
		err := d.current().Ping(probe)
		cancel()
		if err == nil {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	if err := d.stop(syscall.SIGQUIT); err != nil {
		return err
	}
	return d.start(ctx)
}

// fill takes all that is left of the disk.
func (d *database) fill() error {
	file, err := os.Create(filepath.Join(d.dir, "filler"))
	if err != nil {
		return err
	}
	defer file.Close()
	for size := int64(64 << 20); size >= 4096; {
		info, err := file.Stat()
		if err != nil {
			return err
		}
		if syscall.Fallocate(int(file.Fd()), 0, info.Size(), size) != nil {
			size /= 2
		}
	}
	return nil
}

// useUpLog writes until the segments of the write-ahead log that were made in time are used up, and the server panics.
func (d *database) useUpLog(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	for ctx.Err() == nil {
		if _, err := d.current().Exec(ctx, "SELECT pg_logical_emit_message(false, 'chaos', repeat('x', 1000000)) FROM generate_series(1, 16)"); err != nil {
			return
		}
	}
}

func (d *database) free() error { return os.Remove(filepath.Join(d.dir, "filler")) }

// exhaust takes all the connections that are left, and those that become free, and takes from the service those that it has. The function
// that it returns gives them back.
func (d *database) exhaust(ctx context.Context) (release func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	// One must be had before all are taken.
	killer, err := d.current().Acquire(ctx)
	if err != nil {
		cancel()
		return nil, err
	}
	var mu sync.Mutex
	var taken []*pgx.Conn
	var done sync.WaitGroup
	for range 4 {
		done.Go(func() {
			for ctx.Err() == nil {
				dial, stop := context.WithTimeout(ctx, time.Second)
				conn, err := pgx.Connect(dial, d.url()+"&application_name=chaos")
				stop()
				if err != nil {
					time.Sleep(5 * time.Millisecond)
					continue
				}
				mu.Lock()
				taken = append(taken, conn)
				mu.Unlock()
			}
		})
	}
	done.Go(func() {
		defer killer.Release()
		for ctx.Err() == nil {
			// That it ended with everything else is no harm.
			_, _ = killer.Exec(ctx, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'payments' AND application_name <> 'chaos'")
			time.Sleep(50 * time.Millisecond)
		}
	})
	return func() {
		cancel()
		done.Wait()
		for _, conn := range taken {
			_ = conn.Close(context.Background())
		}
	}, nil
}

func (d *database) close() {
	if d.pool != nil {
		d.pool.Close()
	}
	if d.server != nil {
		_ = d.server.Stop()
	}
	if d.onTmpfs {
		_ = syscall.Unmount(d.dir, syscall.MNT_DETACH)
	}
}

// freePort returns an address that nobody listened on a moment ago.
func freePort() (string, error) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return listener.Addr().String(), listener.Close()
}
