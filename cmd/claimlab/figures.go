package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// figuresCommand keeps a document and a report together. What stands between two comments comes from the report:
//
//	<!-- figure: on_conflict/spread/50ms/intents -->1,234<!-- / -->
//	<!-- table: throughput -->…<!-- / -->
//	<!-- conditions -->…<!-- / -->
//	<!-- verdicts -->…<!-- / -->
//	<!-- promises -->…<!-- / -->
//
// The words around them are a person's, who must read them again when the figures change.
//
// The measurements are the run's; what is said of them, the verdicts and the page, is the program's, and is made again with it.
type figuresCommand struct {
	Document string `arg:"" type:"path" help:"Markdown that has the comments."`
	Report   string `required:"" type:"path" help:"report.json; report.html is beside it."`
	Check    bool   `help:"Write nothing, and fail if anything would change."`
}

func (c *figuresCommand) Run(out output) error {
	r, err := readReport(c.Report)
	if err != nil {
		return err
	}
	r.judge()
	for _, file := range []struct {
		path string
		make func(before []byte) ([]byte, error)
	}{
		{c.Report, func([]byte) ([]byte, error) { return r.json() }},
		{filepath.Join(filepath.Dir(c.Report), "report.html"), func([]byte) ([]byte, error) { return r.html() }},
		{c.Document, func(before []byte) ([]byte, error) {
			after, err := r.fill(string(before))
			return []byte(after), err
		}},
	} {
		before, err := os.ReadFile(file.path)
		if err != nil {
			return err
		}
		after, err := file.make(before)
		if err != nil {
			return err
		}
		if bytes.Equal(before, after) {
			continue
		}
		if c.Check {
			return fmt.Errorf("%s does not have what %s has, as this program tells it", file.path, c.Report)
		}
		if err := os.WriteFile(file.path, after, 0o644); err != nil {
			return err
		}
	}
	return nil
}

var marked = regexp.MustCompile(`(?s)<!-- (conditions|verdicts|promises|figure: [^ ]+|table: [a-z]+) -->(.*?)<!-- / -->`)

// fill returns the document with the report's figures in it.
func (r *report) fill(document string) (string, error) {
	var errs []error
	filled := marked.ReplaceAllStringFunc(document, func(match string) string {
		name := marked.FindStringSubmatch(match)[1]
		content, err := r.content(name)
		errs = append(errs, err)
		return "<!-- " + name + " -->" + content + "<!-- / -->"
	})
	if strings.Count(filled, "<!-- ") != 2*strings.Count(filled, "<!-- / -->") {
		errs = append(errs, errors.New("a comment is not understood, or has no end"))
	}
	return filled, errors.Join(errs...)
}

func (r *report) content(name string) (string, error) {
	kind, argument, _ := strings.Cut(name, ": ")
	switch kind {
	case "conditions":
		return "\n" + r.conditions() + "\n", nil
	case "verdicts":
		var b strings.Builder
		b.WriteString("\n")
		for _, v := range r.Verdicts {
			fmt.Fprintf(&b, "- %s: **%s**\n", v.Claim, map[bool]string{true: "yes", false: "no"}[v.Holds])
			for _, line := range v.Why {
				fmt.Fprintf(&b, "  - %s\n", line)
			}
		}
		return b.String(), nil
	case "promises": // They are the strategies', whatever was measured.
		var b strings.Builder
		b.WriteString("\n")
		for _, sentence := range brokenPromises() {
			fmt.Fprintf(&b, "- %s\n", sentence)
		}
		return b.String(), nil
	case "table":
		for _, t := range r.tables() {
			if t.Name == argument {
				return "\n\n" + t.markdown() + "\n", nil
			}
		}
		return "", fmt.Errorf("there is no table %q", argument)
	}
	return r.figure(argument)
}

// figure is one figure of a cell, named strategy/shape/gateway/figure, or one of the machine.
func (r *report) figure(path string) (string, error) {
	switch path {
	case "load-before": // the average over the minute before the run
		load, _, _ := strings.Cut(r.Machine.LoadBefore, " ")
		return load, nil
	case "others":
		return r.Machine.others(), nil
	}
	parts := strings.Split(path, "/")
	if len(parts) != 4 {
		return "", fmt.Errorf("%q is not strategy/shape/gateway/figure", path)
	}
	gateway, err := time.ParseDuration(parts[2])
	if err != nil {
		return "", fmt.Errorf("%q: %w", path, err)
	}
	c := r.find(parts[0], parts[1], gateway)
	if c == nil {
		return "", fmt.Errorf("%q: there is no such cell", path)
	}
	figures := map[string]func() string{
		"intents":            func() string { return rate(c.PaidPerSec) },
		"of-best":            func() string { return percent(*c.ShareOfBest) },
		"doubled":            func() string { return count(c.Doubled) },
		"paid":               func() string { return count(c.Paid) },
		"losers":             func() string { return percent(c.LoserShare) },
		"winner-p50":         func() string { return milliseconds(c.ClaimWinner.P50) },
		"winner-p95":         func() string { return milliseconds(c.ClaimWinner.P95) },
		"winner-p99":         func() string { return milliseconds(c.ClaimWinner.P99) },
		"loser-p50":          func() string { return milliseconds(c.ClaimLoser.P50) },
		"loser-p95":          func() string { return milliseconds(c.ClaimLoser.P95) },
		"loser-p99":          func() string { return milliseconds(c.ClaimLoser.P99) },
		"whole-p50":          func() string { return milliseconds(c.Whole.P50) },
		"held-mean":          func() string { return fmt.Sprintf("%.1f", c.HeldMean) },
		"held-max":           func() string { return count(c.HeldMax) },
		"held-at-gateway":    func() string { return percent(share(c.HeldAtTheGateway, c.GatewayCalls)) },
		"pool-limit":         func() string { return rate(float64(r.Load.Pool) / c.Gateway.Seconds()) }, // of a form that holds
		"idle":               func() string { return fmt.Sprintf("%.2f", c.IdleMsPerIntent) },
		"pool-wait-p50":      func() string { return milliseconds(c.PoolWait.P50) },
		"wal":                func() string { return kilobytes(c.WALPerThousand) },
		"dead":               func() string { return rate(c.DeadPerThousand) },
		"winner-round-trips": func() string { return fmt.Sprintf("%.1f", c.WinnerTrips.PostgreSQL) },
		"winner-redis":       func() string { return fmt.Sprintf("%.1f", c.WinnerTrips.Redis) },
		"loser-round-trips":  func() string { return fmt.Sprintf("%.1f", c.LoserTrips.PostgreSQL) },
		"loser-redis":        func() string { return fmt.Sprintf("%.1f", c.LoserTrips.Redis) },
	}
	spell, ok := figures[parts[3]]
	if !ok {
		return "", fmt.Errorf("%q: there is no such figure", path)
	}
	if strings.HasSuffix(parts[3], "round-trips") || strings.HasSuffix(parts[3], "-redis") {
		if c.WinnerTrips == nil || c.LoserTrips == nil && strings.HasPrefix(parts[3], "loser") {
			return "–", nil
		}
	}
	if parts[3] == "of-best" && c.ShareOfBest == nil {
		return "–", nil
	}
	return spell(), nil
}
