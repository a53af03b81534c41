package devdb

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
)

// dieWithParent makes the kernel send the child the signal for a fast shutdown when the thread that forked it ends.
func dieWithParent(attr *syscall.SysProcAttr) { attr.Pdeathsig = syscall.SIGINT }

// isStranger says that the number is taken, and not by a server of the data directory: those all work in it. A process that
// has exited and that nobody has collected works nowhere. One that cannot be looked at is another account's, and PostgreSQL
// disregards it as we do.
func isStranger(pid int, data string) bool {
	process := fmt.Sprintf("/proc/%d", pid)
	dir, err := os.Readlink(process + "/cwd")
	if errors.Is(err, fs.ErrNotExist) {
		_, err = os.Stat(process)
	}
	return err == nil && dir != data
}
