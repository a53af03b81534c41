package devdb

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// account is who runs the server.
type account struct {
	uid, gid int
	// name is set if we are root and have to become somebody else: PostgreSQL refuses to run as root.
	name string
}

// serverAccount returns the current user, or for root an unprivileged account: postgres, else nobody.
func serverAccount() (account, error) {
	if os.Geteuid() != 0 {
		return account{uid: os.Geteuid(), gid: os.Getegid()}, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		if u, err := user.Lookup(name); err == nil {
			uid, uidErr := strconv.Atoi(u.Uid)
			gid, gidErr := strconv.Atoi(u.Gid)
			return account{uid: uid, gid: gid, name: name}, errors.Join(uidErr, gidErr)
		}
	}
	return account{}, errors.New("PostgreSQL does not run as root, and there is no account postgres or nobody to run it as")
}

func (a account) String() string {
	if a.name == "" {
		return ""
	}
	return " as " + a.name
}

// own hands a file over to the account.
func (a account) own(path string) error {
	if a.name == "" {
		return nil
	}
	return os.Chown(path, a.uid, a.gid)
}

// command prepares a program of PostgreSQL's to run as the account, in a process group of its own: Ctrl-C is for the service,
// which drains first and stops the database last.
func (a account) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGINT) } // initdb then cleans up.
	cmd.WaitDelay = 5 * time.Second
	cmd.Dir = "/" // The account may not be able to enter ours.
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(variable string) bool {
		return strings.HasPrefix(variable, "PG") || strings.HasPrefix(variable, "LC_") || strings.HasPrefix(variable, "LANG")
	}), "LC_ALL=C") // Unset, it makes the server multi-threaded on macOS, which it refuses; and we read its messages.
	cmd.SysProcAttr = a.attributes()
	return cmd
}

// run runs a program to its end and returns what it said.
func (a account) run(ctx context.Context, name string, args ...string) (string, error) {
	runtime.LockOSThread() // For the reason given at startProcess.
	defer runtime.UnlockOSThread()
	out, err := a.command(ctx, name, args...).CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// process is a running postgres.
type process struct {
	cmd    *exec.Cmd
	exited chan struct{} // Closed when it is gone.
	err    error         // How it went; to be read after that.
}

// startProcess starts the command on a thread of its own that lasts as long as the child: the death signal is sent when the
// *thread* that forked ends, and Go ends threads when it likes.
func startProcess(cmd *exec.Cmd) (*process, error) {
	p := &process{cmd: cmd, exited: make(chan struct{})}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
			close(p.exited)
		}
	}()
	return p, <-started
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// stop asks for a shutdown that ends all sessions and writes a last checkpoint, then for one without it, then kills. In a hurry
// it skips the checkpoint, which takes seconds after many tests and would be deleted with the rest.
func (p *process) stop(hurry bool) error {
	steps := []struct {
		signal  syscall.Signal
		timeout time.Duration
	}{{syscall.SIGINT, 20 * time.Second}, {syscall.SIGQUIT, 5 * time.Second}, {syscall.SIGKILL, 5 * time.Second}}
	if hurry {
		steps = steps[1:]
	}
	for i, step := range steps {
		_ = p.cmd.Process.Signal(step.signal) // The one error is that it has exited, which is seen below.
		select {
		case <-p.exited:
			if i > 0 || p.err != nil {
				return fmt.Errorf("postgres did not shut down in order (last signal: %v): %v", step.signal, p.err) //nolint:errorlint // p.err may be nil
			}
			return nil
		case <-time.After(step.timeout):
		}
	}
	return fmt.Errorf("postgres (process %d) does not stop", p.pid())
}
