// Command chaos runs the service under faults and holds it against the gateway's ledger. See package chaos.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
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
	var chosen []string
	minutes := flag.Float64("minutes", 2, "how long customers shop under faults; 0 leaves them out")
	seed := flag.Uint64("seed", 1, "decides the schedule of faults and what the customers do")
	replicas := flag.Int("replicas", 3, "processes of the service, 1 to 3")
	rate := flag.Float64("rate", 12, "customers per second")
	flag.Func("fault", "name of a fault, in quotes; may be said several times; all of them if never", func(name string) error {
		if !slices.ContainsFunc(chaos.Faults, func(f chaos.Fault) bool { return f.Name == name }) {
			return errors.New("there is no such fault")
		}
		chosen = append(chosen, name)
		return nil
	})
	pgbouncer := flag.Bool("pgbouncer", false, "put a PgBouncer in transaction mode before the database")
	rounds := flag.Int("rounds", 3, "how often each cell of the matrix is run; 0 leaves the matrix out")
	failover := flag.Bool("failover", false, "run on a cluster of two servers and kill its leader, instead of everything else")
	out := flag.String("out", "", "file that the report is written to, in Markdown; standard output if empty")
	written := flag.String("written-by", "go run ./cmd/chaos", "what the report says that it was written by")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "chaos runs the service under faults and holds it against the gateway's ledger.")
		flag.PrintDefaults()
		fmt.Fprintln(flag.CommandLine.Output(), "\nThe faults:")
		for _, f := range chaos.Faults {
			fmt.Fprintln(flag.CommandLine.Output(), "  "+f.Name)
		}
	}
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
	runOptions := chaos.RunOptions{Seed: *seed, Minutes: *minutes, Rate: *rate, Faults: chosen, Log: os.Stderr}
	if *failover {
		report, err := chaos.Failover(ctx, options, runOptions)
		if err != nil {
			return false, err
		}
		complain(&report.Report)
		versions := []string{"PostgreSQL " + report.PostgreSQL, firstLine("patroni", "--version"), strings.Replace(firstLine("etcd", "--version"), "Version: ", "", 1)}
		text, violated := chaos.WriteFailover(report, chaos.Here(*written, versions...))
		return violated, write(*out, text)
	}
	var report *chaos.Report
	version := ""
	if *minutes > 0 {
		report, err = shop(ctx, options, runOptions)
		if err != nil {
			return false, fmt.Errorf("seed %d: %w", *seed, err)
		}
		version = report.PostgreSQL
		complain(report)
	}
	var matrix *chaos.Matrix
	if *rounds > 0 {
		options.Replicas, options.Skewed = 2, false
		// What the first half has shown is not lost with the second.
		matrix, err = chaos.RunCells(ctx, options, *rounds, func(c chaos.Cell) bool { return len(chosen) == 0 || slices.Contains(chosen, c.Fault) }, os.Stderr)
		version = matrix.PostgreSQL
	}
	text, violated := chaos.Write(report, matrix, options.Settings, chaos.Here(*written, "PostgreSQL "+version))
	return violated, errors.Join(err, write(*out, text))
}

func shop(ctx context.Context, options chaos.Options, run chaos.RunOptions) (*chaos.Report, error) {
	w, err := chaos.NewWorld(ctx, options)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	return chaos.Run(ctx, w, run)
}

// firstLine is what a program says of itself.
func firstLine(program string, args ...string) string {
	said, err := exec.Command(program, args...).Output()
	if err != nil {
		return program
	}
	line, _, _ := strings.Cut(string(said), "\n")
	return line
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
