//go:build linux || darwin

package devdb

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// attributes let a child run as the account, out of the reach of the terminal's Ctrl-C, and die with us where that can be had.
func (a account) attributes() *syscall.SysProcAttr {
	attr := &syscall.SysProcAttr{Setpgid: true}
	if a.name != "" {
		attr.Credential = &syscall.Credential{Uid: uint32(a.uid), Gid: uint32(a.gid)}
	}
	dieWithParent(attr)
	return attr
}

// owns says whether the file belongs to the account.
func (a account) owns(info fs.FileInfo) bool {
	stat, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(stat.Uid) == a.uid
}

// lockFile takes an exclusive lock that ends when the last copy of the file is closed, by whichever process has inherited it,
// and at the latest when those die. It returns errLocked if somebody else has it.
func lockFile(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, errLocked
		}
		return nil, &fs.PathError{Op: "lock", Path: path, Err: err}
	}
	return f, nil
}

// unlock gives a lock back for certain. Close alone would leave it to a child that was just forked and has not yet started its
// program, which closes the copies that it got.
func unlock(f *os.File) error {
	return errors.Join(syscall.Flock(int(f.Fd()), syscall.LOCK_UN), f.Close())
}

// interrupt asks a server that is not our child to stop. That it may be gone already is no error.
func interrupt(pid int) { _ = syscall.Kill(pid, syscall.SIGINT) }
