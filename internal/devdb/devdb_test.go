package devdb

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// parentEnv makes this test binary play the process that starts a server, on the data directory that the variable names.
const parentEnv = "DEVDB_TEST_PARENT"

func TestMain(m *testing.M) {
	if dir := os.Getenv(parentEnv); dir != "" {
		playParent(dir)
		return
	}
	code := m.Run()
	_ = os.RemoveAll(initialised.path)
	os.Exit(code)
}

// report is what a parent tells the test.
type report struct {
	URL, Source, Error string
	PID, UID           int
}

// playParent starts a server, reports it on standard output, and stops it when standard input ends.
func playParent(dir string) {
	server, err := Start(context.Background(), Options{DataDir: dir})
	r := report{UID: os.Geteuid()}
	if err != nil {
		r.Error = err.Error()
	} else {
		r.URL, r.Source, r.PID = server.URL("postgres"), server.Source(), server.process.pid()
	}
	_ = json.NewEncoder(os.Stdout).Encode(r)
	if err != nil {
		os.Exit(1)
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	if err := server.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

type parent struct {
	report
	cmd   *exec.Cmd
	stdin io.Closer
}

// startParent runs playParent in a process of its own and returns its report.
func startParent(t *testing.T, dir string, change func(*exec.Cmd)) *parent {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	p := &parent{cmd: exec.CommandContext(t.Context(), self)}
	p.cmd.Env = append(os.Environ(), parentEnv+"="+dir)
	p.cmd.Stderr = os.Stderr
	if change != nil {
		change(p.cmd)
	}
	p.stdin, err = p.cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := p.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, p.cmd.Start())
	line, err := bufio.NewReader(stdout).ReadBytes('\n')
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(line, &p.report))
	return p
}

// newDataDir returns an empty directory that the server's account can reach; t.TempDir is root's alone.
func newDataDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "devdb-test-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	return dir
}

// initialised is a data directory that was used and left in order. To initialise one takes a second or more of processor time,
// so tests that are not about that copy it.
var initialised struct {
	once sync.Once
	path string
	err  error
}

func newUsedDataDir(t *testing.T) string {
	t.Helper()
	initialised.once.Do(func() {
		if initialised.path, initialised.err = os.MkdirTemp("", "devdb-test-"); initialised.err != nil {
			return
		}
		server, err := Start(context.Background(), Options{DataDir: initialised.path})
		if err == nil {
			err = server.Stop()
		}
		initialised.err = err
	})
	require.NoError(t, initialised.err)
	dir := newDataDir(t)
	out, err := exec.CommandContext(t.Context(), "cp", "-a", initialised.path+"/.", dir).CombinedOutput()
	require.NoError(t, err, string(out))
	return dir
}

func start(t *testing.T, opts Options) *Server {
	t.Helper()
	server, err := Start(t.Context(), opts)
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Stop() })
	return server
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

func show(t *testing.T, conn *pgx.Conn, setting string) (value string) {
	t.Helper()
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT current_setting($1)", setting).Scan(&value))
	return value
}

// isGone says that the process runs no more. An orphan may stay a zombie until somebody collects it.
func isGone(pid int) bool {
	state, err := exec.Command("ps", "-o", "stat=", "-p", strconv.Itoa(pid)).Output()
	return err != nil || strings.HasPrefix(string(state), "Z")
}

func TestData(t *testing.T) {
	t.Parallel()

	t.Run("OutlivesTheKillingOfTheParent", func(t *testing.T) {
		t.Parallel()
		dir := newUsedDataDir(t)
		p := startParent(t, dir, nil)
		require.Empty(t, p.Error)
		conn := connect(t, p.URL)
		_, err := conn.Exec(t.Context(), "CREATE TABLE kept AS SELECT 42 AS answer")
		require.NoError(t, err)
		require.NoError(t, p.cmd.Process.Kill())
		_ = p.cmd.Wait()

		// At once, while the orphan is still shutting down.
		server := start(t, Options{DataDir: dir})
		require.True(t, isGone(p.PID), "the orphaned server still runs")
		var answer int
		require.NoError(t, connect(t, server.URL("postgres")).QueryRow(t.Context(), "SELECT answer FROM kept").Scan(&answer))
		require.Equal(t, 42, answer)
	})

	t.Run("IsClosedInOrderWhenTheParentIsKilled", func(t *testing.T) {
		t.Parallel()
		if runtime.GOOS != "linux" {
			t.Log("only Linux tells a child of its parent's death; elsewhere the next Start stops the server")
			return
		}
		dir := newUsedDataDir(t)
		p := startParent(t, dir, nil)
		require.Empty(t, p.Error)
		require.NoError(t, p.cmd.Process.Kill())
		_ = p.cmd.Wait()
		require.Eventually(t, func() bool { return isGone(p.PID) }, 20*time.Second, pollInterval)
		log, err := os.ReadFile(filepath.Join(dir, "server.log"))
		require.NoError(t, err)
		require.Contains(t, string(log), "database system is shut down")
	})

	t.Run("OutlivesStopAndNeedsNoRecovery", func(t *testing.T) {
		t.Parallel()
		dir := newUsedDataDir(t)
		server := start(t, Options{DataDir: dir})
		require.NoError(t, server.CreateDatabase(t.Context(), "payments"))
		require.NoError(t, server.CreateDatabase(t.Context(), "payments"), "a database that is there is no error")
		idle := connect(t, server.URL("payments"))
		require.NoError(t, server.Stop())
		require.Error(t, idle.Ping(t.Context()), "stop ends all sessions")
		require.NoFileExists(t, filepath.Join(dir, "data", "postmaster.pid"))
		require.True(t, isGone(server.process.pid()))
		require.NoError(t, server.Stop(), "a second Stop does nothing")

		server = start(t, Options{DataDir: dir})
		connect(t, server.URL("payments"))
		log, err := os.ReadFile(filepath.Join(dir, "server.log"))
		require.NoError(t, err)
		require.Contains(t, string(log), "database system was shut down at")
		require.NotContains(t, string(log), "recovery")
	})

	t.Run("IsFoundBehindAStrangersProcessNumber", func(t *testing.T) {
		t.Parallel()
		dir := newUsedDataDir(t)
		server := start(t, Options{DataDir: dir})
		require.NoError(t, server.Stop())

		// The same account, or PostgreSQL would disregard the process by itself.
		stranger := server.dir.runAs.command(t.Context(), "sleep", "60")
		require.NoError(t, stranger.Start())
		t.Cleanup(func() { _ = stranger.Process.Kill(); _ = stranger.Wait() })
		stale := fmt.Sprintf("%d\n%s\n%d\n5432\n\n127.0.0.1\n\nready\n", stranger.Process.Pid, server.dir.data(), time.Now().Unix())
		require.NoError(t, os.WriteFile(filepath.Join(dir, "data", "postmaster.pid"), []byte(stale), 0o600))

		start(t, Options{DataDir: dir})
	})
}

func TestStart(t *testing.T) {
	t.Parallel()

	t.Run("IsRefusedOnADirectoryInUseAndHarmsNothing", func(t *testing.T) {
		t.Parallel()
		dir := newUsedDataDir(t)
		server := start(t, Options{DataDir: dir})
		_, err := Start(t.Context(), Options{DataDir: dir})
		require.ErrorIs(t, err, ErrInUse)
		require.ErrorContains(t, err, dir)
		require.ErrorContains(t, err, strconv.Itoa(server.process.pid()))

		second := startParent(t, dir, nil)
		require.Contains(t, second.Error, ErrInUse.Error())
		require.Error(t, second.cmd.Wait())
		require.NoError(t, connect(t, server.URL("postgres")).Ping(t.Context()))
	})

	t.Run("NoticesThatItsPortWasTaken", func(t *testing.T) {
		t.Parallel()
		runAs, err := serverAccount()
		require.NoError(t, err)
		dir, err := openDirectory(t.Context(), Options{DataDir: newUsedDataDir(t)}, runAs)
		require.NoError(t, err)
		t.Cleanup(func() { _ = dir.release() })
		server := &Server{dir: dir}
		server.binaries, err = findBinaries(t.Context(), runAs, dir.major(), Options{})
		require.NoError(t, err)
		somebody, err := net.Listen("tcp4", "127.0.0.1:0")
		require.NoError(t, err)
		t.Cleanup(func() { _ = somebody.Close() })
		server.port = somebody.Addr().(*net.TCPAddr).Port
		require.ErrorIs(t, server.launch(t.Context(), 20), errPortTaken)
	})

	t.Run("WorksForAnOrdinaryUser", func(t *testing.T) {
		t.Parallel()
		if os.Geteuid() != 0 {
			require.NotContains(t, start(t, Options{DataDir: newUsedDataDir(t)}).Source(), " as ")
			return
		}
		nobody, err := user.Lookup("nobody")
		require.NoError(t, err)
		uid, err := strconv.Atoi(nobody.Uid)
		require.NoError(t, err)
		home := newDataDir(t)
		require.NoError(t, os.Chown(home, uid, uid))
		// The test binary is built where only root can enter.
		self, err := os.Executable()
		require.NoError(t, err)
		program, err := os.ReadFile(self)
		require.NoError(t, err)
		copied := filepath.Join(home, "devdb.test")
		require.NoError(t, os.WriteFile(copied, program, 0o755))

		p := startParent(t, filepath.Join(home, "db"), func(cmd *exec.Cmd) {
			cmd.Path, cmd.Dir = copied, home
			cmd.Env = append(cmd.Env, "HOME="+home)
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}}
		})
		require.Empty(t, p.Error)
		require.Equal(t, uid, p.UID)
		require.NoError(t, connect(t, p.URL).Ping(t.Context()))
		require.NoError(t, p.stdin.Close())
		require.NoError(t, p.cmd.Wait())
		require.True(t, isGone(p.PID))
	})

	t.Run("LetsNothingOfTheEnvironmentIn", func(t *testing.T) {
		t.Parallel()
		p := startParent(t, newDataDir(t), func(cmd *exec.Cmd) {
			cmd.Env = append(cmd.Env, "PGHOST=192.0.2.1", "PGPORT=1", "PGUSER=stranger", "PGPASSWORD=wrong", "PGDATABASE=elsewhere",
				"PGSSLMODE=verify-full", "PGDATA=/nowhere", "PGDATESTYLE=German", "LC_ALL=xx_XX", "LANG=xx_XX", "TZ=Asia/Tokyo")
		})
		require.Empty(t, p.Error)
		conn := connect(t, p.URL)
		require.Equal(t, "ISO, MDY", show(t, conn, "DateStyle"))
		require.Equal(t, "C", show(t, conn, "lc_messages"))
		require.Equal(t, "UTC", show(t, conn, "TimeZone"))
		require.Equal(t, "UTF8", show(t, conn, "server_encoding"))
		require.NoError(t, p.stdin.Close())
		require.NoError(t, p.cmd.Wait())
	})
}

func TestServer(t *testing.T) {
	t.Parallel()
	server := start(t, Options{Throwaway: true, MaxConnections: 77})
	conn := connect(t, server.URL("postgres"))

	// These share the server, and the last one stops it: they run in order.
	t.Run("KeepsWhatItAcknowledges", func(t *testing.T) {
		require.Equal(t, "on", show(t, conn, "fsync"))
		require.Equal(t, "on", show(t, conn, "synchronous_commit"))
		require.Equal(t, "on", show(t, conn, "full_page_writes"))
	})
	t.Run("ListensOnOnePortOfTheLoopbackAlone", func(t *testing.T) {
		require.Equal(t, "127.0.0.1", show(t, conn, "listen_addresses"))
		require.Empty(t, show(t, conn, "unix_socket_directories"))
	})
	t.Run("TakesTheNumberOfConnections", func(t *testing.T) {
		require.Equal(t, "77", show(t, conn, "max_connections"))
	})
	t.Run("WantsThePasswordThatOnlyTheOwnerCanRead", func(t *testing.T) {
		_, err := pgx.Connect(t.Context(), strings.Replace(server.URL("postgres"), server.password, "guess", 1))
		require.ErrorContains(t, err, "28P01")
		info, err := os.Stat(filepath.Join(server.dir.path, "password"))
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o600), info.Mode())
	})
	t.Run("IsOutOfReachOfOurCtrlC", func(t *testing.T) {
		group, err := syscall.Getpgid(server.process.pid())
		require.NoError(t, err)
		require.NotEqual(t, syscall.Getpgrp(), group)
	})
	t.Run("IsNeverRunByRoot", func(t *testing.T) {
		info, err := os.Stat(server.dir.data())
		require.NoError(t, err)
		owner := info.Sys().(*syscall.Stat_t).Uid
		require.NotZero(t, owner)
		if os.Geteuid() == 0 {
			require.Contains(t, server.Source(), " as "+server.dir.runAs.name)
		} else {
			require.EqualValues(t, os.Geteuid(), owner)
		}
	})
	t.Run("SaysWhichBinariesItRuns", func(t *testing.T) {
		require.Contains(t, server.Source(), "PostgreSQL "+strings.Fields(show(t, conn, "server_version"))[0]+" from /")
	})
	t.Run("SweepsTheThrowawaysOfKilledRunsAndNoOthers", func(t *testing.T) {
		var left [2]string
		for i := range left {
			var err error
			left[i], err = os.MkdirTemp("", throwawayPrefix)
			require.NoError(t, err)
			t.Cleanup(func() { _ = os.RemoveAll(left[i]) })
			require.NoError(t, server.dir.runAs.own(left[i]))
		}
		old, young := left[0], left[1]
		longAgo := time.Now().Add(-2 * throwawayMinAge)
		require.NoError(t, os.Chtimes(old, longAgo, longAgo))
		require.NoError(t, os.Chtimes(server.dir.path, longAgo, longAgo))

		sweepThrowaways(t.Context(), server.dir.runAs)
		require.NoDirExists(t, old)
		require.DirExists(t, young, "it may be about to be locked")
		require.DirExists(t, server.dir.path, "it is locked")
	})
	t.Run("LeavesNoProcessAndNoThrowawayDirectoryBehind", func(t *testing.T) {
		require.DirExists(t, server.dir.path)
		require.NoError(t, server.Stop())
		require.NoDirExists(t, server.dir.path)
		if runtime.GOOS == "linux" {
			// Nobody who works in the directory or has the lock open: not the server, not one of its helpers.
			links, err := filepath.Glob("/proc/[0-9]*/cwd")
			require.NoError(t, err)
			for _, link := range links {
				dir, _ := os.Readlink(link)
				require.NotContains(t, dir, server.dir.path, link)
			}
		}
	})
}

func TestStopReportsAServerThatDied(t *testing.T) {
	t.Parallel()
	server := start(t, Options{DataDir: newUsedDataDir(t)})
	require.NoError(t, server.process.cmd.Process.Kill())
	<-server.process.exited
	require.ErrorContains(t, server.Stop(), "did not shut down in order")
}
