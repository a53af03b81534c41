package schemas

import (
	"path/filepath"
	"testing"
)

// files are those that match, and at least one.
func files(t *testing.T, pattern string) []string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil || len(found) == 0 {
		t.Fatalf("no files like %s: %v", pattern, err)
	}
	return found
}
