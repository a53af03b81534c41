package chaos

import (
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Conditions are what a page was measured with and on.
type Conditions struct {
	Command  string // that writes the page
	Date     string
	Machine  string
	Versions []string
}

// Here are the conditions of this moment and this machine.
func Here(command string, versions ...string) Conditions {
	c := Conditions{Command: command, Date: time.Now().UTC().Format(time.DateOnly)}
	c.Machine = fmt.Sprintf("%d cores", runtime.NumCPU())
	if model := fileField("/proc/cpuinfo", "model name", ":"); model != "" {
		c.Machine += " of " + model
	}
	if kib, err := strconv.Atoi(strings.TrimSuffix(fileField("/proc/meminfo", "MemTotal", ":"), " kB")); err == nil {
		c.Machine += fmt.Sprintf(", %d GiB", (kib+1<<19)>>20)
	}
	c.Versions = append([]string{strings.Trim(fileField("/etc/os-release", "PRETTY_NAME=", "="), `"`)}, versions...)
	if kernel, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		c.Versions = append(c.Versions, "Linux "+strings.TrimSpace(string(kernel)))
	}
	c.Versions = append(c.Versions, strings.Replace(runtime.Version(), "go", "Go ", 1))
	return c
}

func (c Conditions) String() string {
	return fmt.Sprintf("Written by `%s` on %s, on %s: %s.", c.Command, c.Date, c.Machine, strings.Join(c.Versions, ", "))
}

// fileField returns what stands after the separator in the first line of a file that has the prefix.
func fileField(path, prefix, separator string) string {
	content, _ := os.ReadFile(path) // What is not there has no such line.
	for line := range strings.Lines(string(content)) {
		if strings.HasPrefix(line, prefix) {
			_, value, _ := strings.Cut(line, separator)
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// Write puts what was measured into Markdown, and says whether anything was violated.
func Write(run *Report, cells *Matrix, s Settings, c Conditions) (text string, violated bool) {
	var b strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	say("# The crash matrix\n")
	say("%s\n", c)
	say("What fails is in [chaos/faults.go](../chaos/faults.go), what must hold all the same in [chaos/invariants.go](../chaos/invariants.go). Charges")
	say("and refunds are counted in the gateway's own ledger, and held against what the clients asked for.\n")
	say("Settings: `LEASE_TTL` %s, `GATEWAY_TIMEOUT` %s, `REAP_INTERVAL` %s, `REAP_AFTER` %s, gateway latency %s; a client repeats every %s. So the",
		s.LeaseTTL, s.GatewayTimeout, s.ReapInterval, s.ReapAfter, s.Latency, s.Repeat)
	say("bound on a client's wait, from the moment service, database and gateway are all up, is `LEASE_TTL` + the repeat's interval + two gateway")
	say("latencies + 1 s = **%s**. A key that nobody comes back for is final after `GATEWAY_TIMEOUT` + `LEASE_TTL` + `REAP_AFTER` + six rounds of the", s.Bound())
	say("reaper + 1 s = **%s**.\n", s.Quiet())
	if run != nil {
		violated = writeRun(say, "Mixed faults", run) || violated
	}
	if cells != nil {
		violated = writeCells(say, cells) || violated
	}
	return b.String(), violated
}

// WriteFailover is [Write] for a failover.
func WriteFailover(r *FailoverReport, c Conditions) (text string, violated bool) {
	var b strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	say("# A failover\n")
	say("%s\n", c)
	say("Two PostgreSQL servers, one of them a synchronous standby, under Patroni with etcd (`ttl` 20 s, `loop_wait` 2 s, `synchronous_mode`). The")
	say("leader's server and its Patroni are killed with -9 while customers shop; the replicas name both servers in `DATABASE_URL`, with")
	say("`target_session_attrs=read-write`. The dead node is started again once the other one leads.\n")
	say("| | |\n|---|---|")
	say("| led before the kill | %s |", r.Before)
	say("| leads at the end | %s |", r.After)
	say("| from the kill until another node answered as the primary | %s |", orNever(r.Led))
	say("| from the kill to the first 201 for a payment that was first asked for after it | **%s** |", orNever(r.FirstAnswer))
	say("| from the kill until the dead node was the synchronous standby | %s |\n", orNever(r.Returned))
	say("Acknowledged payments lost, charges made twice, and other invariants that did not hold: **%d**.\n", len(r.Violations))
	violated = writeRun(say, "The customers", &r.Report)
	return b.String(), violated
}

func orNever(d time.Duration) string {
	if d == 0 {
		return "never"
	}
	return seconds(d)
}

func writeRun(say func(string, ...any), title string, r *Report) (violated bool) {
	say("## %s\n", title)
	between := ""
	if r.World.PgBouncer {
		between = ", PgBouncer in transaction mode"
	}
	clocks := ""
	switch {
	case !r.World.Skewed || r.World.Replicas < 2:
	case r.World.Replicas == 2:
		clocks = ", one with its clock an hour ahead"
	default:
		clocks = ", one with its clock an hour ahead and one an hour behind"
	}
	struck := 0
	for _, recovery := range r.Recoveries {
		struck += recovery.Times
	}
	say("Seed %d, %s of shopping, %d replicas%s%s, %g customers per second; a fault, or two at once, struck %d times, counted singly.\n",
		r.Options.Seed, time.Duration(r.Options.Minutes*float64(time.Minute)), r.World.Replicas, clocks, between, r.Options.Rate, struck)
	say("| | |\n|---|---|")
	say("| payments asked for (keys) | %d |", r.Operations["payment"])
	say("| refunds asked for (keys) | %d |", r.Operations["refund"])
	say("| orders, cancels | %d, %d |", r.Operations["order"], r.Operations["cancel"])
	say("| requests sent | %d |", r.Calls)
	for _, name := range slices.Sorted(maps.Keys(r.Endings)) {
		say("| %s | %d |", name, r.Endings[name])
	}
	say("| orders made by a clock that is wrong | %d |", r.Skewed)
	say("| approved charges in the gateway's ledger | %d |", r.Charges)
	for _, name := range slices.Sorted(maps.Keys(r.Enders)) {
		say("| ended by %s | %d |", name, r.Enders[name])
	}
	say("| deadlocks in PostgreSQL's log | %d |", r.Deadlocks)
	say("| clients who waited for longer than the bound | %d |", len(r.Slow))
	say("| invariants that did not hold | %d |", len(r.Violations))
	say("\nHow long those clients waited who had no answer when the fault was mended, alone or together with another:\n")
	say("| fault | times | clients | median | max |\n|---|--:|--:|--:|--:|")
	for _, name := range slices.Sorted(maps.Keys(r.Recoveries)) {
		recovery := r.Recoveries[name]
		say("| %s | %d | %d | %s | %s |", name, recovery.Times, recovery.Waiting, seconds(recovery.Median()), seconds(recovery.Max()))
	}
	say("")
	list(say, "Invariants that did not hold", r.Violations)
	list(say, "Clients who waited for longer than the bound", r.Slow)
	return len(r.Violations)+len(r.Slow) > 0 // A deadlock is a violation.
}

func writeCells(say func(string, ...any), m *Matrix) (violated bool) {
	say("## One fault, one payment\n")
	say("%d cells, each %s. The fault strikes when the payment is at the point, around the replica that takes it; some strike at a refund as well.", len(m.Cells), times(m.Rounds))
	say("It is mended after half a second, or, if it shows only when it outlasts a lease, a second after the lease has ended. A client that returns")
	say("waits for its answer for a second, hangs up, and then repeats its request until it has the final one; of a client that is gone, it is the")
	say("payment that ends. Time counts from the moment everything is up; 0 means that the end was there before. A payment that nobody comes back")
	say("for and that the gateway has never seen is kept for its client for `REAP_AFTER`, and then closed. \"What was left\" is key, payment and what")
	say("the ledger has more than before the cell, all at one moment: a tenth of a second after the blow, or, where the database is down by then,")
	say("once it could be asked, when clients and reaper may have been at work again.\n")
	say("| fault | at | client | what was left | ended by | the end | median | max |\n|---|---|---|---|---|---|--:|--:|")
	for _, c := range m.Cells {
		recovery := Recovery{Waits: c.Waits}
		say("| %s | %s | %s | %s | %s | %s | %s | %s |", c.Fault, c.at(), c.client(), counted(c.Left), counted(c.Enders), counted(c.Endings),
			seconds(recovery.Median()), seconds(recovery.Max()))
	}
	say("\nInvariants that did not hold: %d. Cells in which a client, or a payment that is left alone, waited for longer than it may: %d.\n", len(m.Violations), len(m.Slow))
	list(say, "Invariants that did not hold", m.Violations)
	list(say, "Longer than the bound", m.Slow)
	return len(m.Violations)+len(m.Slow) > 0
}

func times(n int) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

func list[T ~string](say func(string, ...any), title string, lines []T) {
	if len(lines) == 0 {
		return
	}
	say("%s:\n", title)
	for _, line := range lines[:min(len(lines), 50)] {
		say("- %s", strings.ReplaceAll(string(line), "\n", " "))
	}
	say("")
}

func counted(counts map[string]int) string {
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		if len(counts) == 1 {
			return what
		}
		parts = append(parts, fmt.Sprintf("%d× %s", counts[what], what))
	}
	return strings.Join(parts, "; ")
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.2f s", max(d, 0).Seconds()) }
