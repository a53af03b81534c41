package main

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
)

// table is for the terminal, for Markdown and for the page.
type table struct {
	Name   string // as a document refers to it
	Title  string
	Header []string
	Rows   [][]string
	Note   string
}

// tables are the report, in the order in which one reads it.
func (r *report) tables() []table {
	return []table{r.throughputTable(), r.claimTable(), r.wholeTable(), r.fatesTable(), r.connectionsTable(), r.costTable()}
}

// each adds a row for each cell, group by group.
func (r *report) each(t *table, row func(g group, c *result) []string) {
	for _, g := range r.groups() {
		for _, c := range g.Cells {
			if cells := row(g, c); cells != nil {
				t.Rows = append(t.Rows, append([]string{g.Shape, gatewayTime(g.Gateway), c.Strategy}, cells...))
			}
		}
	}
}

func (r *report) throughputTable() table {
	t := table{
		Name: "throughput", Title: "Intents per second",
		Header: []string{"load", "gateway", "strategy", "intents/s", "lowest round", "highest round", "of the best", "double charges"},
		Note:   "The best is the best of those that are meant to be used; check_then_act and the held forms are not.",
	}
	r.each(&t, func(g group, c *result) []string {
		ofBest := "–"
		if best := g.best(); best != nil && best.PaidPerSec > 0 {
			ofBest = percent(c.PaidPerSec / best.PaidPerSec)
		}
		return []string{rate(c.PaidPerSec), rate(c.LowPerSec), rate(c.HighPerSec), ofBest, count(c.Doubled)}
	})
	return t
}

func (r *report) claimTable() table {
	t := table{
		Name: "claim", Title: "The claim alone, in milliseconds",
		Header: []string{"load", "gateway", "strategy", "winner p50", "p95", "p99", "samples", "loser p50", "p95", "p99", "samples"},
		Note:   "From the request's beginning to its call of the gateway; of a loser, to its answer. A quantile with fewer than ten samples beyond it is not shown.",
	}
	r.each(&t, func(_ group, c *result) []string {
		return append(c.ClaimWinner.cells(), c.ClaimLoser.cells()...)
	})
	return t
}

func (r *report) wholeTable() table {
	t := table{
		Name: "whole", Title: "The whole request, in milliseconds",
		Header: []string{"load", "gateway", "strategy", "p50", "p95", "p99", "samples"},
	}
	r.each(&t, func(_ group, c *result) []string { return c.Whole.cells() })
	return t
}

func (r *report) fatesTable() table {
	t := table{
		Name: "fates", Title: "The losers, and how they ended",
		Header: []string{"load", "gateway", "strategy", "losers", "of them", "how", "p50 ms", "p95", "p99", "samples"},
		Note:   "Losers are those requests that did not call the gateway themselves, as a share of all requests.",
	}
	for _, g := range r.groups() {
		for _, c := range g.Cells {
			for i, f := range c.Fates {
				row := []string{g.Shape, gatewayTime(g.Gateway), c.Strategy, percent(c.LoserShare), percent(f.Share), string(f.Fate)}
				if i > 0 {
					row = []string{"", "", "", "", percent(f.Share), string(f.Fate)}
				}
				t.Rows = append(t.Rows, append(row, f.Times.cells()...))
			}
		}
	}
	return t
}

func (r *report) connectionsTable() table {
	t := table{
		Name: "connections", Title: fmt.Sprintf("Connections, out of a pool of %d", r.Load.Pool),
		Header: []string{"load", "gateway", "strategy", "held, mean", "held, max", "held at the gateway", "idle in transaction, ms per intent", "acquires that waited", "wait p50 ms", "p95", "p99", "samples"},
		Note:   "Held at the gateway: of the requests that called it, those that held a connection then.",
	}
	r.each(&t, func(_ group, c *result) []string {
		return append([]string{
			fmt.Sprintf("%.1f", c.HeldMean), strconv.Itoa(c.HeldMax), percent(share(c.HeldAtTheGateway, c.GatewayCalls)),
			fmt.Sprintf("%.2f", c.IdleMsPerIntent), percent(c.PoolWaitShare),
		}, c.PoolWait.cells()...)
	})
	return t
}

func (r *report) costTable() table {
	t := table{
		Name: "cost", Title: "What it costs PostgreSQL and Redis",
		Header: []string{"load", "gateway", "strategy", "winner: PostgreSQL", "Redis", "loser: PostgreSQL", "Redis", "WAL per 1,000 intents", "dead tuples per 1,000 intents"},
		Note:   "Round trips are counted on the wire, on warm connections, with all that a request waits for: BEGIN and COMMIT, and what the driver does after an error. ",
	}
	if r.Versions.Settings["autovacuum"] == "off" {
		t.Note += "The log has no full-page images in it."
	} else {
		t.Note += "The server is not the lab's: what else it does, its vacuum and its checkpoints are in the log and in the dead tuples."
	}
	r.each(&t, func(_ group, c *result) []string {
		return append(append(c.WinnerTrips.cells(), c.LoserTrips.cells()...), kilobytes(c.WALPerThousand), rate(c.DeadPerThousand))
	})
	return t
}

func (q quantiles) cells() []string {
	return []string{milliseconds(q.P50), milliseconds(q.P95), milliseconds(q.P99), count(int(q.Samples))}
}

func (t *roundTrips) cells() []string {
	if t == nil {
		return []string{"–", "–"}
	}
	return []string{fmt.Sprintf("%.1f", t.PostgreSQL), fmt.Sprintf("%.1f", t.Redis)}
}

// markdown writes the table as GitHub's Markdown has it, and below it its note.
func (t table) markdown() string {
	var b strings.Builder
	line := func(cells []string) { fmt.Fprintf(&b, "| %s |\n", strings.Join(cells, " | ")) }
	line(t.Header)
	rule := make([]string, len(t.Header))
	for i := range rule {
		rule[i] = "---"
		if i > 2 {
			rule[i] = "---:"
		}
	}
	line(rule)
	for _, row := range t.Rows {
		line(row)
	}
	b.WriteString(t.noteBelow())
	return b.String()
}

func (t table) noteBelow() string {
	if t.Note == "" {
		return ""
	}
	return "\n" + t.Note + "\n"
}

// text writes the table in columns, and below it its note.
func (t table) text() string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, strings.Join(t.Header, "\t"))
	for _, row := range t.Rows {
		fmt.Fprintln(w, strings.Join(row, "\t"))
	}
	_ = w.Flush() // A strings.Builder refuses nothing.
	b.WriteString(t.noteBelow())
	return b.String()
}

// print writes the report for people.
func (r *report) print(w io.Writer, markdown bool) error {
	var b strings.Builder
	heading := func(title string) {
		if markdown {
			fmt.Fprintf(&b, "\n## %s\n\n", title)
		} else {
			fmt.Fprintf(&b, "\n%s\n\n", strings.ToUpper(title))
		}
	}
	fmt.Fprintf(&b, "%s\n", r.conditions())
	for _, t := range r.tables() {
		heading(t.Title)
		if markdown {
			b.WriteString(t.markdown())
		} else {
			b.WriteString(t.text())
		}
	}
	heading("What the run has shown")
	for _, v := range r.Verdicts {
		holds := "yes"
		if !v.Holds {
			holds = "NO"
		}
		fmt.Fprintf(&b, "- %s: %s\n", v.Claim, holds)
		for _, line := range v.Why {
			fmt.Fprintf(&b, "  - %s\n", line)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// conditions are what the figures belong to, in one paragraph.
func (r *report) conditions() string {
	how := fmt.Sprintf("%d clients in a closed loop", r.Load.Clients)
	if r.Load.Rate > 0 {
		how = fmt.Sprintf("%s requests per second in an open loop", rate(r.Load.Rate))
	}
	return fmt.Sprintf("%s, %d cores, %d GiB, %s (Linux %s), load average before the run %s, others' share of the processors during it %s. PostgreSQL %s; fsync %s, synchronous_commit %s. Redis: %s. %s, pgx %s. "+
		"%s, a pool of %d, %s of the spread intents repeated; %d rounds of %s for each cell, in an order that changes (seed %d); %s, in %.0f seconds.",
		r.Machine.CPU, r.Machine.Cores, r.Machine.MemoryGiB, r.Machine.OS, r.Machine.Kernel, r.Machine.LoadBefore, r.Machine.others(),
		r.Versions.PostgreSQL, r.Versions.Settings["fsync"], r.Versions.Settings["synchronous_commit"], r.Versions.Redis,
		r.Versions.Go, r.Versions.Modules["github.com/jackc/pgx/v5"],
		how, r.Load.Pool, percent(r.Load.Retries), r.Load.Rounds, r.Load.Slice, r.Seed, r.MadeAt.Format("2 January 2006"), r.Seconds)
}

// The figures' spellings. There is one for each kind of figure, so that the tables, the page and the document agree.

func milliseconds(ms *float64) string {
	switch {
	case ms == nil:
		return "–"
	case *ms < 10:
		return fmt.Sprintf("%.2f", *ms)
	case *ms < 100:
		return fmt.Sprintf("%.1f", *ms)
	}
	return count(int(*ms + 0.5))
}

func rate(perSecond float64) string {
	if perSecond < 100 {
		return fmt.Sprintf("%.1f", perSecond)
	}
	return count(int(perSecond + 0.5))
}

func percent(share float64) string {
	if share > 0 && share < 0.095 || share > 0.995 && share < 0.9995 {
		return fmt.Sprintf("%.1f %%", 100*share)
	}
	return fmt.Sprintf("%.0f %%", 100*share)
}

func (m machine) others() string {
	if m.OthersShare == nil {
		return "unknown"
	}
	return percent(*m.OthersShare)
}

func kilobytes(bytes float64) string { return count(int(bytes/1000+0.5)) + " kB" }

// count groups the digits in threes.
func count(n int) string {
	digits := strconv.Itoa(n)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + "," + digits[i:]
	}
	return digits
}

func gatewayTime(d time.Duration) string {
	if d == 0 {
		return "0 ms"
	}
	return count(int(d.Milliseconds())) + " ms"
}
