package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/schollz/progressbar/v3"

	"example.com/payments/internal/idempotency/strategies"
)

type runCommand struct {
	serverSettings
	Strategies  []string        `help:"Strategies to measure; all of them if none is named."`
	Shapes      []string        `default:"spread,hot" enum:"spread,hot" help:"spread: all keys different. hot: one key, sent by all clients at once."`
	Gateway     []time.Duration `default:"0s,50ms" help:"Times that the gateway takes."`
	HeldGateway time.Duration   `default:"800ms" help:"Time that the gateway takes in the cells of the held forms, and of the default beside them; 0 leaves them out."`
	Clients     int             `default:"50" help:"Clients at once; on a hot key, twins."`
	Pool        int             `default:"20" help:"Database connections."`
	Retries     float64         `default:"0" help:"Share of the spread intents that is sent a second time, after its answer."`
	Rate        float64         `default:"0" help:"Requests per second, come what may (open loop); 0 is a closed loop: each client sends when it has its answer."`
	Rounds      int             `default:"3" help:"How often each cell is measured. Every round has all cells, in an order of its own."`
	Slice       time.Duration   `default:"1800ms" help:"How long a cell is measured in a round."`
	Seed        uint64          `default:"1" help:"Of the orders of the cells."`
	Out         string          `default:"claimlab-report" type:"path" help:"Folder for report.json and report.html."`
	MD          bool            `name:"md" help:"Print the tables as Markdown."`
}

// Validate is kong's: it refuses what cannot be measured, before anything is started.
func (c *runCommand) Validate() error {
	for _, check := range []struct {
		ok       bool
		sentence string
	}{
		{c.Clients >= 1, "--clients must be at least 1"},
		{c.Pool >= 1, "--pool must be at least 1"},
		{c.Rounds >= 1, "--rounds must be at least 1"},
		{c.Slice >= 50*time.Millisecond, "--slice must be at least 50ms"},
		{c.Retries >= 0 && c.Retries <= 1, "--retries is a share, from 0 to 1"},
		{c.Rate >= 0, "--rate must not be negative"},
		{slices.IndexFunc(append(slices.Clone(c.Gateway), c.HeldGateway), func(d time.Duration) bool { return d < 0 || d > 4*time.Second }) < 0,
			"a gateway's time must be between 0 and 4s: the held forms end at 5s, with their statement timeout"},
	} {
		if !check.ok {
			return errors.New(check.sentence)
		}
	}
	for _, name := range c.Strategies {
		if _, err := strategies.KindOf(name); err != nil {
			return err
		}
	}
	return nil
}

// plan has every cell of the run. The held forms have cells of their own, where the gateway takes as long as gateways do, with the default
// beside them; elsewhere they would only repeat what these show.
func (c *runCommand) plan() []cell {
	var cells []cell
	for _, shape := range c.Shapes {
		for _, kind := range strategies.Kinds() {
			if len(c.Strategies) > 0 && !slices.Contains(c.Strategies, kind.Name) {
				continue
			}
			held := kind.Name == strategies.NameRowLockHeld || kind.Name == strategies.NameAdvisoryLockHeld
			if !held {
				for _, gateway := range c.Gateway {
					cells = append(cells, cell{kind.Name, shape, gateway})
				}
			}
			if c.HeldGateway > 0 && (held || kind.Name == strategies.NameOnConflict) && !(slices.Contains(c.Gateway, c.HeldGateway) && !held) {
				cells = append(cells, cell{kind.Name, shape, c.HeldGateway})
			}
		}
	}
	return cells
}

func (c *runCommand) load() load {
	return load{Clients: c.Clients, Pool: c.Pool, Retries: c.Retries, Rate: c.Rate, Slice: c.Slice, Rounds: c.Rounds}
}

// Run measures, writes the report and prints its tables.
func (c *runCommand) Run(ctx context.Context, out output) (err error) {
	machine, err := thisMachine() // Its load, before we are it.
	if err != nil {
		return err
	}
	l, err := openLab(ctx, c.serverSettings, out.stderr)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.close()) }()

	begin, others := time.Now(), watchOthers()
	measured, err := c.measure(ctx, l, out.stderr)
	if err != nil {
		return err
	}
	if l.ownPostgres && l.redisServer != nil { // Else the servers are among the others.
		machine.OthersShare = others()
	}
	r, err := newReport(ctx, l, machine, c, measured, begin)
	if err != nil {
		return err
	}
	if err := r.write(c.Out); err != nil {
		return err
	}
	if err := r.print(out.stdout, c.MD); err != nil {
		return err
	}
	fmt.Fprintf(out.stderr, "\nreport.json and report.html are in %s\n", c.Out)
	return nil
}

// measure gives each cell one slice in every round. A machine that becomes slower, warmer or busier as time goes by then does so for all of
// them alike.
func (c *runCommand) measure(ctx context.Context, l *lab, progress io.Writer) ([]*measurement, error) {
	cells := c.plan()
	if len(cells) == 0 {
		return nil, errors.New("there is nothing to measure: the held forms need --held-gateway")
	}
	addresses := make(map[string]string)
	measured := make([]*measurement, len(cells))
	for i, cell := range cells {
		kind, err := strategies.KindOf(cell.Strategy)
		if err != nil {
			return nil, err
		}
		measured[i] = newMeasurement(cell, kind, c.load())
		if addresses[kind.Name] == "" {
			if addresses[kind.Name], err = l.database(ctx, kind); err != nil {
				return nil, err
			}
		}
	}
	bar := progressbar.NewOptions(len(cells)*c.Rounds,
		progressbar.OptionSetWriter(progress), progressbar.OptionSetDescription("measuring"), progressbar.OptionShowCount(),
		progressbar.OptionSetPredictTime(true), progressbar.OptionFullWidth(), progressbar.OptionThrottle(100*time.Millisecond),
	)
	random := rand.New(rand.NewPCG(c.Seed, 0))
	number := 0
	for range c.Rounds {
		for _, i := range random.Perm(len(cells)) {
			number++
			bar.Describe(fmt.Sprintf("%-48s", cells[i]))
			if err := measured[i].slice(ctx, l, addresses[cells[i].Strategy], number); err != nil {
				return nil, fmt.Errorf("%s: %w", cells[i], err)
			}
			_ = bar.Add(1)
		}
	}
	fmt.Fprintln(progress)
	return measured, nil
}
