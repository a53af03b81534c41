//go:build !linux

package devredis

import "syscall"

// attributes: elsewhere there is no death signal. A server that was left behind keeps nothing and is found in the list of processes.
func attributes() *syscall.SysProcAttr { return nil }
