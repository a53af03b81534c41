package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/stretchr/testify/require"

	"example.com/payments/internal/dbtest"
)

// section returns what README.md has under a heading.
func section(t *testing.T, heading string) string {
	t.Helper()
	readme, err := os.ReadFile("../../README.md")
	require.NoError(t, err, "README.md is tested, and has to be there")
	_, after, found := strings.Cut(string(readme), "\n## "+heading+"\n")
	require.True(t, found, "README.md has no section %q", heading)
	text, _, _ := strings.Cut(after, "\n## ")
	return text
}

// step is something to paste, and the lines that must be among what it prints, in this order. A … in a line stands for anything.
type step struct {
	paste string
	shows []string
}

func tour(t *testing.T) (steps []step) {
	t.Helper()
	fences := regexp.MustCompile("(?ms)^```(\\w*)\\n(.*?)^```$").FindAllStringSubmatch(section(t, "A guided tour"), -1)
	for _, fence := range fences {
		switch kind, text := fence[1], fence[2]; {
		case kind == "sh":
			steps = append(steps, step{paste: text})
		case kind == "text" && len(steps) > 0:
			last := &steps[len(steps)-1]
			require.Empty(t, last.shows, "two outputs of one step")
			last.shows = strings.Split(strings.TrimSpace(text), "\n")
		default:
			t.Fatalf("the tour has a block that is neither sh nor the text that one prints:\n%s", text)
		}
	}
	require.NotEmpty(t, steps, "the tour has no steps")
	return steps
}

func TestREADME(t *testing.T) {
	t.Parallel()

	t.Run("TourShowsWhatHappens", func(t *testing.T) {
		t.Parallel()
		steps := tour(t)
		dir, databaseURL := openDir(t), dbtest.New(t)
		settings := []string{"DATABASE_URL=" + databaseURL, "GATEWAY_LATENCY=800ms"}
		d := startDev(t, dir, settings...)

		// The reader starts dev again when the tour has killed it.
		var restarts sync.WaitGroup
		t.Cleanup(restarts.Wait)
		settings = append(settings, "LISTEN_ADDR="+strings.TrimPrefix(d.url, "http://"))
		ended := make(chan struct{})
		restarts.Go(func() {
			select {
			case <-ended:
			case <-d.exited:
				start(t, settings, "dev", "--data-dir", dir)
				<-ended
			}
		})

		var script strings.Builder
		const separator = "---- end of step ----"
		for _, step := range steps {
			script.WriteString(step.paste + "\necho; echo '" + separator + "'\n")
		}
		here := strings.ReplaceAll(script.String(), "BASE=http://localhost:8080", "BASE="+d.url)
		here = regexp.MustCompile(`(?m)^DEV=\d+`).ReplaceAllString(here, "DEV="+strconv.Itoa(d.cmd.Process.Pid))
		tool(t, "curl", "curl")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // It waits for what may never come.
		defer cancel()
		bash := exec.CommandContext(ctx, tool(t, "bash", "bash"), "-euc", here)
		bash.Dir, bash.WaitDelay = t.TempDir(), time.Second
		var stdout, stderr bytes.Buffer
		bash.Stdout, bash.Stderr = &stdout, &stderr
		err := bash.Run()
		close(ended)
		printed := strings.Split(strings.ReplaceAll(stdout.String(), "\r", ""), separator+"\n")
		require.NoError(t, err, "after %d of %d steps; it has printed:\n%s%s", len(printed)-1, len(steps), stdout.String(), stderr.String())

		for i, step := range steps {
			rest := strings.Split(printed[i], "\n")
			for _, line := range step.shows {
				pattern := regexp.MustCompile("^" + strings.ReplaceAll(regexp.QuoteMeta(strings.TrimSpace(line)), "…", ".*") + "$")
				at := slices.IndexFunc(rest, func(printed string) bool { return pattern.MatchString(strings.TrimSpace(printed)) })
				require.GreaterOrEqual(t, at, 0, "no line %q in what this has printed, or not there:\n%s\n%s", line, step.paste, printed[i])
				rest = rest[at+1:]
			}
		}
	})

	t.Run("SettingsAreThoseOfTheProgramWithTheirDefaults", func(t *testing.T) {
		t.Parallel()
		parser, err := kong.New(&commands{})
		require.NoError(t, err)
		defaults := make(map[string][]string) // of each setting; one may have different ones in different commands
		require.NoError(t, kong.Visit(parser.Model, func(node kong.Visitable, next kong.Next) error {
			if flag, ok := node.(*kong.Flag); ok {
				for _, name := range flag.Envs {
					if !slices.Contains(defaults[name], flag.Default) {
						defaults[name] = append(defaults[name], flag.Default)
					}
				}
			}
			return next(nil)
		}))
		require.NotEmpty(t, defaults)

		told := make(map[string]bool)
		for _, row := range regexp.MustCompile("(?m)^\\| *`([A-Z_]+)` *\\|([^|]*)\\|(.*)\\|$").FindAllStringSubmatch(section(t, "Settings"), -1) {
			name, first, rest := row[1], strings.Trim(row[2], " `"), row[3]
			require.False(t, told[name], "%s is told twice", name)
			told[name] = true
			require.Contains(t, defaults, name, "README.md tells of a setting that is none")
			require.Contains(t, defaults[name], first, "%s has another default", name)
			for _, other := range defaults[name] {
				require.True(t, other == first || strings.Contains(rest, "`"+other+"`"), "%s also has the default %s", name, other)
			}
		}
		for name := range defaults {
			require.True(t, told[name], "README.md does not tell of %s", name)
		}
	})
}
