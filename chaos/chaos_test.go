package chaos

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
)

// binary is the program as it is.
var binary string

func TestMain(m *testing.M) {
	flag.Parse()
	// The tests wait for processes; more worlds than this at once would only wait for each other.
	_ = flag.Set("test.parallel", "3")
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "payments-chaos-test-")
	if err == nil {
		defer os.RemoveAll(dir)
		binary = filepath.Join(dir, "payments")
		err = Build(context.Background(), Tree(), binary)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

func newWorld(t *testing.T, options Options) *World {
	t.Helper()
	options.Settings, options.Log = DefaultSettings, t.Output()
	w, err := NewWorld(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(w.Close)
	return w
}

func report[T ~string](t *testing.T, violations []T) {
	t.Helper()
	for _, v := range violations[:min(len(violations), 20)] {
		t.Error(v)
	}
}

// TestService takes the service through half a minute of faults.
func TestService(t *testing.T) {
	t.Parallel()

	t.Run("KeepsItsPromisesUnderFaults", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, Options{Binary: binary, Replicas: 3, Skewed: true})
		r, err := Run(t.Context(), w, RunOptions{Seed: 1, Minutes: 0.5, Rate: 8, Gap: time.Second, Log: t.Output()})
		if err != nil {
			t.Fatal(err)
		}
		report(t, r.Violations)
		report(t, r.Slow)
		if r.Charges == 0 || r.Skewed == 0 || len(r.Recoveries) < 4 {
			t.Errorf("too little: %d charges, %d orders made by a wrong clock, %d sorts of faults", r.Charges, r.Skewed, len(r.Recoveries))
		}
	})

	t.Run("KeepsItsPromisesBehindPgBouncer", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, Options{Binary: binary, Replicas: 2, PgBouncer: true})
		r, err := Run(t.Context(), w, RunOptions{
			Seed: 1, Minutes: 0.3, Rate: 8, Log: t.Output(), Faults: []string{"kill -9", "PostgreSQL stopped fast", "pg_terminate_backend"},
		})
		if err != nil {
			t.Fatal(err)
		}
		report(t, r.Violations)
		report(t, r.Slow)
		if r.Charges == 0 {
			t.Error("nothing was charged, so nothing was shown")
		}
	})
}

// TestCells has each fault once, and the points that not every fault has.
func TestCells(t *testing.T) {
	t.Parallel()
	chosen := func(c Cell) bool {
		switch {
		case c.Refund:
			return c.Fault == "kill -9" && c.Returns
		case c.Point == charged:
			return c.Returns
		case c.Fault == "kill -9":
			return c.Point != claimed
		}
		return c.Fault == "database's answers lost" && c.Point == claiming
	}
	m, err := RunCells(t.Context(), Options{Binary: binary, Replicas: 2, Settings: DefaultSettings, Log: t.Output()}, 1, chosen, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	report(t, m.Violations)
	report(t, m.Slow)
	for _, c := range m.Cells {
		if len(c.Waits) != 1 || len(c.Left) != 1 || len(c.Endings) != 1 {
			t.Errorf("%s has not been run: %+v", c.Cell, c)
		}
	}
	if len(m.Cells) < len(Faults) {
		t.Errorf("%d cells for %d faults", len(m.Cells), len(Faults))
	}
}

func TestSchedule(t *testing.T) {
	t.Parallel()
	w := &World{database: &database{onTmpfs: true}}
	schedule := func(seed uint64) []Step { return NewSchedule(seed, 100, 3, time.Second, time.Minute, w.FaultNames()) }
	same := func(a, b []Step) bool {
		return slices.EqualFunc(a, b, func(a, b Step) bool { return a.String() == b.String() })
	}

	t.Run("IsDecidedByItsSeed", func(t *testing.T) {
		t.Parallel()
		if !same(schedule(7), schedule(7)) {
			t.Error("the same seed has two schedules")
		}
		if same(schedule(7), schedule(8)) {
			t.Error("two seeds have the same schedule")
		}
	})

	t.Run("RestsNowAndThen", func(t *testing.T) {
		t.Parallel()
		rests := 0
		for _, s := range schedule(1) {
			if s.After >= time.Minute {
				rests++
			}
		}
		if rests != 100/restEvery {
			t.Errorf("%d rests", rests)
		}
	})

	t.Run("KnowsItsFaultsByName", func(t *testing.T) {
		t.Parallel()
		if _, err := w.fault("SIGSTOP, SIGCONT"); err != nil {
			t.Error(err)
		}
		for _, r := range []struct {
			w    *World
			name string
		}{{w, "SIGSTOP"}, {&World{database: &database{}}, "disk full"}} {
			if _, err := Run(t.Context(), r.w, RunOptions{Faults: []string{r.name}}); err == nil {
				t.Errorf("%q is taken for a fault", r.name)
			}
		}
	})

	t.Run("ForgetsNoFault", func(t *testing.T) {
		t.Parallel()
		for _, name := range w.FaultNames() {
			if !slices.ContainsFunc(schedule(1), func(s Step) bool { return slices.Contains(s.Faults, name) }) {
				t.Errorf("%s does not come", name)
			}
		}
	})
}

// TestFault knows a fault that has not happened.
func TestFault(t *testing.T) {
	t.Parallel()

	t.Run("ThatWaitsInVainHasNotStruck", func(t *testing.T) {
		t.Parallel()
		w := &World{gateway: &gateway{}}
		fault, err := w.fault("kill -9 before the charge")
		if err != nil {
			t.Fatal(err)
		}
		mend, err := fault.begin(t.Context(), w, &replica{})
		if err != nil {
			t.Fatal(err)
		}
		if err := mend(); !errors.Is(err, errNobodyCame) {
			t.Errorf("mended: %v", err)
		}
	})
}

// TestHistory knows what the checker of one key's history lets pass.
func TestHistory(t *testing.T) {
	t.Parallel()
	at := func(sent, received int, c call) call {
		c.sent, c.received = time.Unix(int64(sent), 0), time.Unix(int64(received), 0)
		return c
	}
	paid := call{status: 201, resource: "p", body: []byte("paid")}
	declined := call{status: 402, slug: "payment-declined", resource: "p", body: []byte("no")}
	inFlight := call{status: 409, slug: "idempotency-in-progress", resource: "p"}
	lost := call{}
	for name, c := range map[string]struct {
		calls []call
		want  bool
	}{
		"AnswerAndItsReplay":             {[]call{at(1, 2, paid), at(3, 4, paid)}, true},
		"AnswerAfterSilence":             {[]call{at(1, 9, lost), at(2, 3, inFlight), at(4, 5, paid)}, true},
		"InProgressBesideTheAnswer":      {[]call{at(1, 5, paid), at(2, 6, inFlight)}, true},
		"TwoAnswers":                     {[]call{at(1, 2, paid), at(3, 4, declined)}, false},
		"OtherBytes":                     {[]call{at(1, 2, paid), at(3, 4, call{status: 201, resource: "p", body: []byte("paid!")})}, false},
		"OtherPayment":                   {[]call{at(1, 2, call{status: 202, resource: "q"}), at(3, 4, paid)}, false},
		"InProgressAfterTheAnswer":       {[]call{at(1, 2, paid), at(3, 4, inFlight)}, false},
		"OutcomeUnknownAfterTheAnswer":   {[]call{at(1, 2, paid), at(3, 4, call{status: 504, slug: "gateway-timeout", resource: "p"})}, false},
		"UnavailableAfterTheAnswer":      {[]call{at(1, 2, paid), at(3, 4, call{status: 503, slug: "storage-unavailable"})}, true},
		"RefusedByTheRulesAfterTheWrite": {[]call{at(1, 2, paid), at(3, 4, call{status: 409, slug: "order-not-open"})}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := &operation{calls: c.calls}
			if got := porcupine.CheckOperations(oneIntentOneOutcome, o.history()); got != c.want {
				t.Errorf("linearizable: %t", got)
			}
		})
	}
}

// TestInvariants knows that what must not be is noticed, without a service that does it.
func TestInvariants(t *testing.T) {
	t.Parallel()
	w := &World{merchantID: "m"}
	// An order that was paid, a refund of some of it, an order whose payment was declined, and one whose payment was closed.
	setup := func() (*book, []entry) {
		b, orders := &book{}, 0
		ended := func(o *operation, status int, slug string) *operation {
			o.final = &call{status: status, slug: slug, resource: o.key}
			return o
		}
		pay := func(status int, slug string) (o *operation, key string) {
			orders++
			order := ended(b.order(1000, "EUR"), 201, "")
			order.final.resource = fmt.Sprintf("o%d", orders)
			o = ended(b.payment(order, "pm_ok"), status, slug)
			return o, w.gatewayKey(o)
		}
		paid, paidKey := pay(201, "")
		_, declinedKey := pay(402, "payment-declined")
		_, failedKey := pay(402, "payment-failed")
		return b, []entry{
			{Kind: "charge", Key: paidKey, Status: "approved", Amount: 1000, Currency: "EUR"},
			{Kind: "refund", Key: w.gatewayKey(ended(b.refund(paid, 400), 201, "")), Status: "approved", Amount: 400, Currency: "EUR", ChargeKey: paidKey},
			{Kind: "charge", Key: declinedKey, Status: "declined", Amount: 1000, Currency: "EUR"},
			{Kind: "charge", Key: failedKey, Status: "canceled"},
		}
	}
	const (
		paid = iota
		refund
		declined
		failed
	)
	type ledger = []entry
	const (
		notAsked = "the gateway is asked for what the client has asked for"
		notSo    = "what a client was told is so"
	)
	for name, c := range map[string]struct {
		broken string // what a violation begins with; none at all if empty
		change func(b *book, l ledger) ledger
	}{
		"AllIsWell":     {"", func(_ *book, l ledger) ledger { return l }},
		"OtherAmount":   {notAsked, func(_ *book, l ledger) ledger { l[paid].Amount = 999; return l }},
		"OtherCurrency": {notAsked, func(_ *book, l ledger) ledger { l[paid].Currency = "USD"; return l }},
		"HalfOfARefund": {notAsked, func(_ *book, l ledger) ledger { l[refund].Amount = 200; return l }},
		"RefundOfAnotherCharge": {notAsked, func(_ *book, l ledger) ledger {
			l[refund].ChargeKey = l[declined].Key
			return l
		}},
		"TwoChargesForAnOrder": {"an order has at most one charge", func(b *book, l ledger) ledger {
			second := b.add(&operation{kind: "payment", orderID: "o1", amount: 1000, currency: "EUR"})
			return append(l, entry{Kind: "charge", Key: w.gatewayKey(second), Status: "approved", Amount: 1000, Currency: "EUR"})
		}},
		"ChargeThatNobodyAskedFor": {"every charge in the ledger is one of ours", func(_ *book, l ledger) ledger {
			return append(l, entry{Kind: "charge", Key: "k", Status: "approved", Amount: 1000, Currency: "EUR"})
		}},
		"PaidWithoutACharge":      {notSo, func(_ *book, l ledger) ledger { return l[refund:] }},
		"RefundedWithoutARefund":  {notSo, func(_ *book, l ledger) ledger { return append(l[:refund], l[declined:]...) }},
		"DeclinedWithoutADecline": {notSo, func(_ *book, l ledger) ledger { return append(l[:declined], l[failed]) }},
		"FailedWithoutACancel":    {notSo, func(_ *book, l ledger) ledger { return l[:failed] }},
		"FailedAndCharged": {notSo, func(_ *book, l ledger) ledger {
			l[failed].Status, l[failed].Amount, l[failed].Currency = "approved", 1000, "EUR"
			return l
		}},
		"MoreRefundedThanCharged": {"refunds never exceed their charge", func(_ *book, l ledger) ledger { l[paid].Amount = 300; return l }},
		"SavedByTheGatewaysLimits": {"the service never asks for more than is left of a charge", func(_ *book, l ledger) ledger {
			l[declined].DeclineCode = "amount_exceeds_charge"
			return l
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, ledger := setup()
			violations := w.checkIntents(c.change(b, ledger), b)
			if c.broken == "" {
				report(t, violations)
			} else if !slices.ContainsFunc(violations, func(v Violation) bool { return strings.HasPrefix(string(v), c.broken) }) {
				t.Errorf("not noticed: %v", violations)
			}
		})
	}

	t.Run("ClocksAreAsWrongAsTheyWereMade", func(t *testing.T) {
		t.Parallel()
		now := time.Now()
		order := func(made, clock time.Duration) *book {
			body := fmt.Appendf(nil, `{"created_at":%q}`, now.Add(made).Format(time.RFC3339Nano))
			return &book{operations: []*operation{{kind: "order", calls: []call{{status: 201, sent: now, received: now, clock: clock, body: body}}}}}
		}
		report(t, checkClocks(order(time.Hour, time.Hour)))
		report(t, checkClocks(order(0, 0)))
		if checkClocks(order(0, time.Hour)) == nil || checkClocks(order(-time.Hour, 0)) == nil {
			t.Error("not noticed that a clock is another one")
		}
	})

	t.Run("ClientsWhoWaitForTooLongAreNoticed", func(t *testing.T) {
		t.Parallel()
		start := time.Now()
		at := func(seconds float64) time.Time { return start.Add(time.Duration(seconds * float64(time.Second))) }
		waits := func(ended time.Time, windows ...window) []string {
			r := &Report{Recoveries: map[string]*Recovery{}}
			r.measure(DefaultSettings, &book{operations: []*operation{{key: "k", started: at(0), ended: ended}}}, windows)
			return r.Slow
		}
		fault := window{from: at(1), up: at(2)}
		report(t, waits(at(6), fault))
		if slow := waits(at(7), fault); len(slow) != 1 || !strings.Contains(slow[0], "final 5s after") {
			t.Errorf("after the bound: %v", slow)
		}
		if slow := waits(time.Time{}, fault); len(slow) != 1 || !strings.Contains(slow[0], "never final") {
			t.Errorf("never: %v", slow)
		}
		report(t, waits(at(7), fault, window{from: at(3), up: at(4)})) // The next fault has met it.
		if slow := waits(at(9), fault, window{from: at(3), up: at(4)}); len(slow) != 1 {
			t.Errorf("after the bound of the next fault: %v", slow)
		}
	})

	t.Run("ClientWithoutAnAnswerIsNoticed", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, Options{Binary: binary, Replicas: 1})
		b := &book{}
		o := b.order(1000, "EUR")
		o.path = "/healthz"     // Which knows no POST.
		w.Settings = Settings{} // Nobody waits for it for more than a second.
		violations, err := w.Check(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		for _, broken := range []string{"a client that comes back gets a final answer", "whoever asks gets an answer"} {
			if !slices.ContainsFunc(violations, func(v Violation) bool { return strings.HasPrefix(string(v), broken) }) {
				t.Errorf("not noticed that %s: %v", broken, violations)
			}
		}
	})

	t.Run("KeyThatStaysInProgressIsNoticed", func(t *testing.T) {
		t.Parallel()
		w := newWorld(t, Options{Binary: binary, Replicas: 1})
		b := &book{}
		order, err := w.newOrder(t.Context(), b)
		if err != nil {
			t.Fatal(err)
		}
		o := b.payment(order, "pm_ok")
		d := w.gateway.shut(0, beforeCharge, w.gatewayKey(o))
		defer d.open()
		go w.send(t.Context(), o, 0, "")
		if err := await(d.reached, "the payment is claimed"); err != nil {
			t.Fatal(err)
		}
		w.Settings = Settings{} // A second is too long now; the replica gives the gateway three.
		overdue := func() int {
			_, late, err := w.overdue(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			return len(late)
		}
		up := w.up.Load()
		w.down()
		for deadline := time.Now().Add(1200 * time.Millisecond); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
			if overdue() > 0 {
				t.Fatal("complained of while something was down")
			}
		}
		w.up.Store(up)
		if overdue() != 1 {
			t.Error("not noticed")
		}
	})
}

func TestClock(t *testing.T) {
	t.Parallel()
	t.Run("ThatCannotBeReadStopsTheProgram", func(t *testing.T) {
		t.Parallel()
		command := exec.Command(binary, "--help")
		command.Env = append(os.Environ(), "CLOCK_OFFSET=an hour")
		if said, err := command.CombinedOutput(); err == nil || !bytes.Contains(said, []byte("CLOCK_OFFSET")) {
			t.Errorf("%v: %s", err, said)
		}
	})
}

func TestReport(t *testing.T) {
	t.Parallel()
	conditions := Here("make test", "PostgreSQL 15.1")

	t.Run("SaysWhatWasMeasuredAndWhere", func(t *testing.T) {
		t.Parallel()
		r := &Report{
			Options: RunOptions{Seed: 1, Minutes: 1}, World: Options{Replicas: 2},
			Recoveries: map[string]*Recovery{"kill -9": {Times: 1, Waits: []time.Duration{time.Second}}},
		}
		text, violated := Write(r, nil, DefaultSettings, conditions)
		if violated || strings.Contains(text, "clock an hour ahead") {
			t.Error(text)
		}
		for _, part := range []string{
			"| kill -9 | 1 | 0 | 1.00 s | 1.00 s |", "`make test`", "PostgreSQL 15.1", runtime.Version()[2:], conditions.Date, " cores",
		} {
			if !strings.Contains(text, part) {
				t.Errorf("no %q in %s", part, text)
			}
		}
		r.World.Skewed = true
		if text, _ = Write(r, nil, DefaultSettings, conditions); !strings.Contains(text, "one with its clock an hour ahead,") {
			t.Error(text)
		}
		r.Violations = []Violation{"two charges"}
		if text, violated = Write(r, nil, DefaultSettings, conditions); !violated || !strings.Contains(text, "two charges") {
			t.Error(text)
		}
	})

	t.Run("FailsForWhatIsSlow", func(t *testing.T) {
		t.Parallel()
		if _, violated := Write(&Report{Slow: []string{"k"}}, nil, DefaultSettings, conditions); !violated {
			t.Error("a slow client is fine")
		}
		if _, violated := Write(nil, &Matrix{Slow: []string{"k"}}, DefaultSettings, conditions); !violated {
			t.Error("a slow cell is fine")
		}
	})
}

func TestFailover(t *testing.T) {
	t.Parallel()
	well := FailoverReport{Before: "node1", After: "node2", Led: 18 * time.Second, FirstAnswer: 19 * time.Second, Returned: 25 * time.Second}

	t.Run("NeedsAnotherLeader", func(t *testing.T) {
		t.Parallel()
		r := well
		r.judge()
		text, violated := WriteFailover(&r, Here("make test"))
		if violated || !strings.Contains(text, "| led before the kill | node1 |") || !strings.Contains(text, "| leads at the end | node2 |") {
			t.Error(text)
		}
		for name, spoil := range map[string]func(*FailoverReport){
			"the same leads":    func(r *FailoverReport) { r.After = r.Before },
			"nobody led":        func(r *FailoverReport) { r.Led = 0 },
			"no answer":         func(r *FailoverReport) { r.FirstAnswer = 0 },
			"no standby at all": func(r *FailoverReport) { r.Returned = 0 },
		} {
			r := well
			spoil(&r)
			r.judge()
			if _, violated := WriteFailover(&r, Here("make test")); !violated {
				t.Errorf("%s, and that is fine", name)
			}
		}
	})

	t.Run("FirstAnswerIsToWhatWasAskedForAfterTheKill", func(t *testing.T) {
		t.Parallel()
		killed := time.Now()
		at := func(seconds int) time.Time { return killed.Add(time.Duration(seconds) * time.Second) }
		operations := []*operation{
			{kind: "payment", started: at(-1), calls: []call{{sent: at(-1), received: at(1)}, {status: 201, sent: at(2), received: at(3)}}},
			{kind: "payment", started: at(4), calls: []call{{status: 503, sent: at(4), received: at(5)}, {status: 201, sent: at(6), received: at(7)}}},
			{kind: "payment", started: at(8), calls: []call{{status: 201, sent: at(8), received: at(9)}}},
		}
		if first := firstAnswer(operations, killed); first != 7*time.Second {
			t.Errorf("after %s", first)
		}
	})
}

// TestEvidence holds the committed pages to what they are there to show.
func TestEvidence(t *testing.T) {
	t.Parallel()
	page := func(t *testing.T, name string) string {
		t.Helper()
		content, err := os.ReadFile(filepath.Join(Tree(), "docs", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(content)
	}
	find := func(t *testing.T, text, pattern string) string {
		t.Helper()
		match := regexp.MustCompile(pattern).FindStringSubmatch(text)
		if match == nil {
			t.Fatalf("the page has nothing like %q", pattern)
		}
		return match[1]
	}

	t.Run("HalfAnHourAndTwentyThousandPayments", func(t *testing.T) {
		t.Parallel()
		text := page(t, "crash-matrix.md")
		shopped, err := time.ParseDuration(find(t, text, `, (\S+) of shopping, 3 replicas`))
		if err != nil || shopped < 30*time.Minute {
			t.Errorf("%s of shopping, %v", shopped, err)
		}
		intents, err := strconv.Atoi(find(t, text, `\| payments asked for \(keys\) \| (\d+) \|`))
		if err != nil || intents < 20_000 {
			t.Errorf("%d payments, %v", intents, err)
		}
		cells, err := strconv.Atoi(find(t, text, `(\d+) cells, each`))
		if err != nil || cells < 2*len(Faults) {
			t.Errorf("%d cells, %v", cells, err)
		}
		find(t, text, "Written by (`make chaos-report [^`]*`) on \\d{4}-\\d\\d-\\d\\d, on \\d+ cores.*PostgreSQL \\d+.*Go 1")
	})

	t.Run("NothingViolated", func(t *testing.T) {
		t.Parallel()
		for _, name := range []string{"crash-matrix.md", "failover.md"} {
			text := page(t, name)
			find(t, text, `(\| invariants that did not hold \| 0 \|)`)
			find(t, text, `(\| clients who waited for longer than the bound \| 0 \|)`)
			find(t, text, `(\| deadlocks in PostgreSQL's log \| 0 \|)`)
		}
		find(t, page(t, "crash-matrix.md"), `(Invariants that did not hold: 0\. .*: 0\.)`)
	})

	t.Run("AnotherNodeLed", func(t *testing.T) {
		t.Parallel()
		text := page(t, "failover.md")
		before, after := find(t, text, `led before the kill \| (\S+) \|`), find(t, text, `leads at the end \| (\S+) \|`)
		if before == after {
			t.Errorf("%s before and after", before)
		}
	})
}
