package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// Settings are the times of a world. They are short, so that many faults fit into a minute, and their relations are those of production.
type Settings struct {
	LeaseTTL, ReapInterval, ReapAfter, GatewayTimeout, Latency time.Duration
	// Repeat is how often a client comes back: Retry-After can say no less.
	Repeat time.Duration
}

// DefaultSettings are what the crash matrix is measured with.
var DefaultSettings = Settings{
	LeaseTTL: 2 * time.Second, ReapInterval: 500 * time.Millisecond, ReapAfter: 6 * time.Second,
	GatewayTimeout: 3 * time.Second, Latency: 100 * time.Millisecond, Repeat: time.Second,
}

// Bound is how long a client may wait for its final answer once service, database and gateway are all up.
func (s Settings) Bound() time.Duration { return s.LeaseTTL + s.Repeat + 2*s.Latency + time.Second }

// Quiet is how long a key may stay in progress once everything is up and no client comes back any more.
func (s Settings) Quiet() time.Duration {
	// Five rounds is the longest that the reaper puts a look off; one more is for the look itself, and a second for a busy machine.
	return s.GatewayTimeout + s.LeaseTTL + s.ReapAfter + 6*s.ReapInterval + time.Second
}

// Options are what a world is made of.
type Options struct {
	Binary    string // see [Build]
	Replicas  int
	PgBouncer bool // put one, in transaction mode, between the replicas and the database
	Skewed    bool // the second replica's clock is an hour ahead, and the third's an hour behind
	Settings  Settings
	Log       io.Writer

	database *cluster // instead of the harness's own server
}

// World is the program and everything around it.
type World struct {
	Options
	dir        string
	lock       *os.File
	database   *database
	databaseIn *link // where PgBouncer finds the database
	pgbouncer  *process
	gateway    *gateway
	replicas   []*replica
	own        []Fault                   // beside the catalogue
	book       *book                     // of the run
	up         atomic.Pointer[time.Time] // since when all is; nil: something fails
	waiting    map[string]time.Time      // the keys in progress, since when; see [World.overdue]
	merchantID string
	apiKey     string
	clients    *http.Client
}

// replica is one process of the service, and its own ways to database and gateway.
type replica struct {
	world     *World
	index     int
	address   string
	toDB      *link
	toGateway *link
	process   *process
	starts    int
	wrong     atomic.Int64 // see clock
	mu        sync.Mutex
}

// Build compiles the program of a source tree, without the race detector: the counts are large.
func Build(ctx context.Context, tree, binary string) error {
	command := exec.CommandContext(ctx, "go", "build", "-tags", "chaos", "-o", binary, "./cmd/payments")
	command.Dir = tree
	command.Env = append(os.Environ(), "GOFLAGS=-buildvcs=false", "GOWORK=off")
	if said, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("build %s: %w\n%s", tree, err, said)
	}
	return nil
}

// Tree is the source tree that this module stands in.
func Tree() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(file))
}

// NewWorld starts everything and returns when all replicas are ready. Close ends it.
func NewWorld(ctx context.Context, options Options) (_ *World, err error) {
	sweep()
	dir, err := os.MkdirTemp("", dirPrefix)
	if err != nil {
		return nil, err
	}
	lock, err := lockDir(dir)
	if err != nil {
		return nil, err
	}
	// Another account than ours runs the database.
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, err
	}
	w := &World{Options: options, dir: dir, lock: lock, clients: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 500, DisableCompression: true}}}
	defer func() {
		if err != nil {
			w.Close()
		}
	}()
	if options.database != nil {
		w.database, err = newExternalDatabase(ctx, options.database)
	} else {
		w.database, err = newDatabase(ctx, filepath.Join(dir, "database"), w.Log)
	}
	if err != nil {
		return w, err
	}
	if w.gateway, err = newGateway(w.Binary, dir, w.Settings.Latency); err != nil {
		return w, err
	}
	databaseAddress := w.database.address()
	if w.PgBouncer {
		if w.databaseIn, err = newLink("database", databaseAddress); err != nil {
			return w, err
		}
		if databaseAddress, err = w.startPgBouncer(); err != nil {
			return w, err
		}
	}
	for i := range w.Replicas {
		r := &replica{world: w, index: i}
		if w.Skewed && i > 0 {
			r.wrong.Store(int64(time.Hour))
			if i%2 == 0 {
				r.wrong.Store(int64(-time.Hour))
			}
		}
		if r.toDB, err = newLink(fmt.Sprintf("replica %d to database", i+1), databaseAddress); err != nil {
			return w, err
		}
		port, err := w.gateway.serve(i)
		if err != nil {
			return w, err
		}
		if r.toGateway, err = newLink(fmt.Sprintf("replica %d to gateway", i+1), port); err != nil {
			return w, err
		}
		if r.address, err = freePort(); err != nil {
			return w, err
		}
		w.replicas = append(w.replicas, r)
	}
	w.database.moved = func(address string) error {
		if w.databaseIn != nil {
			return w.databaseIn.lead(address)
		}
		for _, r := range w.replicas {
			if err := r.toDB.lead(address); err != nil {
				return err
			}
		}
		return nil
	}
	if err := w.newMerchant(ctx); err != nil {
		return w, err
	}
	for _, r := range w.replicas {
		if err := r.start(); err != nil {
			return w, err
		}
	}
	return w, w.awaitUp(ctx)
}

func (w *World) newMerchant(ctx context.Context) error {
	command := exec.CommandContext(ctx, w.Binary, "merchant", "create", "Shop")
	command.Env = append(os.Environ(), "DATABASE_URL="+w.database.url())
	said, err := command.Output()
	if err != nil {
		return fmt.Errorf("create a merchant: %w", err)
	}
	match := regexp.MustCompile(`merchant_id\s+(\S+)\s+api_key\s+(\S+)`).FindSubmatch(said)
	if match == nil {
		return errors.New("merchant create has printed no key")
	}
	w.merchantID, w.apiKey = string(match[1]), string(match[2])
	return nil
}

// clock is how wrong the replica's clock is, from its next start on if it was set since the last.
func (r *replica) clock() time.Duration { return time.Duration(r.wrong.Load()) }

// start starts the replica's process, where its clients expect it.
func (r *replica) start() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	w := r.world
	r.starts++
	parameters := []string{}
	if w.PgBouncer {
		// A statement that is prepared by name lives in one server session, and PgBouncer hands those around.
		parameters = append(parameters, "default_query_exec_mode=cache_describe")
	}
	var err error
	r.process, err = startProcess(filepath.Join(w.dir, fmt.Sprintf("replica-%d.%d.log", r.index+1, r.starts)), []string{
		"LISTEN_ADDR=" + r.address,
		"DATABASE_URL=" + w.database.urlVia(r.toDB.address(), parameters...),
		"GATEWAY_URL=http://" + r.toGateway.address(),
		"GATEWAY_TIMEOUT=" + w.Settings.GatewayTimeout.String(),
		"LEASE_TTL=" + w.Settings.LeaseTTL.String(),
		"REAP_INTERVAL=" + w.Settings.ReapInterval.String(),
		"REAP_AFTER=" + w.Settings.ReapAfter.String(),
		"SHUTDOWN_TIMEOUT=" + (w.Settings.GatewayTimeout + 6*time.Second).String(),
		"DB_ACQUIRE_TIMEOUT=" + (w.Settings.LeaseTTL / 2).String(),
		"CLOCK_OFFSET=" + r.clock().String(),
	}, w.Binary, "serve")
	if err != nil {
		return err
	}
	_, err = r.process.await(`msg=serving address=(\S+)`)
	return err
}

// ensure starts the replica if it is not running.
func (r *replica) ensure() error {
	if r.process.running() {
		return nil
	}
	return r.start()
}

// awaitUp returns when every replica is ready, and reaches the gateway: from then on until down is called, time counts.
func (w *World) awaitUp(ctx context.Context) (err error) {
	defer func() {
		if err == nil {
			w.up.CompareAndSwap(nil, new(time.Now()))
		}
	}()
	ctx, cancel := context.WithTimeout(ctx, 2*patience)
	defer cancel()
	var last error
	for _, r := range w.replicas {
		for {
			probe, stop := context.WithTimeout(ctx, time.Second)
			last = r.probe(probe)
			stop()
			if last == nil {
				break
			}
			select {
			case <-ctx.Done():
				return fmt.Errorf("replica %d does not come up: %w", r.index+1, last)
			case <-time.After(10 * time.Millisecond):
			}
		}
	}
	return nil
}

// down says that from now on something fails.
func (w *World) down() { w.up.Store(nil) }

func (r *replica) probe(ctx context.Context) error {
	for url, want := range map[string]int{
		"http://" + r.address + "/readyz":                    http.StatusOK,
		"http://" + r.toGateway.address() + "/charges/probe": http.StatusNotFound,
	} {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		response, err := statusOf(request)
		if err != nil {
			return err
		}
		if response != want {
			return fmt.Errorf("%s answers %d", url, response)
		}
	}
	return nil
}

// probes keep no connection: a pooled one would say that a link is up that takes no new ones.
var probes = &http.Transport{DisableKeepAlives: true}

func statusOf(request *http.Request) (int, error) {
	response, err := probes.RoundTrip(request)
	if err != nil {
		return 0, err
	}
	_, err = io.Copy(io.Discard, response.Body)
	return response.StatusCode, errors.Join(err, response.Body.Close())
}

// startPgBouncer starts one in transaction mode.
func (w *World) startPgBouncer() (address string, err error) {
	binary, err := exec.LookPath("pgbouncer")
	if err != nil {
		if _, statErr := os.Stat("/usr/sbin/pgbouncer"); statErr != nil {
			return "", fmt.Errorf("%w; install it (Debian, Ubuntu: apt-get install pgbouncer)", err)
		}
		binary = "/usr/sbin/pgbouncer"
	}
	if address, err = freePort(); err != nil {
		return "", err
	}
	_, port, _ := strings.Cut(address, ":")
	_, databasePort, _ := strings.Cut(w.databaseIn.address(), ":")
	databaseURL, err := url.Parse(w.database.url())
	if err != nil {
		return "", err
	}
	password, _ := databaseURL.User.Password()
	users := filepath.Join(w.dir, "users.txt")
	if err := os.WriteFile(users, []byte(`"postgres" "`+password+`"`+"\n"), 0o644); err != nil {
		return "", err
	}
	config := filepath.Join(w.dir, "pgbouncer.ini")
	// What the service asks for at the start of a session belongs to a session that it does not have here. PgBouncer ignores it, so it is
	// set on the database instead: see docs/pgbouncer.md.
	err = os.WriteFile(config, []byte(strings.Join([]string{
		"[databases]",
		"payments = host=127.0.0.1 port=" + databasePort + " dbname=payments",
		"[pgbouncer]",
		"listen_addr = 127.0.0.1",
		"listen_port = " + port,
		"unix_socket_dir =",
		"auth_type = scram-sha-256",
		"auth_file = " + users,
		"pool_mode = transaction",
		"default_pool_size = 30",
		"max_client_conn = 500",
		"server_login_retry = 1",
		"ignore_startup_parameters = default_transaction_isolation,statement_timeout,lock_timeout,idle_in_transaction_session_timeout",
	}, "\n")+"\n"), 0o644)
	if err != nil {
		return "", err
	}
	for _, sql := range []string{
		"ALTER DATABASE payments SET default_transaction_isolation = 'read committed'",
		"ALTER DATABASE payments SET statement_timeout = '6s'",
		"ALTER DATABASE payments SET lock_timeout = '5s'",
		"ALTER DATABASE payments SET idle_in_transaction_session_timeout = '10s'",
	} {
		if _, err := w.database.pool.Exec(context.Background(), sql); err != nil {
			return "", err
		}
	}
	args := []string{config}
	if os.Geteuid() == 0 {
		args = slices.Insert(args, 0, "-u", "postgres")
	}
	w.pgbouncer, err = startProcess(filepath.Join(w.dir, "pgbouncer.log"), nil, binary, args...)
	if err != nil {
		return "", err
	}
	_, err = w.pgbouncer.await(`process up: (\S+)`)
	return address, err
}

// Close ends everything. The directory, with all logs, stays when CHAOS_KEEP is set.
func (w *World) Close() {
	for _, r := range w.replicas {
		if r.process != nil {
			r.process.kill()
		}
		if r.toDB != nil {
			r.toDB.close()
		}
		if r.toGateway != nil {
			r.toGateway.close()
		}
	}
	if w.pgbouncer != nil {
		w.pgbouncer.kill()
	}
	if w.databaseIn != nil {
		w.databaseIn.close()
	}
	if w.gateway != nil {
		w.gateway.close()
	}
	if w.database != nil {
		w.database.close()
	}
	w.clients.CloseIdleConnections()
	if os.Getenv("CHAOS_KEEP") == "" {
		_ = os.RemoveAll(w.dir)
	} else {
		kept := w.dir + ".kept"
		_ = os.Rename(w.dir, kept)
		fmt.Fprintf(w.Log, "kept: %s\n", kept)
	}
	_ = w.lock.Close()
}

const dirPrefix = "payments-chaos-world-"

// lockDir marks a world's directory as that of a living process.
func lockDir(dir string) (*os.File, error) {
	lock, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}

// sweep deletes what harnesses that were killed have left behind: their children have died with them, but a mounted disk stays. A younger
// directory may belong to a process that has made it and not yet locked it.
func sweep() {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), dirPrefix+"*"))
	for _, dir := range dirs {
		info, err := os.Lstat(dir)
		if err != nil || !info.IsDir() || time.Since(info.ModTime()) < time.Minute || strings.HasSuffix(dir, ".kept") {
			continue
		}
		if stat, ok := info.Sys().(*syscall.Stat_t); !ok || int(stat.Uid) != os.Geteuid() {
			continue // Anybody may write into the temporary directory, so a name alone proves nothing.
		}
		lock, err := lockDir(dir)
		if err != nil {
			continue
		}
		_ = syscall.Unmount(filepath.Join(dir, "database"), syscall.MNT_DETACH) // The one error is that nothing is mounted there.
		_ = os.RemoveAll(dir)
		_ = lock.Close()
	}
}

// logs are what the replicas have said that fits the pattern, a few lines of it.
func (w *World) logs(pattern string, limit int) (lines []string) {
	re := regexp.MustCompile(pattern)
	files, _ := filepath.Glob(filepath.Join(w.dir, "replica-*.log"))
	for _, file := range files {
		content, _ := os.ReadFile(file)
		for line := range strings.Lines(string(content)) {
			if re.MatchString(line) && len(lines) < limit {
				lines = append(lines, filepath.Base(file)+": "+strings.TrimSpace(line))
			}
		}
	}
	return lines
}
