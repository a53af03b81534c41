// Command claimlab measures what the ways to claim an idempotency key cost on this machine, and shows where each of them breaks.
//
//	go run ./cmd/claimlab                    measures all of them; under five minutes
//	go run ./cmd/claimlab break              lists what can be broken
//	go run ./cmd/claimlab break double-click breaks it, and says what that teaches
//
// It brings up a PostgreSQL and a Redis of its own, unless DATABASE_URL and REDIS_URL name others. Nothing of it is in the service's binary.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// After the first signal the second one has its usual effect, and ends the process at once.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// commands are what the program can do; kong makes the flags and the help of them.
type commands struct {
	Run     runCommand     `cmd:"" default:"withargs" help:"Measure the strategies and write the report. The default."`
	Break   breakCommand   `cmd:"" help:"Reproduce one failure, or all of them, and say what it teaches."`
	Figures figuresCommand `cmd:"" help:"Tell a report's measurements again: its verdicts, its page, and the figures of a document written around them."`
	Victim  victimCommand  `cmd:"" hidden:"" help:"Begin a payment and hang where the database should be, to be killed there."`
}

// errShown ends the program with a non-zero status when all that is to be said has been said.
var errShown = errors.New("")

// run is main without the process around it. It returns the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	exited := -1
	parser, err := kong.New(&commands{},
		kong.Name("claimlab"),
		kong.Description("What the ways to claim an idempotency key cost on this machine, and where each of them breaks."),
		kong.UsageOnError(),
		kong.Writers(stdout, stderr),
		kong.Exit(func(code int) { exited = code }),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(output{stdout, stderr}),
	)
	if err != nil {
		panic(err) // The commands above are wrong.
	}
	command, err := parser.Parse(args)
	if exited >= 0 { // -h has printed the help.
		return exited
	}
	if err == nil {
		err = command.Run()
	}
	if err != nil {
		if !errors.Is(err, errShown) {
			fmt.Fprintf(stderr, "claimlab: %s\n", strings.Join(strings.Fields(err.Error()), " "))
		}
		return 1
	}
	return 0
}

// output is where the commands speak: results to stdout, progress to stderr.
type output struct{ stdout, stderr io.Writer }
