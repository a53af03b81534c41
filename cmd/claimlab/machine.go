package main

import (
	"bufio"
	"bytes"
	"context"
	"os"
	"path/filepath"
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

	// What others have had of the processors' time during the run; nil where it is not known.
	OthersShare *float64 `json:"processor_time_of_others_share,omitempty"`
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

// processorTime is what the machine's processors have had to give, and what they gave to anybody and to this process and those that it has
// started, its servers among them; all in the kernel's ticks since the machine was started. ok is false elsewhere than on Linux.
func processorTime() (all, busy, own int64, ok bool) {
	for i, ticks := range strings.Fields(fileField("/proc/stat", "cpu ", "cpu ")) {
		n, err := strconv.ParseInt(ticks, 10, 64)
		if err != nil || i > 7 { // user, nice, system, idle, iowait, irq, softirq, steal; guests are in user
			break
		}
		all += n
		if i != 3 && i != 4 {
			busy += n
		}
	}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil || all == 0 {
		return 0, 0, 0, false
	}
	type process struct {
		parent int
		ticks  int64 // with those of its children that have ended and that it has heard of
	}
	processes := make(map[int]process)
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil { // It has ended.
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		// After the name, which may have anything in it: state, parent and, from the twelfth on, utime, stime, cutime and cstime.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(fields) < 15 {
			continue
		}
		var p process
		p.parent, _ = strconv.Atoi(fields[1])
		for _, ticks := range fields[11:15] {
			n, _ := strconv.ParseInt(ticks, 10, 64)
			p.ticks += n
		}
		processes[pid] = p
	}
	for pid, p := range processes {
		for at := pid; at > 1; at = processes[at].parent {
			if at == os.Getpid() {
				own += p.ticks
				break
			}
		}
	}
	return all, busy, own, true
}

// watchOthers returns a function that says which share of the processors' time others have had since.
func watchOthers() func() *float64 {
	all, busy, own, ok := processorTime()
	return func() *float64 {
		allNow, busyNow, ownNow, okNow := processorTime()
		if !ok || !okNow || allNow == all {
			return nil
		}
		// What is counted a tick too late here and there is not less than nothing.
		share := max(float64((busyNow-busy)-(ownNow-own))/float64(allNow-all), 0)
		return &share
	}
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
