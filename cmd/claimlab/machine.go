package main

import (
	"bufio"
	"context"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// machine is what the figures belong to.
type machine struct {
	OS         string `json:"os"`
	Kernel     string `json:"kernel"`
	CPU        string `json:"cpu"`
	Cores      int    `json:"cores"`
	MemoryGiB  int    `json:"memory_gib"`
	LoadBefore string `json:"load_average_before"` // of 1, 5 and 15 minutes
}

// thisMachine reads what Linux tells; elsewhere the most of it stays empty.
func thisMachine() (machine, error) {
	m := machine{OS: runtime.GOOS + "/" + runtime.GOARCH, Cores: runtime.NumCPU(), LoadBefore: "unknown"}
	if name := fileField("/etc/os-release", "PRETTY_NAME=", "="); name != "" {
		m.OS = strings.Trim(name, `"`) + ", " + m.OS
	}
	m.CPU = fileField("/proc/cpuinfo", "model name", ":")
	if release, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.Kernel = strings.TrimSpace(string(release))
	}
	if kib, err := strconv.Atoi(strings.TrimSuffix(fileField("/proc/meminfo", "MemTotal", ":"), " kB")); err == nil {
		m.MemoryGiB = (kib + 1<<19) >> 20
	}
	if average, err := os.ReadFile("/proc/loadavg"); err == nil {
		m.LoadBefore = strings.Join(strings.Fields(string(average))[:3], " ")
	}
	return m, nil
}

// fileField returns what stands after the separator in the first line of a file that has the prefix.
func fileField(path, prefix, separator string) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), prefix) {
			_, value, _ := strings.Cut(lines.Text(), separator)
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// versions are of what was measured, and of what measured it.
type versions struct {
	Go         string            `json:"go"`
	PostgreSQL string            `json:"postgresql"`
	Redis      string            `json:"redis"`
	Modules    map[string]string `json:"modules"`
	Settings   map[string]string `json:"postgresql_settings"`
}

func theseVersions(ctx context.Context, l *lab) (versions, error) {
	v := versions{Go: runtime.Version(), Redis: l.redisSource, Modules: make(map[string]string), Settings: make(map[string]string)}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, module := range info.Deps {
			switch module.Path {
			case "github.com/jackc/pgx/v5", "github.com/redis/go-redis/v9", "github.com/alicebob/miniredis/v2":
				v.Modules[module.Path] = module.Version
			}
		}
	}
	rows, err := l.admin.Query(ctx, `SELECT name, current_setting(name)
FROM unnest(ARRAY['server_version', 'fsync', 'synchronous_commit', 'full_page_writes', 'shared_buffers', 'max_connections', 'autovacuum',
    'checkpoint_timeout', 'max_wal_size', 'wal_level']) AS name`)
	if err != nil {
		return v, err
	}
	var name, value string
	_, err = pgx.ForEachRow(rows, []any{&name, &value}, func() error {
		v.Settings[name] = value
		return nil
	})
	v.PostgreSQL = v.Settings["server_version"] + ", " + l.postgresSource
	delete(v.Settings, "server_version")
	return v, err
}
