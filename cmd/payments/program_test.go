package main

import (
	"bytes"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"example.com/payments/internal/dbtest"
)

// asMainEnv makes this test binary be the program, so that the tests can start it, and kill it, as a process of its own.
const asMainEnv = "PAYMENTS_TEST_AS_MAIN"

// patience is how long a test waits for what should take a moment, on a machine that is busy with all the other tests.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	if os.Getenv(asMainEnv) != "" {
		main()
	}
	// These tests wait for other processes; as many as there are processors would leave those idle.
	_ = flag.Set("test.parallel", "12")
	dbtest.Main(m)
}

// program is the program as a process of its own.
type program struct {
	cmd            *exec.Cmd
	stdout, stderr output
	exited         chan struct{}
}

// output collects what a process writes.
type output struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// start runs the program with these settings and no others. It dies with the test.
func start(t testing.TB, settings []string, args ...string) *program {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	p := &program{cmd: exec.Command(self, args...), exited: make(chan struct{})}
	// The race detector would let every process sleep a second before it exits.
	p.cmd.Env = []string{asMainEnv + "=1", "GORACE=atexit_sleep_ms=0", "HOME=" + t.TempDir(), "TMPDIR=" + os.TempDir()}
	for _, name := range []string{"PATH", "PG_BINDIR"} {
		if value, ok := os.LookupEnv(name); ok {
			p.cmd.Env = append(p.cmd.Env, name+"="+value)
		}
	}
	p.cmd.Env = append(p.cmd.Env, settings...) // Of a name that comes twice the last counts.
	p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
	p.cmd.WaitDelay = patience
	p.cmd.SysProcAttr = &syscall.SysProcAttr{}
	dieWithParent(p.cmd.SysProcAttr)

	started := make(chan error)
	go func() {
		// The death signal is sent when the thread that forked ends.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			_ = p.cmd.Wait() // Its ending is in ProcessState.
			close(p.exited)
		}
	}()
	require.NoError(t, <-started)
	t.Cleanup(func() {
		p.kill(t)
		if strings.Contains(p.stderr.String(), "DATA RACE") {
			t.Error("a process has found a data race in itself")
		}
		if t.Failed() {
			t.Logf("payments %s (process %d) said:\n%s%s", strings.Join(args, " "), p.cmd.Process.Pid, p.stdout.String(), p.stderr.String())
		}
	})
	return p
}

// execute runs the program to its end and returns its exit status.
func execute(t *testing.T, settings []string, args ...string) (status int, p *program) {
	t.Helper()
	p = start(t, settings, args...)
	return p.wait(t), p
}

func (p *program) signal(t testing.TB, signal syscall.Signal) {
	t.Helper()
	require.NoError(t, p.cmd.Process.Signal(signal))
}

// kill is kill -9.
func (p *program) kill(t testing.TB) {
	t.Helper()
	_ = p.cmd.Process.Kill() // The one error is that it has exited.
	p.wait(t)
}

// pause stops the process as a full host or a debugger does, and returns when it has stopped.
func (p *program) pause(t *testing.T) {
	t.Helper()
	p.signal(t, syscall.SIGSTOP)
	eventually(t, "the process has stopped", func() bool {
		return strings.HasPrefix(processState(t, p.cmd.Process.Pid), "T")
	})
}

func (p *program) resume(t *testing.T) { p.signal(t, syscall.SIGCONT) }

// wait returns the exit status, -1 after a signal.
func (p *program) wait(t testing.TB) int {
	t.Helper()
	select {
	case <-p.exited:
		return p.cmd.ProcessState.ExitCode()
	case <-time.After(patience):
		t.Fatalf("the process does not end; it has said:\n%s%s", p.stdout.String(), p.stderr.String())
		return 0
	}
}

// await waits until the process has written what the pattern matches, and returns the pattern's last group.
func (p *program) await(t testing.TB, out *output, pattern string) string {
	t.Helper()
	re := regexp.MustCompile(pattern)
	for deadline := time.After(patience); ; {
		ended := false
		select {
		case <-p.exited:
			ended = true
		default:
		}
		if match := re.FindStringSubmatch(out.String()); match != nil {
			return match[len(match)-1]
		}
		select {
		case <-deadline:
			ended = true
		case <-time.After(10 * time.Millisecond):
		}
		if ended {
			t.Fatalf("nothing like %q in what the process has said:\n%s%s", pattern, p.stdout.String(), p.stderr.String())
		}
	}
}

// complaints are the lines with which the program has refused to go on, without its name.
func (p *program) complaints() []string {
	var lines []string
	for line := range strings.Lines(p.stderr.String()) {
		if complaint, ok := strings.CutPrefix(line, "payments: "); ok {
			lines = append(lines, strings.TrimSpace(complaint))
		}
	}
	return lines
}

// eventually waits until the fact holds.
func eventually(t testing.TB, fact string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !holds(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("it never came true that %s", fact)
		}
	}
}

// processState is ps's letters for it; empty when there is no such process.
func processState(t *testing.T, pid int) string {
	t.Helper()
	out, _ := exec.Command(tool(t, "ps", "procps"), "-o", "stat=", "-p", strconv.Itoa(pid)).Output()
	return strings.TrimSpace(string(out))
}

// tool finds a program that a test needs.
func tool(t testing.TB, name, debian string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("this test needs %s: %v; install it (Debian, Ubuntu: apt-get install %s)", name, err, debian)
	}
	return path
}

// openDir makes a directory that another account can pass through, which t.TempDir is not for root.
func openDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "payments-test-")
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o755))
	return filepath.Clean(dir)
}
