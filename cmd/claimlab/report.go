package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"example.com/payments/internal/idempotency/strategies"
)

// report is a whole run. report.json is it; everything else, the tables, the page and the document, is made from it.
type report struct {
	MadeAt   time.Time `json:"made_at"`
	Seconds  float64   `json:"seconds"`
	Machine  machine   `json:"machine"`
	Versions versions  `json:"versions"`
	Load     load      `json:"load"`
	Seed     uint64    `json:"seed"`
	Cells    []result  `json:"cells"`
	Verdicts []verdict `json:"verdicts"`
}

// result is what was measured of a cell.
type result struct {
	cell
	Rounds     []round  `json:"rounds"`
	PaidPerSec float64  `json:"intents_per_second"`
	LowPerSec  float64  `json:"intents_per_second_lowest_round"`
	HighPerSec float64  `json:"intents_per_second_highest_round"`
	Requests   int      `json:"requests"`
	Intents    int      `json:"intents"`
	Paid       int      `json:"intents_paid"`
	Doubled    int      `json:"double_charges"`
	LoserShare float64  `json:"loser_share"`
	Fates      []ending `json:"fates"`
	Failures   []string `json:"failures,omitempty"`

	ClaimWinner quantiles `json:"claim_of_winners"`
	ClaimLoser  quantiles `json:"claim_of_losers"`
	Whole       quantiles `json:"whole_request"`

	WinnerTrips *roundTrips `json:"round_trips_of_a_winner,omitempty"`
	LoserTrips  *roundTrips `json:"round_trips_of_a_loser,omitempty"`

	HeldMean         float64       `json:"connections_held_mean"`
	HeldMax          int           `json:"connections_held_max"`
	HeldAtTheGateway int           `json:"requests_that_held_a_connection_at_the_gateway"`
	GatewayCalls     int           `json:"requests_at_the_gateway"`
	Held             []connections `json:"connections_held,omitempty"`
	IdleMsPerIntent  float64       `json:"idle_in_transaction_ms_per_intent"`
	PoolWaitShare    float64       `json:"pool_acquires_that_waited_share"`
	PoolWait         quantiles     `json:"pool_acquire"`
	WALPerThousand   float64       `json:"wal_bytes_per_1000_intents"`
	DeadPerThousand  float64       `json:"dead_tuples_per_1000_intents"`
	WithinTenPerCent *bool         `json:"default_within_ten_per_cent,omitempty"` // of the best; in the default's cells
	ShareOfBest      *float64      `json:"share_of_best,omitempty"`
	BestOfItsCell    string        `json:"best_of_its_cell,omitempty"`
	GatewayMs        float64       `json:"gateway_ms"`
}

// ending is how a share of the requests has ended, and after how long.
type ending struct {
	Fate  fate      `json:"fate"`
	Share float64   `json:"share_of_losers"`
	Times quantiles `json:"times"`
}

type roundTrips struct {
	Requests   int     `json:"requests"`
	PostgreSQL float64 `json:"postgresql"`
	Redis      float64 `json:"redis"`
}

// verdict is one of the things that the lab is there to show.
type verdict struct {
	Claim string   `json:"claim"`
	Holds bool     `json:"holds"`
	Why   []string `json:"why"`
}

func newReport(ctx context.Context, l *lab, m machine, c *runCommand, measured []*measurement, begin time.Time) (*report, error) {
	v, err := theseVersions(ctx, l)
	if err != nil {
		return nil, err
	}
	r := &report{
		MadeAt: time.Now().UTC().Truncate(time.Second), Seconds: time.Since(begin).Seconds(), Machine: m, Versions: v, Load: c.load(), Seed: c.Seed,
	}
	for _, cell := range measured {
		r.Cells = append(r.Cells, cell.result())
	}
	r.judge()
	return r, nil
}

func (m *measurement) result() result {
	r := result{
		cell: m.cell, GatewayMs: float64(m.cell.Gateway) / 1e6, Rounds: m.rounds, Intents: m.intents, Paid: m.charged, Doubled: m.doubled,
		PaidPerSec:  float64(m.charged) / m.elapsed.Seconds(),
		ClaimWinner: m.claimWinner.quantiles(), ClaimLoser: m.claimLoser.quantiles(), Whole: m.whole.quantiles(), PoolWait: m.acquires.quantiles(),
		WinnerTrips: m.winners.mean(), LoserTrips: m.losers.mean(),
		HeldMean: share(m.heldSum, m.heldSamples), HeldMax: m.heldMax, HeldAtTheGateway: m.heldThere, GatewayCalls: m.calls, Held: m.series,
		PoolWaitShare:   share(int(m.emptyAcquires), int(m.acquired)),
		IdleMsPerIntent: share(int(m.idleInTransaction.Microseconds()), m.charged) / 1000,
		WALPerThousand:  1000 * share(int(m.walBytes), m.charged),
		DeadPerThousand: 1000 * share(int(m.deadTuples), m.deadIntents),
	}
	for i, round := range m.rounds {
		perSec := float64(round.Paid) / round.Seconds
		if i == 0 || perSec < r.LowPerSec {
			r.LowPerSec = perSec
		}
		r.HighPerSec = max(r.HighPerSec, perSec)
	}
	for _, n := range m.fates {
		r.Requests += n
	}
	losers := r.Requests - m.fates[fatePaid]
	r.LoserShare = share(losers, r.Requests)
	for _, f := range fates {
		if m.fates[f] > 0 {
			r.Fates = append(r.Fates, ending{f, share(m.fates[f], losers), m.fateTimes[f].quantiles()})
		}
	}
	// Five kinds of failure are enough to know what is wrong.
	r.Failures = slices.Sorted(maps.Keys(m.failures))
	r.Failures = r.Failures[:min(len(r.Failures), 5)]
	return r
}

func (t trips) mean() *roundTrips {
	if t.requests == 0 {
		return nil
	}
	return &roundTrips{t.requests, share(t.postgres, t.requests), share(t.redis, t.requests)}
}

func share(part, whole int) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

// find returns a cell's result, or nil.
func (r *report) find(strategy, shape string, gateway time.Duration) *result {
	for i := range r.Cells {
		if r.Cells[i].cell == (cell{strategy, shape, gateway}) {
			return &r.Cells[i]
		}
	}
	return nil
}

// group is what is compared with each other: the same load, all strategies.
type group struct {
	Shape   string
	Gateway time.Duration
	Cells   []*result
}

func (g group) String() string {
	if g.Shape == shapeHot {
		return "one hot key, gateway " + gatewayTime(g.Gateway)
	}
	return "all keys different, gateway " + gatewayTime(g.Gateway)
}

// groups returns the cells by load, spread before hot and quick gateways before slow ones.
func (r *report) groups() []group {
	var groups []group
	for i := range r.Cells {
		c := &r.Cells[i]
		at := slices.IndexFunc(groups, func(g group) bool { return g.Shape == c.Shape && g.Gateway == c.Gateway })
		if at < 0 {
			groups, at = append(groups, group{c.Shape, c.Gateway, nil}), len(groups)
		}
		groups[at].Cells = append(groups[at].Cells, c)
	}
	slices.SortStableFunc(groups, func(a, b group) int {
		if a.Shape != b.Shape {
			return map[string]int{shapeSpread: -1, shapeHot: 1}[a.Shape]
		}
		return int(a.Gateway - b.Gateway)
	})
	return groups
}

// usable says that the strategy is meant to be used.
func (r *result) usable() bool {
	kind, err := strategies.KindOf(r.Strategy)
	return err == nil && !kind.MeasuredOnly
}

// usable is how many of the group's strategies are meant to be used.
func (g group) usable() (n int) {
	for _, c := range g.Cells {
		if c.usable() {
			n++
		}
	}
	return n
}

// best is the quickest of those strategies that are meant to be used.
func (g group) best() *result {
	var best *result
	for _, c := range g.Cells {
		if c.usable() && (best == nil || c.PaidPerSec > best.PaidPerSec) {
			best = c
		}
	}
	return best
}

// write writes report.json and report.html.
func (r *report) write(folder string) error {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return err
	}
	for name, encode := range map[string]func() ([]byte, error){"report.json": r.json, "report.html": r.html} {
		encoded, err := encode()
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(folder, name), encoded, 0o644); err != nil {
			return err
		}
	}
	return nil
}

func (r *report) json() ([]byte, error) {
	encoded, err := json.MarshalIndent(r, "", " ")
	return append(encoded, '\n'), err
}

func readReport(path string) (*report, error) {
	encoded, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	r := new(report)
	if err := json.Unmarshal(encoded, r); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return r, nil
}
