// Package devredis runs a Redis for the tests of the strategies and for claimlab: a real redis-server if one is on PATH, else an embedded
// miniredis, and it says which. The real one keeps nothing on disk, so a restart of it is what a Redis without a replica and without an
// append-only file is after a restart: empty.
package devredis

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

const (
	// 10 seconds: it starts in hundredths of one, and the machine may be busy.
	readyTimeout = 10 * time.Second
	// A look costs one dial of a closed port.
	pollInterval = 5 * time.Millisecond
	// A port is lost to somebody else once in thousands of starts.
	portAttempts = 5
	// 64: no request of the lab waits for a connection to Redis, so that what waits is the claim and not the client.
	poolSize = 64
)

// Server is a Redis that this process started and will stop.
type Server struct {
	addr   string
	source string

	// Either an embedded one,
	mini *miniredis.Miniredis
	stop chan struct{} // its clock

	// or a real one.
	binary string
	real   *exec.Cmd
	exited chan struct{} // closed when it has gone
}

// Start returns when the server answers.
func Start(ctx context.Context) (*Server, error) {
	binary, err := exec.LookPath("redis-server")
	if err != nil {
		return StartEmbedded()
	}
	s := &Server{binary: binary}
	version, err := exec.CommandContext(ctx, binary, "--version").Output()
	if err != nil {
		return nil, fmt.Errorf("%s --version: %w", binary, err)
	}
	s.source = "redis-server"
	for field := range strings.FieldsSeq(string(version)) {
		if v, ok := strings.CutPrefix(field, "v="); ok {
			s.source += " " + v
		}
	}
	for range portAttempts {
		if s.addr, err = freeAddr(); err != nil {
			return nil, err
		}
		if err = s.launch(ctx); err == nil {
			return s, nil
		}
	}
	return nil, fmt.Errorf("start %s: %w", binary, err)
}

// StartEmbedded starts miniredis, whether or not there is a real one.
func StartEmbedded() (*Server, error) {
	mini, err := miniredis.Run()
	if err != nil {
		return nil, err
	}
	s := &Server{addr: mini.Addr(), mini: mini, stop: make(chan struct{}), source: "miniredis, embedded (no redis-server on PATH)"}
	go s.tick()
	return s, nil
}

// tick makes the embedded server's keys expire: by itself its time stands still.
func (s *Server) tick() {
	ticker := time.NewTicker(pollInterval)
	defer ticker.Stop()
	for last := time.Now(); ; {
		select {
		case now := <-ticker.C:
			s.mini.FastForward(now.Sub(last))
			last = now
		case <-s.stop:
			return
		}
	}
}

// Source says which Redis it is.
func (s *Server) Source() string { return s.source }

// Real reports whether it is Redis itself.
func (s *Server) Real() bool { return s.mini == nil }

// Client returns a client that the caller closes.
func (s *Server) Client() *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: s.addr, PoolSize: poolSize,
		// A question about maintenance windows, which only a hosted Redis understands.
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

// Restart kills the server without a word and starts it again at the same address, with its memory lost.
func (s *Server) Restart(ctx context.Context) error {
	if s.mini != nil {
		s.mini.FlushAll()
		return nil
	}
	if err := s.kill(); err != nil {
		return err
	}
	return s.launch(ctx)
}

// Stop ends the server. Nothing is left of it.
func (s *Server) Stop() error {
	if s.mini != nil {
		close(s.stop)
		s.mini.Close()
		return nil
	}
	return s.kill()
}

// launch starts redis-server on the address and waits until it answers.
func (s *Server) launch(ctx context.Context) error {
	_, port, err := net.SplitHostPort(s.addr)
	if err != nil {
		return err
	}
	cmd := exec.Command(s.binary, "--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no", "--dir", os.TempDir(), "--dbfilename", "claimlab-unused.rdb")
	cmd.SysProcAttr = attributes()
	exited := make(chan struct{})
	started := make(chan error)
	go func() {
		// The death signal is sent when the thread that forked ends, so this one must last as long as the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
			close(exited)
		}
	}()
	if err := <-started; err != nil {
		return err
	}
	s.real, s.exited = cmd, exited

	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	client := s.Client()
	defer client.Close()
	for {
		// Whose answer it is: on a port that was lost to another Redis this one has exited.
		info, err := client.Info(ctx, "server").Result()
		if err == nil && strings.Contains(info, "process_id:"+strconv.Itoa(cmd.Process.Pid)+"\r") {
			return nil
		}
		select {
		case <-time.After(pollInterval):
		case <-exited:
			return errors.New("it exited")
		case <-ctx.Done():
			return errors.Join(ctx.Err(), s.kill())
		}
	}
}

func (s *Server) kill() error {
	_ = s.real.Process.Signal(syscall.SIGKILL) // The one error is that it has exited, which is seen below.
	select {
	case <-s.exited:
		return nil
	case <-time.After(readyTimeout):
		return fmt.Errorf("redis-server (process %d) does not end", s.real.Process.Pid)
	}
}

func freeAddr() (string, error) {
	listener, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return listener.Addr().String(), listener.Close()
}
