package chaos

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// cluster is two PostgreSQL servers, one of them a synchronous standby, which Patroni looks after with the help of an etcd. It is
// Debian's packages as they are: an existing engine, and nothing of ours.
type cluster struct {
	dir      string
	password string
	patroni  string // the program
	etcd     *process
	nodes    []*node
}

// node is one server and its Patroni.
type node struct {
	name     string
	dir      string
	port     string
	api      string // of Patroni
	account  *syscall.Credential
	patroni  *process
	starts   int
	dataPath string
}

const patroniConfig = `
scope: payments
name: %[1]s
etcd3: {host: "%[2]s"}
restapi: {listen: "%[3]s", connect_address: "%[3]s"}
bootstrap:
  dcs:
    # The shortest that Patroni takes: a leader that has not been heard of for so long is none.
    ttl: 20
    loop_wait: 2
    retry_timeout: 5
    # A commit is acknowledged when the standby has it too, so whoever becomes the leader has all that was acknowledged.
    synchronous_mode: true
    postgresql:
      use_pg_rewind: true
      parameters: {max_connections: 100, wal_log_hints: "on"}
  initdb: [encoding: UTF8, locale: C, data-checksums]
postgresql:
  listen: "127.0.0.1:%[4]s"
  connect_address: "127.0.0.1:%[4]s"
  data_dir: "%[5]s/data"
  bin_dir: "%[6]s"
  pgpass: "%[5]s/pgpass"
  remove_data_directory_on_rewind_failure: true
  pg_hba: ["host all all 127.0.0.1/32 scram-sha-256", "host replication all 127.0.0.1/32 scram-sha-256"]
  parameters: {unix_socket_directories: "%[5]s"}
  authentication:
    superuser: {username: postgres, password: "%[7]s"}
    replication: {username: replicator, password: "%[7]s"}
    rewind: {username: rewinder, password: "%[7]s"}
`

func debian(binary, pkg string, places ...string) (string, error) {
	if path, err := exec.LookPath(binary); err == nil {
		return path, nil
	}
	for _, pattern := range places {
		if found, _ := filepath.Glob(pattern); len(found) > 0 {
			return found[len(found)-1], nil
		}
	}
	return "", fmt.Errorf("there is no %s; install it (Debian, Ubuntu: apt-get install %s)", binary, pkg)
}

func startCluster(ctx context.Context) (_ *cluster, err error) {
	etcd, err := debian("etcd", "etcd-server")
	if err != nil {
		return nil, err
	}
	patroni, err := debian("patroni", "patroni")
	if err != nil {
		return nil, err
	}
	postgres, err := debian("postgres", "postgresql", "/usr/lib/postgresql/*/bin/postgres")
	if err == nil { // A link on the PATH says nothing about what lies beside its target.
		postgres, err = filepath.EvalSymlinks(postgres)
	}
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "payments-failover-")
	if err != nil {
		return nil, err
	}
	c := &cluster{dir: dir, password: rand.Text(), patroni: patroni}
	defer func() {
		if err != nil {
			c.close()
		}
	}()
	if err := os.Chmod(dir, 0o755); err != nil {
		return c, err
	}
	addresses := make([]string, 6)
	for i := range addresses {
		if addresses[i], err = freePort(); err != nil {
			return c, err
		}
	}
	c.etcd, err = startProcess(filepath.Join(dir, "etcd.log"), nil, etcd, "--data-dir", filepath.Join(dir, "etcd"),
		"--listen-client-urls", "http://"+addresses[0], "--advertise-client-urls", "http://"+addresses[0],
		"--listen-peer-urls", "http://"+addresses[1], "--initial-advertise-peer-urls", "http://"+addresses[1],
		"--initial-cluster", "default=http://"+addresses[1])
	if err != nil {
		return c, err
	}
	for i := range 2 {
		n := &node{name: "node" + strconv.Itoa(i+1), api: addresses[2+2*i]}
		_, n.port, _ = strings.Cut(addresses[3+2*i], ":")
		n.dir = filepath.Join(dir, n.name)
		if err := os.Mkdir(n.dir, 0o700); err != nil {
			return c, err
		}
		if os.Geteuid() == 0 { // PostgreSQL refuses to run as root.
			account, err := user.Lookup("postgres")
			if err != nil {
				return c, err
			}
			uid, _ := strconv.Atoi(account.Uid)
			gid, _ := strconv.Atoi(account.Gid)
			n.account = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
			if err := os.Chown(n.dir, uid, gid); err != nil {
				return c, err
			}
		}
		config := fmt.Sprintf(patroniConfig, n.name, addresses[0], n.api, n.port, n.dir, filepath.Dir(postgres), c.password)
		if err := os.WriteFile(filepath.Join(dir, n.name+".yml"), []byte(config), 0o644); err != nil {
			return c, err
		}
		c.nodes = append(c.nodes, n)
		if err := c.startNode(n); err != nil {
			return c, err
		}
		// The first makes the cluster, the second copies it.
		if err := awaitHTTP(ctx, "http://"+n.api+"/health", 3*patience); err != nil {
			return c, fmt.Errorf("%s: %w", n.name, err)
		}
	}
	return c, c.awaitStandby(ctx, c.nodes[1])
}

func (c *cluster) startNode(n *node) (err error) {
	n.starts++
	n.patroni, err = startProcessAs(n.account, c.logOf(n, n.starts), []string{"LC_ALL=C.UTF-8"},
		c.patroni, filepath.Join(c.dir, n.name+".yml"))
	return err
}

// awaitHTTP waits for a 200.
func awaitHTTP(ctx context.Context, url string, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			return err
		}
		status, err := statusOf(request)
		if err == nil && status == http.StatusOK {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s does not answer with 200 (but with %d, %v)", url, status, err)
		case <-time.After(200 * time.Millisecond):
		}
	}
}

// leader is the node that Patroni says is the primary.
func (c *cluster) leader(ctx context.Context) (leader, standby *node, err error) {
	for i, n := range c.nodes {
		if awaitHTTP(ctx, "http://"+n.api+"/primary", 500*time.Millisecond) == nil {
			return n, c.nodes[1-i], nil
		}
	}
	return nil, nil, errors.New("there is no leader")
}

// awaitStandby waits until the node is the synchronous standby.
func (c *cluster) awaitStandby(ctx context.Context, n *node) error {
	return awaitHTTP(ctx, "http://"+n.api+"/synchronous", 3*patience)
}

// url names both servers; whoever takes writes is meant.
func (c *cluster) url(database string) string {
	return fmt.Sprintf("postgres://postgres:%s@127.0.0.1:%s,127.0.0.1:%s/%s?sslmode=disable&target_session_attrs=read-write",
		c.password, c.nodes[0].port, c.nodes[1].port, database)
}

// killLeader is the machine of the leader going away: its Patroni, its server and all processes of that, from one moment to the next. It
// returns who that was, and when the last of it was gone.
func (c *cluster) killLeader(ctx context.Context) (leader *node, gone time.Time, err error) {
	if leader, _, err = c.leader(ctx); err != nil {
		return nil, gone, err
	}
	content, err := os.ReadFile(filepath.Join(leader.dir, "data", "postmaster.pid"))
	if err != nil {
		return nil, gone, err
	}
	first, _, _ := strings.Cut(string(content), "\n")
	postmaster, err := strconv.Atoi(first)
	if err != nil {
		return nil, gone, fmt.Errorf("read postmaster.pid: %w", err)
	}
	// A session outlives its postmaster until it next waits for its client. Those of a machine that is gone do not.
	sessions, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", postmaster, postmaster))
	if err != nil {
		return nil, gone, err
	}
	leader.patroni.kill()
	if err := syscall.Kill(postmaster, syscall.SIGKILL); err != nil {
		return nil, gone, fmt.Errorf("kill the leader's server: %w", err)
	}
	for pid := range strings.FieldsSeq(string(sessions)) {
		if pid, err := strconv.Atoi(pid); err == nil {
			_ = syscall.Kill(pid, syscall.SIGKILL) // The one error is that it has exited.
		}
	}
	return leader, time.Now(), nil
}

// awaitSuccessor waits until another node than the dead one answers as the primary. Nil: none did.
func (c *cluster) awaitSuccessor(ctx context.Context, dead *node) *node {
	for deadline := time.Now().Add(3 * patience); time.Now().Before(deadline) && ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		if leader, _, err := c.leader(ctx); err == nil && leader != dead {
			return leader
		}
	}
	return nil
}

// deadlocks counts them in the servers' logs. What a server says goes where its Patroni's output goes; a log without the line that each
// server begins with would have been read for nothing.
func (c *cluster) deadlocks() (n int, err error) {
	for _, node := range c.nodes {
		started := false
		for start := range node.starts {
			content, err := os.ReadFile(c.logOf(node, start+1))
			if err != nil {
				return n, err
			}
			n += bytes.Count(content, []byte("deadlock detected"))
			started = started || bytes.Contains(content, []byte("database system is ready to accept"))
		}
		if !started {
			return n, fmt.Errorf("the log of %s has nothing of its server", node.name)
		}
	}
	return n, nil
}

func (c *cluster) logOf(n *node, start int) string {
	return filepath.Join(c.dir, fmt.Sprintf("%s.%d.log", n.name, start))
}

func (c *cluster) close() {
	for _, n := range c.nodes {
		if n.patroni != nil {
			n.patroni.terminate(patience) // It stops its server first.
		}
	}
	if c.etcd != nil {
		c.etcd.kill()
	}
	if os.Getenv("CHAOS_KEEP") == "" {
		_ = os.RemoveAll(c.dir)
	}
}

// FailoverReport is what a failover has shown.
type FailoverReport struct {
	Report
	// Before and After name the nodes that led before the kill and when everything was over.
	Before, After string
	// Led is the time from the kill until another node answered as the primary; zero: none did.
	Led time.Duration
	// FirstAnswer is the time from the kill to the first 201 for a payment that was first asked for after it.
	FirstAnswer time.Duration
	// Returned is the time from the kill until the dead node was the new leader's synchronous standby; zero: it never was.
	Returned time.Duration
}

// judge adds to the violations that there was no failover.
func (r *FailoverReport) judge() {
	if r.Led == 0 || r.After == r.Before {
		r.Violations = append(r.Violations, Violation(fmt.Sprintf("another node leads after the leader's death: %q led, then %q", r.Before, r.After)))
	}
	if r.Returned == 0 {
		r.Violations = append(r.Violations, Violation(fmt.Sprintf("the dead node comes back as the standby: %s did not", r.Before)))
	}
	if r.FirstAnswer == 0 {
		r.Violations = append(r.Violations, "a payment that is first asked for after the leader's death succeeds: none did")
	}
}

// Failover lets customers shop, kills the leader of the database, waits until the other node leads, brings the dead one back, and goes on
// until everything is up again and checked.
func Failover(ctx context.Context, options Options, run RunOptions) (*FailoverReport, error) {
	c, err := startCluster(ctx)
	if err != nil {
		return nil, err
	}
	defer c.close()
	options.database = c
	w, err := NewWorld(ctx, options)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	const name = "leader of the database killed -9"
	report := &FailoverReport{}
	var killed time.Time
	returned := make(chan time.Time, 1)
	w.own = []Fault{{Name: name, begin: func(ctx context.Context, _ *World, _ *replica) (func() error, error) {
		dead, gone, err := c.killLeader(ctx)
		if err != nil {
			return nil, err
		}
		killed, report.Before = gone, dead.name
		fmt.Fprintf(run.Log, "killed -9: %s, its server and its Patroni\n", dead.name)
		return func() error {
			successor := c.awaitSuccessor(ctx, dead)
			if successor != nil {
				report.Led = time.Since(killed)
				fmt.Fprintf(run.Log, "%s leads after %s\n", successor.name, report.Led.Round(time.Millisecond))
			}
			// Not before: its Patroni would find that the lock is still its own. The database is up without it.
			go func() {
				defer close(returned)
				if err := c.awaitStandby(ctx, dead); err != nil {
					fmt.Fprintf(run.Log, "%s: %v\n", dead.name, err)
					return
				}
				returned <- time.Now()
			}()
			return c.startNode(dead)
		}, nil
	}}}
	run.Faults = []string{name}
	b := &book{}
	r, err := runWith(ctx, w, run, b, 1)
	if err != nil {
		return nil, err
	}
	report.Report = *r
	if killed.IsZero() {
		return nil, errors.New("the time was over before the leader was killed")
	}
	if at, ok := <-returned; ok {
		report.Returned = at.Sub(killed)
	}
	leader, _, err := c.leader(ctx)
	if err != nil {
		return nil, err
	}
	report.After = leader.name
	report.FirstAnswer = firstAnswer(b.operations, killed)
	report.judge()
	return report, nil
}

// firstAnswer is how long after the moment the first 201 came for a payment that was first asked for after it; zero: none did.
func firstAnswer(operations []*operation, moment time.Time) (first time.Duration) {
	for _, o := range operations {
		if o.kind != "payment" || !o.started.After(moment) {
			continue
		}
		for _, c := range o.calls {
			if took := c.received.Sub(moment); c.status == http.StatusCreated && (first == 0 || took < first) {
				first = took
			}
		}
	}
	return first
}
