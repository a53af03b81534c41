package devdb

import (
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

// dieWithParent does nothing: macOS has no such thing. The next Start on the directory finds the server and stops it.
func dieWithParent(*syscall.SysProcAttr) {}

// isStranger says that the number is taken, and not by a postgres.
func isStranger(pid int, _ string) bool {
	name, err := exec.Command("ps", "-o", "comm=", "-p", strconv.Itoa(pid)).Output()
	return err == nil && !strings.Contains(string(name), "postgres")
}
