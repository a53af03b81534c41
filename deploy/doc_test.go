// Package deploy_test holds what stands in deploy/, and the Dockerfile and compose.yaml above it, against the service they are for: the
// metrics that it has, the settings that it reads, the paths that it answers.
//
// What needs a tool beyond Go (promtool, prometheus, docker-compose, buildah) runs only with TEST_DEPLOY=1, and then fails if the tool is
// missing. Whether the files are what Grafana, Compose and Kubernetes understand is for tools/schemas to say.
package deploy_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
)

// external skips a test that needs more than Go, unless it is asked for.
func external(t *testing.T) {
	t.Helper()
	if os.Getenv("TEST_DEPLOY") == "" {
		t.Skip("it needs tools beyond Go; TEST_DEPLOY=1 runs it")
	}
}

// tool finds a program that a test needs.
func tool(t *testing.T, name, debian string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("this test needs %s: %v; install it (Debian, Ubuntu: apt-get install %s)", name, err, debian)
	}
	return path
}

// output runs a program to its end, which must be a good one, and returns what it has said.
func output(t *testing.T, cmd *exec.Cmd) string {
	t.Helper()
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s\n%s", cmd, out)
	return string(out)
}

// readYAML decodes a file into the type that the test wants of it.
func readYAML[T any](t *testing.T, path string) T {
	t.Helper()
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	var value T
	require.NoError(t, yaml.Unmarshal(raw, &value), path)
	return value
}

// settings are the environment variables that the program reads by its own account, with their defaults.
func settings(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("../cmd/payments/*.go")
	require.NoError(t, err)
	known := make(map[string]string)
	tag := regexp.MustCompile("`[^`]*env:\"([A-Z_]+)\"[^`]*`")
	byDefault := regexp.MustCompile(`default:"([^"]*)"`)
	for _, file := range files {
		source, err := os.ReadFile(file)
		require.NoError(t, err)
		for _, match := range tag.FindAllStringSubmatch(string(source), -1) {
			value := ""
			if found := byDefault.FindStringSubmatch(match[0]); found != nil {
				value = found[1]
			}
			known[match[1]] = value
		}
	}
	require.Contains(t, known, "DATABASE_URL")
	require.Equal(t, "25s", known["SHUTDOWN_TIMEOUT"])
	return known
}

// shutdownTimeout is how long a process with these settings may take to drain.
func shutdownTimeout(t *testing.T, environment map[string]string) time.Duration {
	t.Helper()
	value, ok := environment["SHUTDOWN_TIMEOUT"]
	if !ok {
		value = settings(t)["SHUTDOWN_TIMEOUT"]
	}
	timeout, err := time.ParseDuration(value)
	require.NoError(t, err)
	return timeout
}

// requireKnownSettings holds an environment against what the program reads. Beside its own settings there are the Go runtime's and
// OpenTelemetry's.
func requireKnownSettings(t *testing.T, environment map[string]string) {
	t.Helper()
	known := settings(t)
	for name := range environment {
		if regexp.MustCompile(`^(GOMEMLIMIT|GOMAXPROCS|GOGC|OTEL_[A-Z_]+)$`).MatchString(name) {
			continue
		}
		require.Contains(t, known, name)
	}
}
