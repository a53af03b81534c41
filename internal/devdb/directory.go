package devdb

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

const (
	throwawayPrefix = app + "-throwaway-"
	// One minute: a younger directory may belong to a process that has made it and not yet locked it.
	throwawayMinAge = time.Minute
	// 30 seconds: an orphaned server has been asked to stop and writes its last checkpoint.
	serverGoneTimeout = 30 * time.Second
)

// errLocked: another process holds the lock.
var errLocked = errors.New("locked")

// directory is a data directory that only this process may use until it releases it.
type directory struct {
	path      string
	runAs     account
	throwaway bool
	owner     *os.File
}

func (d *directory) file(name string) string { return filepath.Join(d.path, name) }
func (d *directory) data() string            { return d.file("data") }

// openDirectory makes the directory if need be and takes it for this process.
func openDirectory(ctx context.Context, opts Options, runAs account) (_ *directory, err error) {
	path := opts.DataDir
	if opts.Throwaway {
		sweepThrowaways(ctx, runAs)
		path, err = os.MkdirTemp("", throwawayPrefix)
	} else {
		err = os.MkdirAll(path, 0o755)
	}
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err == nil { // The server resolves links too, and forgetStranger compares with what it works in.
		path, err = filepath.EvalSymlinks(path)
	}
	if err != nil {
		return nil, err
	}
	// Only an empty directory changes hands: a mistyped path must not give somebody's files away.
	if entries, err := os.ReadDir(path); err == nil && len(entries) == 0 {
		if err := errors.Join(os.Chmod(path, 0o700), runAs.own(path)); err != nil {
			return nil, err
		}
	}
	d := &directory{path: path, runAs: runAs, throwaway: opts.Throwaway}
	return d, d.take(ctx)
}

// take locks the directory for this process. A server that an earlier owner left behind when it was killed is stopped.
func (d *directory) take(ctx context.Context) (err error) {
	if d.owner, err = lockFile(d.file("owner.lock")); errors.Is(err, errLocked) {
		pid, _ := d.postmaster()
		return fmt.Errorf("%w: another process runs a PostgreSQL (process %d) in %s; stop it or choose another directory",
			ErrInUse, pid, d.path)
	} else if err != nil {
		return err
	}
	serverLock, err := lockFile(d.file("server.lock"))
	if errors.Is(err, errLocked) {
		// On Linux it was told to stop when its parent died; telling it twice does no harm.
		if pid, _ := d.postmaster(); pid > 0 {
			interrupt(pid)
		}
		serverLock, err = d.lockServer(ctx)
	}
	if err != nil {
		return errors.Join(err, unlock(d.owner))
	}
	return unlock(serverLock)
}

// release gives the directory back, and deletes it if it is a throw-away.
func (d *directory) release() (err error) {
	if d.throwaway {
		err = os.RemoveAll(d.path)
	}
	return errors.Join(err, unlock(d.owner))
}

// lockServer takes the lock that the server inherits. It waits while any process of an earlier server is still there.
func (d *directory) lockServer(ctx context.Context) (*os.File, error) {
	ctx, cancel := context.WithTimeout(ctx, serverGoneTimeout)
	defer cancel()
	for {
		lock, err := lockFile(d.file("server.lock"))
		if !errors.Is(err, errLocked) {
			return lock, err
		}
		select {
		case <-time.After(pollInterval):
		case <-ctx.Done():
			pid, _ := d.postmaster()
			return nil, fmt.Errorf("wait for an earlier PostgreSQL (process %d) in %s to end: %w", pid, d.path, ctx.Err())
		}
	}
}

func (d *directory) awaitServerGone() error {
	lock, err := d.lockServer(context.Background())
	if err != nil {
		return err
	}
	return unlock(lock)
}

// sweepThrowaways deletes what test runs that panicked or were killed have left behind. What it cannot delete is no reason to
// fail a test, so it reports nothing.
func sweepThrowaways(ctx context.Context, runAs account) {
	paths, _ := filepath.Glob(filepath.Join(os.TempDir(), throwawayPrefix+"*"))
	for _, path := range paths {
		// Anybody may write into the temporary directory, so a name alone proves nothing.
		info, err := os.Lstat(path)
		if err != nil || !info.IsDir() || !runAs.owns(info) || time.Since(info.ModTime()) < throwawayMinAge {
			continue
		}
		d := &directory{path: path, runAs: runAs, throwaway: true}
		if d.take(ctx) == nil {
			_ = d.release()
		}
	}
}

// major returns the major version of the data, or 0 if there is none.
func (d *directory) major() int {
	content, _ := os.ReadFile(filepath.Join(d.data(), "PG_VERSION"))
	major, _ := strconv.Atoi(strings.TrimSpace(string(content)))
	return major
}

// initialise makes a new cluster. A crash before the rename leaves only a data.new, which the next start deletes. The rename
// fails if there is a data with something in it, so it never replaces one.
func (d *directory) initialise(ctx context.Context, b binaries, password string) error {
	unfinished, passwordFile := d.file("data.new"), d.file("password")
	if err := errors.Join(os.RemoveAll(unfinished), os.RemoveAll(passwordFile)); err != nil {
		return err
	}
	err := errors.Join(os.WriteFile(passwordFile, []byte(password+"\n"), 0o600), d.runAs.own(passwordFile))
	if err != nil {
		return err
	}
	args := []string{
		"--pgdata=" + unfinished, "--username=" + superuser, "--pwfile=" + passwordFile, "--auth=scram-sha-256",
		"--encoding=UTF8", "--locale=C", "--no-instructions",
	}
	if d.throwaway { // The new files need no fsync: what a power cut takes from a temporary directory, nobody will miss.
		args = append(args, "--no-sync")
	}
	if out, err := d.runAs.run(ctx, b.initdb(), args...); err != nil {
		return fmt.Errorf("initialise %s%s, which must be able to reach it: %w\n%s", d.path, d.runAs, err, out)
	}
	if err := os.Rename(unfinished, d.data()); err != nil {
		return err
	}
	// From here on commits are promised to last, so the name and the password under which they are found have to last too.
	return errors.Join(syncPath(passwordFile), syncPath(d.path))
}

func (d *directory) password() (string, error) {
	content, err := os.ReadFile(d.file("password"))
	return strings.TrimSpace(string(content)), err
}

// postmaster returns lines 1 and 8 of postmaster.pid: the process and its status. They are zero if there is no such file, or
// while it is not written to the end.
func (d *directory) postmaster() (pid int, status string) {
	content, _ := os.ReadFile(filepath.Join(d.data(), "postmaster.pid"))
	lines := strings.Split(string(content), "\n")
	pid, _ = strconv.Atoi(strings.TrimSpace(lines[0]))
	if len(lines) >= 8 {
		status = strings.TrimSpace(lines[7])
	}
	return pid, status
}

// forgetStranger deletes a postmaster.pid whose number now belongs to a live process that is no server of this directory, as
// happens after a reboot or in a new container: PostgreSQL would refuse to start. Any other stale file it clears by itself.
// The caller holds server.lock, so no server that we started is running.
func (d *directory) forgetStranger() error {
	if pid, _ := d.postmaster(); pid > 0 && isStranger(pid, d.data()) {
		return os.Remove(filepath.Join(d.data(), "postmaster.pid"))
	}
	return nil
}

// whyItExited returns the end of the server's log as an error.
func (d *directory) whyItExited() error {
	content, err := os.ReadFile(d.file("server.log"))
	said := strings.TrimSpace(string(content[max(0, len(content)-2000):]))
	if strings.Contains(said, "could not create any TCP/IP sockets") {
		err = errPortTaken
	}
	return errors.Join(err, fmt.Errorf("it exited: %s", said))
}

// syncPath makes a file's content, or a directory's names, survive a power cut.
func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}
