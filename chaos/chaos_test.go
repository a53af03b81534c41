package chaos

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
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

func report(t *testing.T, violations []Violation) {
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
		r, err := Run(t.Context(), w, RunOptions{Seed: 1, Minutes: 0.5, Rate: 8, Log: t.Output()})
		if err != nil {
			t.Fatal(err)
		}
		report(t, r.Violations)
		if r.Charges == 0 {
			t.Error("nothing was charged, so nothing was shown")
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
		if r.Charges == 0 {
			t.Error("nothing was charged, so nothing was shown")
		}
	})
}

func TestSchedule(t *testing.T) {
	t.Parallel()
	w := &World{database: &database{onTmpfs: true}}
	schedule := func(seed uint64) []Step { return NewSchedule(seed, 100, 3, time.Second, w.FaultNames()) }
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

	t.Run("ForgetsNoFault", func(t *testing.T) {
		t.Parallel()
		for _, name := range w.FaultNames() {
			if !slices.ContainsFunc(schedule(1), func(s Step) bool { return slices.Contains(s.Faults, name) }) {
				t.Errorf("%s does not come", name)
			}
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

func TestReport(t *testing.T) {
	t.Parallel()
	r := &Report{Options: RunOptions{Seed: 1, Minutes: 1}, Recoveries: map[string]*Recovery{"kill -9": {Times: 1, Waits: []time.Duration{time.Second}}}}
	text, violated := Write(r, nil, DefaultSettings)
	if violated || !strings.Contains(text, "| kill -9 | 1 | 0 | 1.00 s | 1.00 s |") {
		t.Error(text)
	}
	r.Violations = []Violation{"two charges"}
	text, violated = Write(r, nil, DefaultSettings)
	if !violated || !bytes.Contains([]byte(text), []byte("two charges")) {
		t.Error(text)
	}
}

func TestFailover(t *testing.T) {
	t.Parallel()
	well := FailoverReport{Before: "node1", After: "node2", Led: 18 * time.Second, FirstAnswer: 19 * time.Second, Returned: 25 * time.Second}

	t.Run("NeedsAnotherLeader", func(t *testing.T) {
		t.Parallel()
		r := well
		r.judge()
		text, violated := WriteFailover(&r, DefaultSettings)
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
			if _, violated := WriteFailover(&r, DefaultSettings); !violated {
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
