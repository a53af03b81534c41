package devdb

import (
	"archive/zip"
	"bytes"
	"encoding/base64"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestChoose(t *testing.T) {
	t.Parallel()
	found := []binaries{{"/old", 14, 22}, {"/fifteen", 15, 9}, {"/fifteen-newer", 15, 10}, {"/newest", 17, 1}}

	t.Run("TakesTheNewest", func(t *testing.T) {
		t.Parallel()
		b, ok := choose(found, 0)
		require.True(t, ok)
		require.Equal(t, "/newest", b.dir)
	})
	t.Run("TakesTheVersionThatMadeTheData", func(t *testing.T) {
		t.Parallel()
		b, ok := choose(found, 15)
		require.True(t, ok)
		require.Equal(t, "/fifteen-newer", b.dir)
	})
	t.Run("TakesNoneThatTheServiceWasNotTriedOn", func(t *testing.T) {
		t.Parallel()
		_, ok := choose(found[:1], 0)
		require.False(t, ok)
	})
	t.Run("TakesNoneThatCannotReadTheData", func(t *testing.T) {
		t.Parallel()
		_, ok := choose(found, 16)
		require.False(t, ok)
	})
}

// TestNamedBinDir is not parallel: it changes the environment.
func TestNamedBinDir(t *testing.T) {
	runAs, err := serverAccount()
	require.NoError(t, err)
	dir := newDataDir(t)
	require.NoError(t, os.Chmod(dir, 0o755))
	t.Setenv("PG_BINDIR", dir)

	t.Run("ThatHasNoPostgreSQLIsAnErrorThatSaysHowToGetOne", func(t *testing.T) {
		_, err := findBinaries(t.Context(), runAs, 0, Options{})
		require.ErrorContains(t, err, "PG_BINDIR="+dir)
		require.ErrorContains(t, err, howToGetOne)
	})
	script := []byte("#!/bin/sh\necho 'postgres (PostgreSQL) 16.4 (Made up)'\n")
	for _, name := range []string{"postgres", "initdb"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), script, 0o755))
	}
	t.Run("GoesBeforeWhatIsInstalled", func(t *testing.T) {
		b, err := findBinaries(t.Context(), runAs, 0, Options{})
		require.NoError(t, err)
		require.Equal(t, binaries{dir, 16, 4}, b)
	})
	t.Run("HasTheOtherProgramsBesideIt", func(t *testing.T) {
		_, err := Program(t.Context(), "pgbench")
		require.ErrorContains(t, err, "apt-get install")
		require.NoError(t, os.WriteFile(filepath.Join(dir, "pgbench"), script, 0o755))
		path, err := Program(t.Context(), "pgbench")
		require.NoError(t, err)
		require.Equal(t, filepath.Join(dir, "pgbench"), path)
	})
	t.Run("OfAnotherVersionThanTheDataIsAnError", func(t *testing.T) {
		_, err := findBinaries(t.Context(), runAs, 15, Options{})
		require.ErrorContains(t, err, "it is version 16 and the data is of version 15")
	})
}

// archive is a tar.xz of bin/postgres, bin/initdb and bin/pg_ctl: scripts that say "postgres (PostgreSQL) 18.3" when asked for
// the version, and otherwise write a file "started" beside themselves.
const archive = `/Td6WFoAAAFpIt42AgAhARwAAAAQz1jM4Cf/AOhdADEaShsO1TDyWxuE7yh9tnRTrysNXAd2cvcX7qenCz6xdbye7XyzXEOo9zrw
CXnGxOuqd3bN3ZgPTxrFkOy7+NrT8lDv0sbG5PCUMoDcmtaBDnwL4yNVHqPtXaJz2F9kf88VOsqYEffcLJYc/gM4WTKOWHgwyXCp
mqPAw1MJxuZ5ei6xjbwJOqzjRtYc98UQHqj2z0WNrkUa5Ck0e5fpnVholcnJlZlgs1G3U1QhrlrkfFJEUT7y/8/TFtqazyfd6A/a
pUNaM2qQOHxXblHHWmZYE4EB9q9ROItb+KAaXLLx6ciAHqtJQAAAvaklbwABgAKAUAAA7gvAJj4wDYsCAAAAAAFZWg==`

// repository serves the archive in the layout that the library asks for.
func repository(t *testing.T) *httptest.Server {
	t.Helper()
	content, err := base64.StdEncoding.DecodeString(strings.ReplaceAll(archive, "\n", ""))
	require.NoError(t, err)
	var jar bytes.Buffer
	zipped := zip.NewWriter(&jar)
	file, err := zipped.Create("postgres.txz")
	require.NoError(t, err)
	_, err = file.Write(content)
	require.NoError(t, err)
	require.NoError(t, zipped.Close())
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !strings.HasSuffix(r.URL.Path, ".jar") {
			http.NotFound(w, r)
			return
		}
		_, _ = w.Write(jar.Bytes())
	}))
	t.Cleanup(server.Close)
	return server
}

func TestExtract(t *testing.T) {
	t.Parallel()

	t.Run("FetchesAndStartsNothing", func(t *testing.T) {
		t.Parallel()
		runAs, err := serverAccount()
		require.NoError(t, err)
		dir := newDataDir(t)
		require.NoError(t, os.Chmod(dir, 0o755))
		home := filepath.Join(dir, "postgresql")
		require.NoError(t, extract(t.Context(), fetchable[newestFetchable], repository(t).URL, home))
		b, err := probe(t.Context(), runAs, filepath.Join(home, "bin"))
		require.NoError(t, err)
		require.Equal(t, binaries{filepath.Join(home, "bin"), 18, 3}, b)
		require.NoFileExists(t, filepath.Join(home, "bin", "started"))
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Len(t, entries, 1, "the scratch directory is gone")
	})
	t.Run("LeavesNothingWhenTheRepositoryHasNone", func(t *testing.T) {
		t.Parallel()
		empty := httptest.NewServer(http.NotFoundHandler())
		t.Cleanup(empty.Close)
		dir := newDataDir(t)
		err := extract(t.Context(), fetchable[newestFetchable], empty.URL, filepath.Join(dir, "postgresql"))
		require.ErrorContains(t, err, "no version found")
		entries, err := os.ReadDir(dir)
		require.NoError(t, err)
		require.Empty(t, entries)
	})
}
