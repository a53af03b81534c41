//go:build !linux

package main

import "syscall"

// dieWithParent can be had on Linux only. Elsewhere the tests' cleanups have to do.
func dieWithParent(*syscall.SysProcAttr) {}
