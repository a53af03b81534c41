package devdb

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
)

// 15 is the oldest release that the service's statements were tried on.
const oldestMajor = 15

const howToGetOne = "install PostgreSQL (Debian, Ubuntu: apt-get install postgresql; macOS: brew install postgresql@17), or " +
	"name the directory of its binaries in PG_BINDIR, or point DATABASE_URL at a running server"

// binaries is a directory in which postgres runs and has initdb beside it.
type binaries struct {
	dir          string
	major, minor int
}

func (b binaries) postgres() string { return filepath.Join(b.dir, "postgres") }
func (b binaries) initdb() string   { return filepath.Join(b.dir, "initdb") }
func (b binaries) String() string {
	return fmt.Sprintf("PostgreSQL %d.%d from %s", b.major, b.minor, b.dir)
}

// findBinaries returns $PG_BINDIR, or else the newest that is installed, or as the last resort fetches some. The major version
// of existing data, if not zero, must be met: no other can read it.
func findBinaries(ctx context.Context, runAs account, major int, opts Options) (binaries, error) {
	if dir := os.Getenv("PG_BINDIR"); dir != "" {
		b, err := probe(ctx, runAs, dir)
		if err == nil && major != 0 && b.major != major {
			err = fmt.Errorf("it is version %d and the data is of version %d", b.major, major)
		}
		if err != nil {
			return b, fmt.Errorf("PG_BINDIR=%s: %w; unset it, or %s", dir, err, howToGetOne)
		}
		return b, nil
	}
	var found []binaries
	for _, dir := range installedDirs() {
		if b, err := probe(ctx, runAs, dir); err == nil {
			found = append(found, b)
		}
	}
	if b, ok := choose(found, major); ok {
		return b, nil
	}
	b, err := fetch(ctx, runAs, cmp.Or(major, newestFetchable), "", opts)
	if err != nil {
		wanted := fmt.Sprintf("%d or newer", oldestMajor)
		if major != 0 {
			wanted = fmt.Sprintf("%d, which made the data,", major)
		}
		return b, fmt.Errorf("no PostgreSQL %s is installed (found: %v), and none could be fetched: %w; %s", wanted, found, err, howToGetOne)
	}
	return b, nil
}

// choose returns the newest, of the major version if that is not zero.
func choose(found []binaries, major int) (best binaries, ok bool) {
	for _, b := range found {
		fits := b.major == major || major == 0 && b.major >= oldestMajor
		if fits && cmp.Or(cmp.Compare(b.major, best.major), cmp.Compare(b.minor, best.minor)) > 0 {
			best, ok = b, true
		}
	}
	return best, ok
}

// installedDirs lists where packages put the binaries, most of them off the PATH.
func installedDirs() []string {
	var dirs []string
	if path, err := exec.LookPath("postgres"); err == nil {
		// A link on the PATH says nothing about what lies beside its target.
		if path, err = filepath.EvalSymlinks(path); err == nil {
			dirs = append(dirs, filepath.Dir(path))
		}
	}
	for _, pattern := range []string{
		"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/usr/libexec/postgresql*",
		"/opt/homebrew/opt/postgresql@*/bin", "/usr/local/opt/postgresql@*/bin",
		"/Applications/Postgres.app/Contents/Versions/*/bin",
	} {
		matches, _ := filepath.Glob(pattern)
		dirs = append(dirs, matches...)
	}
	slices.Sort(dirs)
	return slices.Compact(dirs)
}

var versionPattern = regexp.MustCompile(`\(PostgreSQL\) (\d+)(?:\.(\d+))?`)

// probe runs the postgres of a directory as the account that will run the server: root may reach more than that account does.
func probe(ctx context.Context, runAs account, dir string) (binaries, error) {
	b := binaries{dir: dir}
	if _, err := os.Stat(b.initdb()); err != nil {
		return b, err
	}
	out, err := runAs.run(ctx, b.postgres(), "--version")
	if err != nil {
		return b, fmt.Errorf("run postgres --version: %w: %s", err, out)
	}
	version := versionPattern.FindStringSubmatch(out)
	if version == nil {
		return b, errors.New("its postgres is not PostgreSQL's: " + out)
	}
	b.major, _ = strconv.Atoi(version[1])
	b.minor, _ = strconv.Atoi(version[2]) // 0 for a beta, which has none.
	return b, nil
}

// Program returns the path of another of PostgreSQL's programs, such as pgbench, from beside the binaries that [Start] would choose. The
// error says how to get it: what is fetched has the server alone.
func Program(ctx context.Context, name string) (string, error) {
	runAs, err := serverAccount()
	if err != nil {
		return "", err
	}
	b, err := findBinaries(ctx, runAs, 0, Options{})
	if err != nil {
		return "", err
	}
	path := filepath.Join(b.dir, name)
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("%s has no %s beside it; install it (Debian, Ubuntu: apt-get install postgresql)", b, name)
	}
	return path, nil
}
