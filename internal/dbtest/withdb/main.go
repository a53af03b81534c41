// Command withdb runs a command beside a throw-away PostgreSQL whose one database is migrated and empty, with DATABASE_URL set:
//
//	go run ./internal/dbtest/withdb psql
//
// The server is stopped and deleted when the command ends, and the command's status is withdb's.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"example.com/payments/db"
	"example.com/payments/internal/devdb"
)

func main() {
	status, err := run()
	if err != nil {
		fmt.Fprintln(os.Stderr, "withdb:", err)
	}
	os.Exit(status)
}

func run() (status int, err error) {
	if len(os.Args) < 2 {
		return 2, errors.New("name the command to run")
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	server, err := devdb.Start(ctx, devdb.Options{Throwaway: true, Log: os.Stderr})
	if err != nil {
		return 1, err
	}
	defer func() { err = errors.Join(err, server.Stop()) }()
	if err := server.CreateDatabase(ctx, "payments"); err != nil {
		return 1, err
	}
	address := server.URL("payments")
	if err := db.Up(ctx, address); err != nil {
		return 1, err
	}

	command := exec.CommandContext(ctx, os.Args[1], os.Args[2:]...)
	command.Env = append(os.Environ(), "DATABASE_URL="+address)
	command.Stdin, command.Stdout, command.Stderr = os.Stdin, os.Stdout, os.Stderr
	err = command.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return exit.ExitCode(), nil
	}
	if err != nil {
		return 1, err
	}
	return 0, nil
}
