package main

import "syscall"

// dieWithParent leaves no child behind when a test run is killed.
func dieWithParent(attributes *syscall.SysProcAttr) { attributes.Pdeathsig = syscall.SIGKILL }
