package deploy_test

import (
	"debug/elf"
	"encoding/json"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// maxImageBytes is what a node may have to fetch, and to keep.
const maxImageBytes = 25_000_000

// image is what buildah says of one.
type image struct {
	Docker struct {
		Config struct {
			User         string
			Env          []string
			Cmd          []string
			Entrypoint   []string
			ExposedPorts map[string]any
			Healthcheck  struct {
				Test              []string
				Interval, Timeout time.Duration
				Retries           int
			}
			Labels map[string]string
		} `json:"config"`
	}
}

// buildah without an engine, a kernel's favours or a registry.
func buildah(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(tool(t, "buildah", "buildah"), args...)
	cmd.Env = append(os.Environ(), "BUILDAH_ISOLATION=chroot", "STORAGE_DRIVER=vfs")
	return cmd
}

func TestImage(t *testing.T) {
	external(t)
	const name = "localhost/payments:test"
	require.Zero(t, os.Geteuid(), "buildah with chroot isolation needs root")
	tool(t, "busybox", "busybox-static")
	build := exec.Command("./image/build", name)
	build.Env = append(os.Environ(), "STORAGE_DRIVER=vfs", "VERSION=1.2.3", "REVISION=abc")
	output(t, build)

	var built image
	inspected, err := buildah(t, "inspect", "--type", "image", name).Output()
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(inspected, &built))
	from, err := buildah(t, "from", "--pull-never", name).Output()
	require.NoError(t, err)
	container := strings.TrimSpace(string(from))
	t.Cleanup(func() { output(t, buildah(t, "rm", container)) })
	root := strings.TrimSpace(output(t, buildah(t, "mount", container)))

	t.Run("SaysHowItIsRun", func(t *testing.T) {
		config := built.Docker.Config
		user, group, _ := strings.Cut(config.User, ":")
		for _, id := range []string{user, group} {
			number, err := strconv.Atoi(id)
			require.NoError(t, err, "a number can be seen not to be root")
			require.NotZero(t, number)
		}
		require.Equal(t, []string{"/payments"}, config.Entrypoint)
		require.Equal(t, []string{"serve"}, config.Cmd)
		require.Equal(t, []string{"CMD", "/payments", "health"}, config.Healthcheck.Test)
		require.Contains(t, config.ExposedPorts, "8080/tcp")
		require.NotContains(t, config.ExposedPorts, "9090/tcp", "the admin port is nobody's business")
		for _, label := range []string{"title", "description", "source", "licenses", "version", "revision"} {
			require.NotEmpty(t, config.Labels["org.opencontainers.image."+label], label)
		}
		require.Equal(t, "1.2.3", config.Labels["org.opencontainers.image.version"])
		require.Equal(t, "abc", config.Labels["org.opencontainers.image.revision"])
		known := settings(t)
		for _, variable := range config.Env {
			if setting, _, _ := strings.Cut(variable, "="); setting != "PATH" {
				require.Contains(t, known, setting)
			}
		}
	})

	t.Run("HoldsOneStaticProgramAndTheCertificates", func(t *testing.T) {
		var files []string
		var size int64
		require.NoError(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			info, err := entry.Info()
			size += info.Size()
			files = append(files, strings.TrimPrefix(path, root))
			require.Zero(t, info.Mode()&(fs.ModeSetuid|fs.ModeSetgid), path)
			return err
		}))
		require.Equal(t, []string{"/etc/ssl/certs/ca-certificates.crt", "/payments"}, files)
		t.Logf("%d bytes unpacked", size)
		require.Less(t, size, int64(maxImageBytes))

		program, err := elf.Open(filepath.Join(root, "payments"))
		require.NoError(t, err)
		defer program.Close()
		libraries, err := program.ImportedLibraries()
		require.NoError(t, err)
		require.Empty(t, libraries)
		for _, segment := range program.Progs {
			require.NotEqual(t, elf.PT_INTERP, segment.Type, "it needs no loader")
		}
		info, err := os.Stat(filepath.Join(root, "data"))
		require.NoError(t, err)
		require.EqualValues(t, 65532, info.Sys().(*syscall.Stat_t).Uid, "the gateway's volume gets its owner from here")
	})

	t.Run("RunsAsBuildahRunsIt", func(t *testing.T) {
		require.Equal(t, "1.2.3\n", output(t, buildah(t, "run", container, "--", "/payments", "version")))
		require.Contains(t, output(t, buildah(t, "run", container, "--", "/payments", "-h")), "Usage: payments")
	})

	t.Run("ServesOnAReadOnlyRootFileSystem", func(t *testing.T) {
		unshare := tool(t, "unshare", "util-linux")
		s := newStack(t)
		s.run(t, "migrate", "migrate", "up")
		// As an orchestrator does it: nothing can be written, and nobody is root.
		inside := func(name string, args ...string) *exec.Cmd {
			cmd := exec.Command(unshare, append([]string{"--mount", "--propagation", "private", "sh", "-euc",
				`mount --bind "$0" "$0"; mount -o remount,bind,ro "$0"; exec chroot --userspec=65532:65532 "$0" /payments "$@"`, root}, args...)...)
			cmd.Env = append(s.environment(t, name), "PATH="+os.Getenv("PATH"))
			return cmd
		}
		require.ErrorContains(t, inside("payments-1", "health").Run(), "exit status 1")
		stop := startProcess(t, inside("payments-1", "serve"))
		await(t, s.url("payments-1", "/readyz"))
		output(t, inside("payments-1", "health"))
		response, err := http.Get(s.url("payments-1", "/docs"))
		require.NoError(t, err)
		defer response.Body.Close()
		require.Equal(t, http.StatusOK, response.StatusCode, "what it shows is in the program")
		require.NoError(t, stop())
	})
}
