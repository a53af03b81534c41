package chaos

import (
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestScenario takes the service through the scenarios that the mutants fail in.
func TestScenario(t *testing.T) {
	t.Parallel()
	for _, s := range Scenarios {
		t.Run(s.Name+"/IsComeThrough", func(t *testing.T) {
			t.Parallel()
			t.Log(s.What)
			violations, err := s.Run(t.Context(), newWorld(t, Options{Binary: binary, Replicas: 2}))
			if err != nil {
				t.Fatal(err)
			}
			report(t, violations)
		})
	}
}

// TestMutant knows that the harness can fail: each build that is wrong on purpose is caught.
func TestMutant(t *testing.T) {
	t.Parallel()
	patches, err := filepath.Glob("mutants/*.patch")
	if err != nil || len(patches) != len(Scenarios) {
		t.Fatalf("%d patches, %d scenarios, %v", len(patches), len(Scenarios), err)
	}
	for _, s := range Scenarios {
		t.Run(s.Name+"/IsCaught", func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			patch, err := filepath.Abs(filepath.Join("mutants", s.Name+".patch"))
			if err != nil {
				t.Fatal(err)
			}
			mutant := filepath.Join(dir, "payments")
			if err := BuildMutant(t.Context(), patch, dir, mutant); err != nil {
				t.Fatal(err)
			}
			violations, err := s.Run(t.Context(), newWorld(t, Options{Binary: mutant, Replicas: 2}))
			if err != nil {
				t.Fatal(err)
			}
			for _, v := range violations[:min(len(violations), 5)] {
				t.Log(v)
			}
			if !slices.ContainsFunc(violations, func(v Violation) bool { return strings.HasPrefix(string(v), s.Breaks) }) {
				t.Fatalf("not noticed that it breaks %q when %s", s.Breaks, s.What)
			}
		})
	}
}
