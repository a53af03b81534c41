// Package devdb runs a real PostgreSQL for `payments dev` and for the tests, from the binaries that the machine has. No payment
// depends on it: a fork that brings its own database deletes this folder and sets DATABASE_URL.
//
// It promises:
//
//   - What was committed stays. fsync is on, and the data of a directory is found again after Stop, after a kill -9 of this
//     process and after a power cut.
//   - One directory, one server, one process that started it. A second [Start] is refused with [ErrInUse].
//   - No server outlives its process for long. [Server.Stop] waits for the last of its processes. After a kill -9 Linux takes
//     the server along; elsewhere the next Start on the directory stops it first.
//   - Nothing of the surroundings leaks in: not PG*, LC_* or LANG*, not the time zone, not a socket directory. The server
//     listens on 127.0.0.1 alone, on a port of its own, and wants a random password.
//   - It works as root, by running the server as the account postgres or nobody, and as any other user.
//
// A data directory holds:
//
//	owner.lock   held by the process that called Start
//	server.lock  held by the server and inherited by all of its processes, so that one whose parent was killed is noticed
//	password     of the superuser, mode 0600
//	data         the cluster, initialised as data.new and then renamed
//	server.log   what the server has said since its last start
//
// It runs on Linux and macOS. Elsewhere it compiles, and Start returns an error.
package devdb

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ErrInUse: another process has a server running in the data directory.
var ErrInUse = errors.New("data directory is in use")

// errPortTaken: somebody bound the port between our choosing it and the server's binding it.
var errPortTaken = errors.New("port was taken")

const (
	// app names the folder below the caches where data directories and fetched binaries live.
	app       = "payments"
	superuser = "postgres"

	// 60 seconds: after a power cut the server replays its log before it is ready; a clean start takes a tenth of a second.
	readyTimeout = 60 * time.Second
	// 10 ms: far below what a start takes, and a look costs one small file read.
	pollInterval = 10 * time.Millisecond
	// 5: a port is lost once in thousands of starts, so five losses in a row are something else.
	portAttempts = 5
	// 200: parallel tests hold a pool each. A connection that is never opened costs a few kilobytes of shared memory.
	defaultMaxConnections = 200
)

// Options say what to start.
type Options struct {
	DataDir        string    // where the data lives, kept across runs; created if need be; see [DefaultDir]
	Throwaway      bool      // use a new temporary directory instead, which Stop deletes
	MaxConnections int       // 200 if zero
	Log            io.Writer // if set, gets a line before each step that takes a while
}

func (o Options) say(format string, args ...any) {
	if o.Log != nil {
		fmt.Fprintf(o.Log, format+"\n", args...)
	}
}

// Server is a PostgreSQL that this process started and will stop.
type Server struct {
	dir      *directory
	binaries binaries
	process  *process
	port     int
	password string
	stop     func() error
}

// Start finds the binaries, initialises the data directory if it is new, starts the server and returns when it takes
// connections. The context bounds the start alone; the server runs until [Server.Stop].
//
// It returns [ErrInUse] if another process has a server running in the directory. If there is no PostgreSQL to be had, the
// error says how to get one.
func Start(ctx context.Context, opts Options) (_ *Server, err error) {
	runAs, err := serverAccount()
	if err != nil {
		return nil, err
	}
	dir, err := openDirectory(ctx, opts, runAs)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, dir.release())
		}
	}()
	s := &Server{dir: dir}
	s.stop = sync.OnceValue(func() error {
		return errors.Join(s.process.stop(dir.throwaway), dir.awaitServerGone(), dir.release())
	})
	if s.binaries, err = findBinaries(ctx, runAs, dir.major(), opts); err != nil {
		return nil, err
	}
	if dir.major() == 0 {
		if !opts.Throwaway {
			opts.say("Initialising %s", dir.path)
		}
		if err := dir.initialise(ctx, s.binaries, rand.Text()); err != nil {
			return nil, err
		}
	}
	if s.password, err = dir.password(); err != nil {
		return nil, err
	}
	for range portAttempts {
		if s.port, err = freePort(); err == nil {
			err = s.launch(ctx, cmp.Or(opts.MaxConnections, defaultMaxConnections))
		}
		if !errors.Is(err, errPortTaken) {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", s.Source(), err)
	}
	return s, nil
}

// launch starts postgres itself and not pg_ctl, which would detach it, and waits until it takes connections. After an error
// nothing is left running.
func (s *Server) launch(ctx context.Context, maxConnections int) error {
	serverLock, err := s.dir.lockServer(ctx)
	if err != nil {
		return err
	}
	defer serverLock.Close() // The server has its own copy: the lock must end with the server's last process, not with us.
	if err := s.dir.forgetStranger(); err != nil {
		return err
	}
	log, err := os.Create(s.dir.file("server.log"))
	if err != nil {
		return err
	}
	defer log.Close()
	args := []string{"-D", s.dir.data()}
	for _, setting := range []string{
		"port=" + strconv.Itoa(s.port),
		"listen_addresses=127.0.0.1",
		"unix_socket_directories=", // The built-in one may belong to another account.
		"max_connections=" + strconv.Itoa(maxConnections),
		"timezone=UTC", "log_timezone=UTC",
		"fsync=on", // The default; said here because it beats a postgresql.conf that somebody has tuned for speed.
	} {
		args = append(args, "-c", setting)
	}
	cmd := s.dir.runAs.command(context.WithoutCancel(ctx), s.binaries.postgres(), args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.ExtraFiles = []*os.File{serverLock}
	if s.process, err = startProcess(cmd); err != nil {
		return err
	}
	if err := s.awaitReady(ctx); err != nil {
		_ = s.process.stop(s.dir.throwaway) // The first error says more.
		return err
	}
	return nil
}

// awaitReady waits for the server's own word and then connects once. The word comes first because it names our child: whoever
// else answers on the port may be somebody else.
func (s *Server) awaitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	for {
		if pid, status := s.dir.postmaster(); pid == s.process.pid() && status == "ready" {
			break
		}
		select {
		case <-time.After(pollInterval):
		case <-s.process.exited:
			return s.dir.whyItExited()
		case <-ctx.Done():
			return fmt.Errorf("wait until it is ready: %w", ctx.Err())
		}
	}
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

// URL returns the address of a database on the server, whether or not it exists. It spells out all that PGHOST, PGPORT,
// PGUSER, PGPASSWORD, PGDATABASE and PGSSLMODE would otherwise fill in.
func (s *Server) URL(database string) string {
	return (&url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword(superuser, s.password),
		Host:     net.JoinHostPort("127.0.0.1", strconv.Itoa(s.port)),
		Path:     "/" + database,
		RawQuery: "sslmode=disable",
	}).String()
}

// Source says in one line which binaries were chosen and who runs them.
func (s *Server) Source() string { return s.binaries.String() + s.dir.runAs.String() }

// CreateDatabase creates a database unless there is one of that name.
func (s *Server) CreateDatabase(ctx context.Context, name string) error {
	conn, err := pgx.Connect(ctx, s.URL("postgres"))
	if err != nil {
		return fmt.Errorf("create database %s: %w", name, err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	_, err = conn.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{name}.Sanitize())
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.Code == pgerrcode.DuplicateDatabase {
		return nil
	}
	return err
}

// Stop ends all sessions, shuts the server down, waits until its last process is gone, and deletes a throw-away directory. It
// returns an error if the server had died by itself or had to be killed; what was committed is safe even then. A second call
// does nothing and returns the same.
func (s *Server) Stop() error { return s.stop() }

// DefaultDir returns where a data directory of that name belongs: below the user's cache directory, or for root below
// /var/cache, because the account that runs the server cannot enter root's own. It creates nothing.
func DefaultDir(name string) (string, error) {
	if os.Geteuid() == 0 {
		return filepath.Join("/var/cache", app, name), nil
	}
	caches, err := os.UserCacheDir()
	return filepath.Join(caches, app, name), err
}

// freePort returns a port that nobody listened on a moment ago. PostgreSQL cannot choose one itself.
func freePort() (int, error) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return listener.Addr().(*net.TCPAddr).Port, listener.Close()
}
