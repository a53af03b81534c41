// Command chaos runs the service under faults and holds it against the gateway's ledger. See package chaos.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"example.com/payments/chaos"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	violated, err := run(ctx)
	if err != nil {
		fmt.Fprintln(os.Stderr, "chaos:", err)
		os.Exit(2)
	}
	if violated {
		os.Exit(1)
	}
}

func run(ctx context.Context) (violated bool, err error) {
	minutes := flag.Float64("minutes", 2, "how long customers shop under faults")
	seed := flag.Uint64("seed", 1, "decides the schedule of faults and what the customers do")
	replicas := flag.Int("replicas", 3, "processes of the service, 1 to 3")
	rate := flag.Float64("rate", 12, "customers per second")
	faults := flag.String("faults", "", "names of faults, separated by commas; all if empty")
	pgbouncer := flag.Bool("pgbouncer", false, "put a PgBouncer in transaction mode before the database")
	rounds := flag.Int("rounds", 3, "how often each cell of the matrix is run; 0 leaves the matrix out")
	failover := flag.Bool("failover", false, "run on a cluster of two servers and kill its leader, instead of everything else")
	out := flag.String("out", "", "file that the report is written to, in Markdown; standard output if empty")
	flag.Parse()
	if *replicas < 1 || *replicas > 3 || flag.NArg() > 0 {
		return false, fmt.Errorf("replicas must be 1 to 3, and there are no arguments: %v", flag.Args())
	}

	dir, err := os.MkdirTemp("", "payments-chaos-build-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(dir)
	binary := filepath.Join(dir, "payments")
	if err := chaos.Build(ctx, chaos.Tree(), binary); err != nil {
		return false, err
	}
	options := chaos.Options{
		Binary: binary, Replicas: *replicas, PgBouncer: *pgbouncer, Skewed: true, Settings: chaos.DefaultSettings, Log: os.Stderr,
	}
	runOptions := chaos.RunOptions{Seed: *seed, Minutes: *minutes, Rate: *rate, Log: os.Stderr}
	if *failover {
		report, err := chaos.Failover(ctx, options, runOptions)
		if err != nil {
			return false, err
		}
		complain(&report.Report)
		text, violated := chaos.WriteFailover(report, options.Settings)
		return violated, write(*out, text)
	}
	var report *chaos.Report
	if *minutes > 0 {
		w, err := chaos.NewWorld(ctx, options)
		if err != nil {
			return false, err
		}
		if *faults != "" {
			runOptions.Faults = strings.Split(*faults, ",")
		}
		report, err = chaos.Run(ctx, w, runOptions)
		w.Close()
		if err != nil {
			return false, fmt.Errorf("seed %d: %w", *seed, err)
		}
		complain(report)
	}
	var results []chaos.CellResult
	if *rounds > 0 {
		options.Replicas, options.Skewed = 2, false
		// What the first half has shown is not lost with the second.
		results, err = chaos.RunCells(ctx, options, *rounds, os.Stderr)
	}
	text, violated := chaos.Write(report, results, options.Settings)
	return violated, errors.Join(err, write(*out, text))
}

// complain says at once what the report says at length.
func complain(report *chaos.Report) {
	for _, v := range report.Violations[:min(len(report.Violations), 10)] {
		fmt.Fprintln(os.Stderr, "violated:", v)
	}
	for _, v := range report.Slow[:min(len(report.Slow), 10)] {
		fmt.Fprintln(os.Stderr, "slow:", v)
	}
}

func write(path, text string) error {
	if path == "" {
		_, err := os.Stdout.WriteString(text)
		return err
	}
	return os.WriteFile(path, []byte(text), 0o644)
}
