package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/google/uuid"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
)

// keyCommand answers support's two questions. Nothing in it can charge.
type keyCommand struct {
	Show    keyShowCommand    `cmd:"" help:"Tell where a key stands, here and at the gateway. It changes nothing."`
	Resolve keyResolveCommand `cmd:"" help:"Do the reaper's step for a stale key now. It never charges."`
}

// keySettings name a key.
type keySettings struct {
	serviceSettings
	Merchant uuid.UUID `arg:"" help:"The merchant's id."`
	Key      string    `arg:"" help:"The idempotency key, bare or in quotes."`
}

func (s keySettings) with(ctx context.Context, command func(*payments.Service, idempotency.Key) error) error {
	key, err := idempotency.ParseKey([]string{s.Key})
	if err != nil {
		return err
	}
	return s.serviceSettings.with(ctx, func(service *payments.Service) error { return command(service, key) })
}

type keyShowCommand struct{ keySettings }

func (c *keyShowCommand) Run(ctx context.Context, stdout io.Writer) error {
	return c.with(ctx, func(service *payments.Service, key idempotency.Key) error {
		report, err := service.KeyReport(ctx, c.Merchant, key)
		if err != nil {
			return err
		}
		record := report.Record
		table := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
		row := func(name, format string, args ...any) { fmt.Fprintf(table, name+"\t"+format+"\n", args...) }
		row("state", "%s", standing(record))
		row("route", "%s", record.Route)
		row("path", "%s", record.ResourcePath)
		row("attempt", "%d, by %s", record.Attempt, record.Holder)
		row("started", "%s, %s ago", record.StartedAt.Format(time.RFC3339), time.Since(record.StartedAt).Round(time.Second))
		if report.Resource != "" {
			row("here", "%s", report.Resource)
			row("gateway", "%s, for %s at %s", report.Gateway, report.GatewayKey, c.GatewayURL)
		}
		if err := table.Flush(); err != nil || !report.Contradicted {
			return err
		}
		return fmt.Errorf("%s contradicts what is recorded: is it the gateway that this database's payments were made at? If it is, this is money; see docs/operations.md", c.GatewayURL)
	})
}

// standing is the state of a key in the words that support uses.
func standing(record idempotency.Record) string {
	switch {
	case record.Expired:
		return string(record.State) + ", answer expired"
	case record.Final():
		return string(record.State)
	case record.Stale() && record.OutcomeUncertain:
		return "in_progress, stale: nobody is at work on it, and money may have moved"
	case record.Stale():
		return "in_progress, stale: nobody is at work on it, and nothing was charged"
	}
	return fmt.Sprintf("in_progress, held for %s more", record.LeaseLeft.Round(time.Millisecond))
}

type keyResolveCommand struct{ keySettings }

func (c *keyResolveCommand) Run(ctx context.Context, stdout io.Writer) error {
	return c.with(ctx, func(service *payments.Service, key idempotency.Key) error {
		ending, err := payments.NewReaper(service).RunKey(ctx, c.Merchant, key)
		if errors.Is(err, payments.ErrNotFound) {
			return errors.New("the key is not stale: it was never used, is final, or somebody is at work on it; see payments key show")
		}
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(stdout, ending)
		return err
	})
}
