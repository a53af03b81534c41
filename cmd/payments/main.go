// Command payments is a reference payment service: an order is paid once, whatever is repeated and whatever fails.
//
// `payments dev` brings up everything on a fresh machine. In production, `payments migrate up` and then `payments serve`, as many
// of them as needed on one database.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"

	"example.com/payments/db"
	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// After the first signal the second one has its usual effect, and ends the process at once.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// commands are what the program can do; kong makes the flags, the help and the environment variables of them.
type commands struct {
	Dev      devCommand      `cmd:"" help:"Run everything on this machine: a PostgreSQL, a simulated gateway, the service and a demo merchant."`
	Serve    serveCommand    `cmd:"" help:"Run the service. It does not migrate."`
	Gateway  gatewayCommand  `cmd:"" help:"Run the simulated gateway."`
	Migrate  migrateCommand  `cmd:"" help:"Bring the database's schema up, down, or tell its version."`
	Merchant merchantCommand `cmd:"" help:"Manage merchants."`
	APIKey   apiKeyCommand   `cmd:"" name:"apikey" help:"Manage a merchant's API keys."`
	Key      keyCommand      `cmd:"" help:"Look at one idempotency key, or end it if it is stale."`
	Reap     reapCommand     `cmd:"" help:"End the stale payments once, as serve does all the time."`
	Purge    purgeCommand    `cmd:"" help:"Strip the answers whose retention has passed, as serve does all the time."`
	Health   healthCommand   `cmd:"" help:"Ask the service on this machine whether it is alive."`
	Version  versionCommand  `cmd:"" help:"Print the version."`
}

// run is main without the process around it. It returns the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	exited := -1
	parser, err := kong.New(&commands{},
		kong.Name("payments"),
		kong.Description("A reference payment service: an order is paid once, whatever is repeated and whatever fails."),
		kong.UsageOnError(),
		kong.Writers(stdout, stderr),
		kong.Exit(func(code int) { exited = code }),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.BindTo(stdout, (*io.Writer)(nil)),
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
		fmt.Fprintf(stderr, "payments: %s\n", oneLine(err))
		return 1
	}
	return 0
}

// oneLine keeps an error that joins several on one line each, and everything else on one.
func oneLine(err error) string {
	if broken, ok := errors.AsType[faultsError](err); ok {
		return strings.Join(broken, "\npayments: ")
	}
	return strings.Join(strings.Fields(err.Error()), " ")
}

// faultsError is a start that was refused for its settings.
type faultsError faults

func (f faultsError) Error() string { return strings.Join(f, "; ") }

func (f faults) err() error {
	if len(f) == 0 {
		return nil
	}
	return faultsError(f)
}

type migrateCommand struct {
	Up      migrateUpCommand      `cmd:"" help:"Apply all migrations that are missing."`
	Down    migrateDownCommand    `cmd:"" help:"Take migrations back, and with them the data of their tables."`
	Version migrateVersionCommand `cmd:"" help:"Print the schema's version."`
}

type migrateUpCommand struct{ databaseSettings }

func (c *migrateUpCommand) Run(ctx context.Context) error {
	var f faults
	if c.check(&f); f.err() != nil {
		return f.err()
	}
	return db.Up(ctx, string(c.DatabaseURL))
}

type migrateDownCommand struct {
	databaseSettings
	Steps int `default:"1" help:"How many migrations to take back."`
}

func (c *migrateDownCommand) Run(ctx context.Context) error {
	var f faults
	c.check(&f)
	f.check(c.Steps >= 1, "steps (%d) must be at least 1", c.Steps)
	if f.err() != nil {
		return f.err()
	}
	return db.Down(ctx, string(c.DatabaseURL), c.Steps)
}

type migrateVersionCommand struct{ databaseSettings }

func (c *migrateVersionCommand) Run(ctx context.Context, stdout io.Writer) error {
	return withPool(ctx, c.databaseSettings, func(pool *postgres.Pool) error {
		version, err := db.Status(ctx, pool)
		if err != nil {
			return err
		}
		dirty := ""
		if version.Dirty {
			dirty = " (dirty)"
		}
		_, err = fmt.Fprintf(stdout, "%d%s\n", version.Number, dirty)
		return err
	})
}

type reapCommand struct {
	serviceSettings
	Once bool `required:"" help:"Look at every stale payment once, then end."`
}

func (c *reapCommand) Run(ctx context.Context, stdout io.Writer) error {
	return c.with(ctx, func(service *payments.Service) error {
		endings, err := payments.NewReaper(service).RunAll(ctx)
		fmt.Fprintf(stdout, "recorded %d, canceled %d, left alone %d, unclear %d, overtaken %d\n",
			endings[payments.ReapRecorded], endings[payments.ReapCanceled], endings[payments.ReapLeftAlone],
			endings[payments.ReapUnclear], endings[payments.ReapOvertaken])
		return err
	})
}

type purgeCommand struct {
	databaseSettings
	logSettings
	Once bool `required:"" help:"Strip everything that is due, then end."`
}

func (c *purgeCommand) Run(ctx context.Context, stdout io.Writer) error {
	return withPool(ctx, c.databaseSettings, func(pool *postgres.Pool) error {
		purged, err := idempotency.NewPurger(pool, c.logger()).Drain(ctx)
		fmt.Fprintf(stdout, "purged %d\n", purged)
		return err
	})
}

// withPool runs a command that needs the database and nothing else.
func withPool(ctx context.Context, settings databaseSettings, command func(*postgres.Pool) error) error {
	var f faults
	if settings.check(&f); f.err() != nil {
		return f.err()
	}
	pool, err := postgres.Open(ctx, string(settings.DatabaseURL), postgres.Options{MaxConns: settings.DBMaxConns, AcquireTimeout: settings.DBAcquireTimeout})
	if err != nil {
		return err
	}
	defer pool.Close()
	return command(pool)
}

type versionCommand struct{}

func (versionCommand) Run(stdout io.Writer) error {
	_, err := fmt.Fprintln(stdout, version())
	return err
}

// release is stamped into what is built for a release (-ldflags "-X main.release=1.2.3"), where there is no repository to ask.
var release string

// version is the release's, or else the one that the toolchain has stamped into the binary.
func version() string {
	if release != "" {
		return release
	}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "unknown"
	}
	for _, setting := range info.Settings {
		if setting.Key == "vcs.revision" {
			return info.Main.Version + " " + setting.Value
		}
	}
	return info.Main.Version
}
