package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
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

// restEvery is how many steps have one before them that comes only when every key must have ended.
const restEvery = 12

// NewSchedule draws the steps from a seed: the same seed, settings and faults, the same schedule. A gap as long as the bound leaves everybody
// the time to get the final answer between two steps, so that a client who does not is noticed; now and then there is a rest as well, so
// that a key that stays in progress is.
func NewSchedule(seed uint64, steps, replicas int, gap, rest time.Duration, faults []string) []Step {
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
			After:  (gap + time.Duration(random.IntN(1000))*time.Millisecond).Round(time.Millisecond),
			Lasts:  time.Duration(300+random.IntN(3200)) * time.Millisecond,
			Victim: random.IntN(replicas),
			Faults: []string{draw()},
		}
		if i%restEvery == restEvery-1 {
			schedule[i].After += rest
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
	// Gap is the least time between two faults; if zero, the bound. In a shorter one fewer clients are judged by the bound: those who have
	// their answer, or have waited for as long, before the next fault.
	Gap time.Duration
	Log io.Writer
}

// window is a step as it happened: from the moment it began until service, database and gateway were all up again.
type window struct {
	step     Step
	struck   []string // those of the step's faults that have happened
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
	Enders     map[string]int // who ended them: the first attempt, a client's repeat, the reaper
	Charges    int
	Recoveries map[string]*Recovery // by fault
	Deadlocks  int
	Skewed     int    // orders made by a replica whose clock was wrong
	PostgreSQL string // its version
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
	return runWith(ctx, w, options, &book{}, int(options.Minutes*float64(time.Minute)/float64(w.gap(options)))+1)
}

func (w *World) gap(options RunOptions) time.Duration {
	if options.Gap > 0 {
		return options.Gap
	}
	return w.Settings.Bound()
}

func runWith(ctx context.Context, w *World, options RunOptions, b *book, steps int) (*Report, error) {
	if len(options.Faults) == 0 {
		options.Faults = w.FaultNames()
	}
	for _, name := range options.Faults {
		if _, err := w.fault(name); err != nil {
			return nil, err
		}
	}
	started, length := time.Now(), time.Duration(options.Minutes*float64(time.Minute))
	report := &Report{Options: options, World: w.Options, Recoveries: map[string]*Recovery{}}
	report.Schedule = NewSchedule(options.Seed, steps, len(w.replicas), w.gap(options), w.Settings.Quiet(), options.Faults)
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

	watching, stopWatching := context.WithCancel(ctx)
	defer stopWatching()
	watched := make(chan []Violation, 1)
	go func() { watched <- w.watch(watching) }()

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
	stopWatching()
	report.Took = time.Since(started)
	report.Violations = <-watched
	violations, err := w.Check(ctx, b)
	if err != nil {
		return nil, err
	}
	report.Violations = append(report.Violations, violations...)
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
	w.down()
	happened := window{step: step, from: time.Now()}
	var mends []func() error
	for _, name := range step.Faults {
		fault, err := w.fault(name)
		if err != nil {
			return happened, err
		}
		mend, err := fault.begin(ctx, w, w.replicas[step.Victim])
		if err != nil {
			return happened, fmt.Errorf("begin %s: %w", name, err)
		}
		mends = append(mends, mend)
	}
	time.Sleep(step.Lasts)
	for i, mend := range slices.Backward(mends) {
		switch err := mend(); {
		case errors.Is(err, errNobodyCame):
		case err != nil:
			return happened, fmt.Errorf("mend %s: %w", step.Faults[i], err)
		default:
			happened.struck = append(happened.struck, step.Faults[i])
		}
	}
	err := w.awaitUp(ctx)
	happened.up = time.Now()
	return happened, err
}

// scripted methods are those whose own misbehaviour would be counted as the fault's.
var scripted = map[string]bool{"pm_hang_after": true, "pm_slow": true}

// measure finds out how long those clients waited whom a fault has met: from the moment everything was up to their final answer. Whom the
// next fault has met before, and before the bound, has that one to blame.
func (r *Report) measure(s Settings, b *book, windows []window) {
	for i, win := range windows {
		var met []*Recovery
		for _, name := range win.struck {
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
			wait, when := o.ended.Sub(win.up), "final "+o.ended.Sub(win.up).Round(time.Millisecond).String()+" after everything was up"
			if o.ended.IsZero() {
				wait, when = time.Duration(math.MaxInt64), "never final"
			}
			switch {
			case wait <= s.Bound():
			case i+1 < len(windows) && windows[i+1].from.Sub(win.up) <= s.Bound():
				continue
			default:
				r.Slow = append(r.Slow, fmt.Sprintf("%s, met by step %d (%s): %s: %v", o.key, i+1, win.step, when, o.calls))
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
		if o.kind == "order" && slices.ContainsFunc(o.calls, func(c call) bool { return c.status == http.StatusCreated && !c.replayed && c.clock != 0 }) {
			r.Skewed++
		}
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
	if r.Charges, err = w.gateway.approved("charge"); err != nil {
		return err
	}
	if r.Deadlocks, err = w.database.countDeadlocks(); err != nil {
		return err
	}
	r.PostgreSQL, err = w.postgreSQL(ctx)
	return err
}

func (w *World) postgreSQL(ctx context.Context) (version string, err error) {
	err = w.database.current().QueryRow(ctx, "SHOW server_version").Scan(&version)
	return version, err
}

// whoEnded tells from a key's row whose attempt has ended it: only the reaper's take-over leaves abandoned_at as it was.
const whoEnded = `CASE WHEN k.attempt = 1 THEN 'the first attempt' WHEN k.abandoned_at IS NULL THEN 'a client''s repeat' ELSE 'the reaper' END`
