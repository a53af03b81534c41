package chaos

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"
)

// Step is one fault of a schedule.
type Step struct {
	After  time.Duration // since the step before it was mended
	Lasts  time.Duration
	Victim int
	Faults []string // most often one
}

func (s Step) String() string {
	return fmt.Sprintf("after %s, for %s, replica %d: %s", s.After, s.Lasts, s.Victim+1, strings.Join(s.Faults, " and "))
}

// NewSchedule draws the steps from a seed: the same seed, settings and faults, the same schedule. Between two steps there is time for
// everybody to get the final answer, so that a client who does not is noticed.
func NewSchedule(seed uint64, steps, replicas int, bound time.Duration, faults []string) []Step {
	random := rand.New(rand.NewPCG(seed, 0x5c4ed))
	schedule := make([]Step, steps)
	var deck []string // shuffled and dealt to its end, so that no fault is forgotten
	draw := func() string {
		if len(deck) == 0 {
			deck = slices.Clone(faults)
			random.Shuffle(len(deck), func(i, j int) { deck[i], deck[j] = deck[j], deck[i] })
		}
		last := deck[len(deck)-1]
		deck = deck[:len(deck)-1]
		return last
	}
	for i := range schedule {
		schedule[i] = Step{
			After:  (bound + time.Duration(random.IntN(1000))*time.Millisecond).Round(time.Millisecond),
			Lasts:  time.Duration(300+random.IntN(3200)) * time.Millisecond,
			Victim: random.IntN(replicas),
			Faults: []string{draw()},
		}
		if random.IntN(5) == 0 {
			if second := draw(); !slices.Contains(schedule[i].Faults, second) && compatible(second, schedule[i].Faults[0]) {
				schedule[i].Faults = append(schedule[i].Faults, second)
			}
		}
	}
	return schedule
}

// compatible faults do not mend each other: they fail in different places. One has to be led to its point, and wants everything else to work.
func compatible(a, b string) bool {
	return place(a) != place(b) && !slices.Contains([]string{a, b}, "kill -9 after the reaper's cancel")
}

func place(fault string) string {
	for _, p := range []string{"gateway", "PostgreSQL", "database"} {
		if strings.HasPrefix(fault, p) {
			return strings.Replace(p, "PostgreSQL", "database", 1)
		}
	}
	switch fault {
	case "pg_terminate_backend", "max_connections exhausted", "disk full", "session time zone Pacific/Kiritimati":
		return "database"
	}
	return "replica"
}

// RunOptions are what a run under faults is made of.
type RunOptions struct {
	Seed    uint64
	Minutes float64
	Rate    float64  // customers per second
	Faults  []string // names; all that the world can have if empty
	Log     io.Writer
}

// window is a step as it happened: from the moment it began until service, database and gateway were all up again.
type window struct {
	step     Step
	from, up time.Time
}

// Report is what a run has shown.
type Report struct {
	Options    RunOptions
	World      Options
	Schedule   []Step
	Took       time.Duration
	Operations map[string]int // by kind
	Calls      int
	Endings    map[string]int // how payments and refunds ended, by status
	Enders     map[string]int // who ended those that were not ended by their first attempt
	Charges    int
	Recoveries map[string]*Recovery // by fault
	Deadlocks  int
	Violations []Violation
	Slow       []string // clients who waited for longer than the bound
}

// Recovery is how clients fared whom a fault had met.
type Recovery struct {
	Times   int             // how often the fault happened
	Waits   []time.Duration // from everything being up to the final answer
	Waiting int             // whoever had no answer when it was mended
}

// Median and Max are of the waits; zero if there were none.
func (r *Recovery) Median() time.Duration {
	if len(r.Waits) == 0 {
		return 0
	}
	slices.Sort(r.Waits)
	return r.Waits[len(r.Waits)/2]
}

func (r *Recovery) Max() time.Duration {
	if len(r.Waits) == 0 {
		return 0
	}
	return slices.Max(r.Waits)
}

// FaultNames lists the faults that the world can have.
func (w *World) FaultNames() (names []string) {
	for _, f := range Faults {
		if f.needs == nil || f.needs(w) {
			names = append(names, f.Name)
		}
	}
	return names
}

// Run lets customers shop while the schedule's faults happen, and then holds everything against the ledger.
func Run(ctx context.Context, w *World, options RunOptions) (*Report, error) {
	// More steps than fit into the time: the run ends with its time, not with its schedule.
	return runWith(ctx, w, options, &book{}, int(options.Minutes*float64(time.Minute)/float64(w.Settings.Bound()))+1)
}

func runWith(ctx context.Context, w *World, options RunOptions, b *book, steps int) (*Report, error) {
	if len(options.Faults) == 0 {
		options.Faults = w.FaultNames()
	}
	started, length := time.Now(), time.Duration(options.Minutes*float64(time.Minute))
	report := &Report{Options: options, World: w.Options, Recoveries: map[string]*Recovery{}}
	report.Schedule = NewSchedule(options.Seed, steps, len(w.replicas), w.Settings.Bound(), options.Faults)
	fmt.Fprintf(options.Log, "seed %d, %s, %d replicas, %g customers per second\n", options.Seed, length, len(w.replicas), options.Rate)
	for i, step := range report.Schedule {
		fmt.Fprintf(options.Log, "  %3d. %s\n", i+1, step)
	}

	w.book = b
	shopping, stopShopping := context.WithTimeout(ctx, length)
	defer stopShopping()
	// Customers who are in the middle of it when the time is over go on until they have their answer, or the bound has passed twice.
	customers, sendHome := context.WithCancel(ctx)
	defer sendHome()
	var inside sync.WaitGroup
	var doorman sync.WaitGroup
	doorman.Go(func() {
		ticker := time.NewTicker(time.Duration(float64(time.Second) / options.Rate))
		defer ticker.Stop()
		for n := 0; ; n++ {
			select {
			case <-shopping.Done():
				return
			case <-ticker.C:
				inside.Go(func() { w.shop(customers, b, options.Seed, n) })
			}
		}
	})

	var windows []window
	for _, step := range report.Schedule {
		if !sleep(shopping, step.After) {
			break
		}
		happened, err := w.step(ctx, step)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", step, err)
		}
		windows = append(windows, happened)
		fmt.Fprintf(options.Log, "%8s  %s (up after %s)\n", time.Since(started).Round(time.Second), step, happened.up.Sub(happened.from).Round(time.Millisecond))
	}
	<-shopping.Done()
	doorman.Wait()
	gone := make(chan struct{})
	go func() { inside.Wait(); close(gone) }()
	select {
	case <-gone:
	case <-time.After(w.Settings.Quiet() + 2*w.Settings.Bound()):
		sendHome()
		<-gone
	}
	report.Took = time.Since(started)
	violations, err := w.Check(ctx, b)
	if err != nil {
		return nil, err
	}
	report.Violations = violations
	report.measure(w.Settings, b, windows)
	return report, report.count(ctx, w, b)
}

func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// step begins the faults of a step, waits, mends them in the other order, and waits until everything is up.
func (w *World) step(ctx context.Context, step Step) (window, error) {
	happened := window{step: step, from: time.Now()}
	var mends []func() error
	for _, name := range step.Faults {
		mend, err := w.fault(name).begin(ctx, w, w.replicas[step.Victim])
		if err != nil {
			return happened, fmt.Errorf("begin %s: %w", name, err)
		}
		mends = append(mends, mend)
	}
	time.Sleep(step.Lasts)
	for i, mend := range slices.Backward(mends) {
		if err := mend(); err != nil {
			return happened, fmt.Errorf("mend %s: %w", step.Faults[i], err)
		}
	}
	err := w.awaitUp(ctx)
	happened.up = time.Now()
	return happened, err
}

// scripted methods are those whose own misbehaviour would be counted as the fault's.
var scripted = map[string]bool{"pm_hang_after": true, "pm_slow": true}

// measure finds out how long those clients waited whom a fault has met: from the moment everything was up to their final answer.
func (r *Report) measure(s Settings, b *book, windows []window) {
	for i, win := range windows {
		var met []*Recovery
		for _, name := range win.step.Faults {
			if r.Recoveries[name] == nil {
				r.Recoveries[name] = &Recovery{}
			}
			r.Recoveries[name].Times++
			met = append(met, r.Recoveries[name])
		}
		for _, o := range b.operations {
			if o.leaves || scripted[o.scripts] || o.started.IsZero() || o.started.After(win.up) || !o.ended.IsZero() && o.ended.Before(win.up) {
				continue
			}
			// Who waits for an order that another key is paying waits for that payment's customer, not for us.
			if o.refused != "" {
				continue
			}
			wait := o.ended.Sub(win.up)
			if o.ended.IsZero() || wait > s.Bound() {
				r.Slow = append(r.Slow, fmt.Sprintf("%s, met by step %d (%s): final %s after everything was up: %v", o.key, i+1, win.step, wait.Round(time.Millisecond), o.calls))
			}
			for _, recovery := range met {
				recovery.Waiting++
				if !o.ended.IsZero() {
					recovery.Waits = append(recovery.Waits, wait)
				}
			}
		}
	}
}

func (r *Report) count(ctx context.Context, w *World, b *book) error {
	r.Operations, r.Endings, r.Enders = map[string]int{}, map[string]int{}, map[string]int{}
	for _, o := range b.operations {
		r.Operations[o.kind]++
		r.Calls += len(o.calls)
	}
	rows, err := w.database.current().Query(ctx, `
		SELECT 'payment ' || status, count(*) FROM payments GROUP BY status
		UNION ALL SELECT 'refund ' || status, count(*) FROM refunds GROUP BY status
		UNION ALL SELECT 'by ' || `+whoEnded+`, count(*) FROM idempotency_keys k WHERE lease_id IS NOT NULL AND state <> 'in_progress' GROUP BY 1`)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var name string
		var n int
		if err := rows.Scan(&name, &n); err != nil {
			return err
		}
		if who, ok := strings.CutPrefix(name, "by "); ok {
			r.Enders[who] += n
		} else {
			r.Endings[name] += n
		}
	}
	if err := rows.Err(); err != nil {
		return err
	}
	charges, err := w.gateway.ledger(ctx, "charges")
	for _, c := range charges {
		if c.Status == "approved" {
			r.Charges++
		}
	}
	if err != nil {
		return err
	}
	r.Deadlocks, err = w.database.countDeadlocks()
	return err
}

// whoEnded tells from a key's row whose attempt has ended it: only the reaper's take-over leaves abandoned_at as it was.
const whoEnded = `CASE WHEN k.attempt = 1 THEN 'the first attempt' WHEN k.abandoned_at IS NULL THEN 'a client''s repeat' ELSE 'the reaper' END`
