package chaos

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// BuildMutant builds the program of a copy of the source tree to which a patch was applied. If the patch changes a query, the queries are
// generated anew.
func BuildMutant(ctx context.Context, patch, dir, binary string) error {
	tree := filepath.Join(dir, "tree")
	for _, part := range []string{"go.mod", "go.sum", "sqlc.yaml", "cmd", "db", "internal", "tools"} {
		if err := copyTree(filepath.Join(Tree(), part), filepath.Join(tree, part)); err != nil {
			return fmt.Errorf("copy the source tree: %w", err)
		}
	}
	content, err := os.ReadFile(patch)
	if err != nil {
		return err
	}
	if err := runIn(ctx, tree, "git", "apply", patch); err != nil {
		return fmt.Errorf("%w\nThe code that the mutant changes has changed itself: make the patch anew.", err)
	}
	if strings.Contains(string(content), "+++ b/db/queries/") {
		if err := runIn(ctx, tree, "go", "tool", "-modfile=tools/go.mod", "sqlc", "generate"); err != nil {
			return err
		}
	}
	return Build(ctx, tree, binary)
}

func runIn(ctx context.Context, dir, name string, args ...string) error {
	command := exec.CommandContext(ctx, name, args...)
	command.Dir = dir
	// Not a repository, and not a part of one: git would look for the patch's files there.
	command.Env = append(os.Environ(), "GIT_CEILING_DIRECTORIES="+filepath.Dir(dir), "GOFLAGS=-buildvcs=false", "GOWORK=off")
	if said, err := command.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w\n%s", command, err, said)
	}
	return nil
}

func copyTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		relative, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, relative)
		if entry.IsDir() {
			return os.MkdirAll(target, 0o755)
		}
		content, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return err
		}
		return os.WriteFile(target, content, 0o644)
	})
}
