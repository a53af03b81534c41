package chaos

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
)

// patience is how long the harness waits for what should take a moment, on a machine that is busy.
const patience = 30 * time.Second

// process is a child that dies with the harness.
type process struct {
	cmd    *exec.Cmd
	log    string
	exited chan struct{}
	paused atomic.Bool
}

// startProcess runs a program with these variables and no others but PATH. What it says goes to the file log.
func startProcess(log string, env []string, name string, args ...string) (*process, error) {
	return startProcessAs(nil, log, env, name, args...)
}

// startProcessAs is startProcess with another account, unless it is nil.
func startProcessAs(account *syscall.Credential, log string, env []string, name string, args ...string) (*process, error) {
	file, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	p := &process{cmd: exec.Command(name, args...), log: log, exited: make(chan struct{})}
	p.cmd.Env = append([]string{"PATH=" + os.Getenv("PATH")}, env...)
	p.cmd.Stdout, p.cmd.Stderr = file, file
	if account != nil {
		p.cmd.Dir = "/" // It may not be able to enter ours.
	}
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL, Credential: account}
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
	return p, <-started
}

func (p *process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) } // The one error is that it has exited.

func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.exited
}

func (p *process) pause()  { p.paused.Store(true); p.signal(syscall.SIGSTOP) }
func (p *process) resume() { p.signal(syscall.SIGCONT); p.paused.Store(false) }

func (p *process) running() bool {
	select {
	case <-p.exited:
		return false
	default:
		return true
	}
}

// terminate is SIGTERM, and SIGKILL for one that does not drain within the time.
func (p *process) terminate(limit time.Duration) {
	p.signal(syscall.SIGTERM)
	select {
	case <-p.exited:
	case <-time.After(limit):
		p.kill()
	}
}

// await returns what the pattern's group matches in what the process has said.
func (p *process) await(pattern string) (string, error) {
	re := regexp.MustCompile(pattern)
	for deadline := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		running := p.running()
		said, _ := os.ReadFile(p.log)
		if match := re.FindSubmatch(said); match != nil {
			return string(match[1]), nil
		}
		if !running || time.Now().After(deadline) {
			return "", fmt.Errorf("%s has not said %q but:\n%s", p.cmd, pattern, said)
		}
	}
}
