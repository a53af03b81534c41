//go:build !linux && !darwin

package devdb

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

// Elsewhere nothing of this works, and Start says so when it comes to lock the directory.
func lockFile(string) (*os.File, error) {
	return nil, errors.New("a PostgreSQL can be started on Linux and macOS only; point DATABASE_URL at a running server")
}

func unlock(f *os.File) error                      { return f.Close() }
func (a account) attributes() *syscall.SysProcAttr { return nil }
func (a account) owns(fs.FileInfo) bool            { return false }
func interrupt(int)                                {}
func isStranger(int, string) bool                  { return false }
