package devdb

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

// fetchable are the releases that the library knows by name.
var fetchable = map[int]embeddedpostgres.PostgresVersion{
	15: embeddedpostgres.V15, 16: embeddedpostgres.V16, 17: embeddedpostgres.V17, newestFetchable: embeddedpostgres.V18,
}

const (
	newestFetchable = 18
	// Two minutes for 15 MB: a slower line is better served by a package manager, which can resume.
	fetchTimeout = 2 * time.Minute
)

// fetch returns binaries of the major version that it fetched now or earlier. They are kept below the cache directory, one
// folder per release, whole or not there at all. An empty repository means the library's own.
func fetch(ctx context.Context, runAs account, major int, repository string, opts Options) (binaries, error) {
	version, ok := fetchable[major]
	if !ok {
		return binaries{}, fmt.Errorf("version %d is not on offer", major)
	}
	home, err := DefaultDir("postgresql-" + string(version))
	if err != nil {
		return binaries{}, err
	}
	if _, err := os.Stat(home); err != nil {
		opts.say("Fetching PostgreSQL %s to %s (about 15 MB, once)", version, home)
		if err := extract(ctx, version, repository, home); err != nil {
			return binaries{}, err
		}
	}
	return probe(ctx, runAs, filepath.Join(home, "bin"))
}

// extract makes the library fetch and unpack, and nothing else. The only way in is its Start, which goes on to initialise and
// start a server that nobody would stop. Before that it empties the data path, and Go refuses to remove a path that ends in a
// dot, as the operating system does. So that error is the sign that all went well; nothing was started.
func extract(ctx context.Context, version embeddedpostgres.PostgresVersion, repository, home string) error {
	if err := os.MkdirAll(filepath.Dir(home), 0o755); err != nil {
		return err
	}
	scratch, err := os.MkdirTemp(filepath.Dir(home), "fetch-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(scratch)
	unpacked, stopHere := filepath.Join(scratch, "unpacked"), filepath.Join(scratch, "no-data")+"/."
	config := embeddedpostgres.DefaultConfig().Version(version).Port(0).Logger(io.Discard).
		CachePath(filepath.Join(scratch, "archive")).RuntimePath(filepath.Join(scratch, "runtime")).
		BinariesPath(unpacked).DataPath(stopHere)
	if repository != "" {
		config = config.BinaryRepositoryURL(repository)
	}
	result := make(chan error, 1) // The library takes no context: when ours ends, it is left behind.
	go func() {
		library := embeddedpostgres.NewDatabase(config)
		err := library.Start()
		if err == nil {
			err = errors.Join(errors.New("the library started a server"), library.Stop())
		}
		result <- err
	}()
	select {
	case err = <-result:
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(fetchTimeout):
		return fmt.Errorf("not fetched within %v", fetchTimeout)
	}
	if !strings.Contains(err.Error(), stopHere) {
		return err
	}
	if err = os.Rename(unpacked, home); errors.Is(err, os.ErrExist) {
		return nil // Another process was faster, and brought the same.
	}
	return err
}
