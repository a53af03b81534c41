package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"example.com/payments/internal/idempotency/strategies"
	"example.com/payments/internal/postgres"
)

func TestMain(m *testing.M) {
	if os.Getenv(victimEnv) != "" { // This is the process that a test wants to kill.
		os.Exit(run(context.Background(), os.Args[1:], os.Stdout, os.Stderr))
	}
	os.Exit(m.Run())
}

// command runs the program and returns what it has printed.
func command(t testing.TB, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	status = run(t.Context(), args, &out, &errs)
	return status, out.String(), errs.String()
}

// TestRun measures little, for a short time: what is asserted holds at any speed.
func TestRun(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	status, stdout, stderr := command(t, "--strategies", "on_conflict,check_then_act,redis_set_nx,row_lock_held", "--gateway", "20ms", "--held-gateway", "100ms",
		"--clients", "12", "--pool", "4", "--rounds", "1", "--slice", "300ms", "--retries", "0.3", "--md", "--out", dir)
	require.Zero(t, status, stderr)

	encoded, err := os.ReadFile(filepath.Join(dir, "report.json"))
	require.NoError(t, err)
	var r report
	require.NoError(t, json.Unmarshal(encoded, &r))
	cellOf := func(strategy, shape string, gateway time.Duration) result {
		c := r.find(strategy, shape, gateway)
		require.NotNil(t, c, "%s %s %s", strategy, shape, gateway)
		require.Empty(t, c.Failures)
		require.Positive(t, c.Paid)
		return *c
	}

	t.Run("CheckThenActChargesTwiceAndNothingElseDoes", func(t *testing.T) {
		for _, c := range r.Cells {
			if c.Strategy == strategies.NameCheckThenAct && c.Shape == shapeHot {
				require.Positive(t, c.Doubled)
			} else if c.Strategy != strategies.NameCheckThenAct {
				require.Zero(t, c.Doubled, c.cell.String())
			}
		}
	})

	t.Run("TheHeldFormDrainsThePoolAndTheDefaultHoldsNothingAtTheGateway", func(t *testing.T) {
		held := cellOf(strategies.NameRowLockHeld, shapeSpread, 100*time.Millisecond)
		require.Equal(t, 4, held.HeldMax)
		require.Equal(t, held.GatewayCalls, held.HeldAtTheGateway)
		require.GreaterOrEqual(t, held.IdleMsPerIntent, 100.0)
		own := cellOf(strategies.NameOnConflict, shapeSpread, 100*time.Millisecond)
		require.Zero(t, own.HeldAtTheGateway)
		require.Zero(t, own.IdleMsPerIntent)
	})

	t.Run("RoundTripsAreCounted", func(t *testing.T) {
		own := cellOf(strategies.NameOnConflict, shapeSpread, 20*time.Millisecond)
		require.NotNil(t, own.WinnerTrips)
		require.EqualValues(t, 2, own.WinnerTrips.PostgreSQL)
		require.Zero(t, own.WinnerTrips.Redis)
		require.EqualValues(t, 2, own.LoserTrips.PostgreSQL)
		redis := cellOf(strategies.NameRedisSetNX, shapeSpread, 20*time.Millisecond)
		require.EqualValues(t, 2, redis.WinnerTrips.PostgreSQL)
		require.InDelta(t, 3, redis.WinnerTrips.Redis, 0.2) // A script that Redis does not have yet is sent twice.
		require.Zero(t, redis.LoserTrips.PostgreSQL)
	})

	t.Run("RetriesAreReplays", func(t *testing.T) {
		own := cellOf(strategies.NameOnConflict, shapeSpread, 20*time.Millisecond)
		require.Len(t, own.Fates, 1)
		require.Equal(t, fateReplayed, own.Fates[0].Fate)
		require.Equal(t, own.Requests-own.Paid, int(own.Fates[0].Times.Samples))
	})

	t.Run("EveryIntentIsWrittenAndLeavesItsTraces", func(t *testing.T) {
		for _, c := range r.Cells {
			require.Greater(t, c.WALPerThousand, 100_000.0, c.cell.String())
			require.Positive(t, c.DeadPerThousand, c.cell.String())
		}
	})

	t.Run("NoQuantileHasFewerThanTenSamplesBeyondIt", func(t *testing.T) {
		for _, c := range r.Cells {
			for _, q := range []quantiles{c.ClaimWinner, c.ClaimLoser, c.Whole, c.PoolWait} {
				require.Equal(t, q.Samples >= 20, q.P50 != nil)
				require.Equal(t, q.Samples >= 200, q.P95 != nil)
				require.Equal(t, q.Samples >= 1000, q.P99 != nil)
			}
		}
	})

	t.Run("TheTablesAreMarkdownAndNameTheRedis", func(t *testing.T) {
		require.Contains(t, stdout, "| load | gateway | strategy | intents/s |")
		require.Contains(t, stdout, r.Versions.Redis)
		if runtime.GOOS == "linux" && os.Getenv("DATABASE_URL") == "" && os.Getenv("REDIS_URL") == "" {
			require.NotNil(t, r.Machine.OthersShare)
			require.Less(t, *r.Machine.OthersShare, 1.0)
			require.Contains(t, stdout, "others' share of the processors during it "+percent(*r.Machine.OthersShare))
		}
		require.Contains(t, stdout, "PostgreSQL "+r.Versions.PostgreSQL)
	})

	t.Run("ThePageStandsAlone", func(t *testing.T) {
		page, err := os.ReadFile(filepath.Join(dir, "report.html"))
		require.NoError(t, err)
		require.Equal(t, 3, strings.Count(string(page), "<svg role=\"img\""))
		require.Equal(t, 3, strings.Count(string(page), "<figcaption>"))
		for _, outside := range []string{"<script", "<link", "src=", "href=", "url(", "@import"} {
			require.NotContains(t, string(page), outside)
		}
	})
}

// A loser by violation is charged for what the driver does about its error, which no query's trace shows.
func TestTracerCountsTheExchangesOnTheWire(t *testing.T) {
	t.Parallel()
	shared := openLabFor(t)
	address, err := shared.database(t.Context(), strategies.Kinds()[0])
	require.NoError(t, err)
	traced := newTracer()
	db, err := postgres.Open(t.Context(), address, postgres.Options{MaxConns: 1, AcquireTimeout: 20 * time.Second, Tracer: traced})
	require.NoError(t, err)
	t.Cleanup(db.Close)
	const insert = "INSERT INTO claims (key) VALUES ($1)"
	_, err = db.Exec(t.Context(), "CREATE TABLE claims (key text PRIMARY KEY); INSERT INTO claims VALUES ('key')")
	require.NoError(t, err)
	require.NoError(t, db.BeginFunc(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Prepare(ctx, "claim", insert)
		return err
	}))

	for _, loser := range []struct {
		name  string
		claim []any
		says  string // why it has lost
		wire  int    // exchanges, with the read that follows
	}{
		{"OnConflict", []any{insert + " ON CONFLICT DO NOTHING", "key"}, "", 2},
		{"AViolationOfACachedStatement", []any{insert + " RETURNING key", "key"}, "23505", 4},
		{"AViolationOfACachedDescription", []any{insert + " RETURNING 1", pgx.QueryExecModeCacheDescribe, "key"}, "23505", 3},
		{"AViolationOfAStatementPreparedByName", []any{"claim", "key"}, "23505", 2},
	} {
		t.Run(loser.name, func(t *testing.T) {
			lose := func() int {
				counted := &trace{}
				ctx := withTrace(t.Context(), counted)
				_, err := db.Exec(ctx, loser.claim[0].(string), loser.claim[1:]...)
				if loser.says == "" {
					require.NoError(t, err)
				} else {
					require.ErrorContains(t, err, loser.says)
				}
				_, err = db.Exec(ctx, "SELECT FROM claims WHERE key = $1", "key")
				require.NoError(t, err)
				require.Zero(t, counted.held)
				return counted.postgres
			}
			lose() // The first prepares the statements.
			for range 3 {
				require.Equal(t, loser.wire, lose())
			}
		})
	}
}

func TestVerdicts(t *testing.T) {
	t.Parallel()
	ms := func(v float64) *float64 { return &v }
	at := func(strategy, shape string, gateway time.Duration, low, mean, high float64) result {
		return result{cell: cell{strategy, shape, gateway}, GatewayMs: float64(gateway.Milliseconds()), LowPerSec: low, PaidPerSec: mean, HighPerSec: high}
	}
	held := func(calls, kept int, wait *float64) *verdict {
		c := at(strategies.NameRowLockHeld, shapeSpread, 800*time.Millisecond, 22, 22, 22)
		c.HeldMax, c.GatewayCalls, c.HeldAtTheGateway, c.PoolWait.P50 = 20, calls, kept, wait
		return (&report{Load: load{Pool: 20}, Cells: []result{c}}).heldFormsDrainThePool()
	}
	best := func(own, other result) (bool, string) {
		v := (&report{Cells: []result{own, other}}).defaultIsAmongTheBest()
		require.Len(t, v.Why, 1)
		return v.Holds, v.Why[0]
	}

	t.Run("APoolThatIsOutForAMomentIsNotDrained", func(t *testing.T) {
		t.Parallel()
		require.True(t, held(270, 270, ms(828)).Holds)
		require.False(t, held(270, 0, ms(828)).Holds)
		require.False(t, held(270, 269, ms(828)).Holds)
		require.False(t, held(270, 270, ms(14)).Holds)
		require.False(t, held(270, 270, nil).Holds)
		require.False(t, held(0, 0, ms(828)).Holds)
	})

	t.Run("WithNothingUsableBesideItTheDefaultIsNotTheBest", func(t *testing.T) {
		t.Parallel()
		holds, why := best(at(strategies.NameOnConflict, shapeHot, 0, 1, 1, 1), at(strategies.NameRowLockHeld, shapeHot, 0, 1, 1, 1))
		require.True(t, holds)
		require.Equal(t, "one hot key, gateway 0 ms: 1.0 intents per second; no other usable strategy is measured here.", why)
	})

	t.Run("RoundsThatOverlapAreNoDifference", func(t *testing.T) {
		t.Parallel()
		redis := at(strategies.NameRedisSetNX, shapeSpread, 0, 975, 1096, 1222)
		holds, why := best(at(strategies.NameOnConflict, shapeSpread, 0, 915, 977, 1084), redis)
		require.True(t, holds)
		require.Contains(t, why, "their rounds overlap (915 to 1,084 against 975 to 1,222)")
		holds, why = best(at(strategies.NameOnConflict, shapeSpread, 0, 915, 950, 974), redis)
		require.False(t, holds)
		require.Contains(t, why, ": not so: 87 % of the best")
	})

	t.Run("WhatTheBestDoesMoreOfIsNoReason", func(t *testing.T) {
		t.Parallel()
		own, redis := at(strategies.NameOnConflict, shapeHot, 0, 49, 49, 49), at(strategies.NameRedisSetNX, shapeHot, 0, 150, 150, 150)
		own.WinnerTrips, redis.WinnerTrips = &roundTrips{1, 2, 0}, &roundTrips{1, 2, 3}
		own.WALPerThousand, redis.WALPerThousand = 2_000_000, 3_000_000
		own.DeadPerThousand, redis.DeadPerThousand = 1200, 2200
		_, why := best(own, redis)
		require.True(t, strings.HasSuffix(why, " Nothing that was counted is the reason."), why)
		own.LoserTrips, redis.LoserTrips = &roundTrips{49, 2, 0}, &roundTrips{49, 0, 2}
		_, why = best(own, redis)
		require.Contains(t, why, " Why: a loser of it makes 0.0 round trips to PostgreSQL against 2.0 (and 2.0 to Redis). Key and answer")
		require.Contains(t, why, "and the reads of the losers")
		own.LoserTrips, redis.LoserTrips, own.WALPerThousand = nil, nil, 6_000_000
		_, why = best(own, redis)
		require.Contains(t, why, " Why: it writes 3,000 kB of log for 1,000 intents against 6,000 kB. Key and answer")
		require.NotContains(t, why, "losers")
	})

	t.Run("ACaptionSaysWhatWasCounted", func(t *testing.T) {
		t.Parallel()
		r := &report{Load: load{Pool: 20}, Cells: []result{
			at(strategies.NameOnConflict, shapeSpread, 800*time.Millisecond, 59, 59, 59), at(strategies.NameRowLockHeld, shapeSpread, 800*time.Millisecond, 22, 22, 22),
		}}
		r.Cells[0].GatewayCalls, r.Cells[0].HeldAtTheGateway = 450, 7
		drawn, err := r.connectionsPlot()
		require.NoError(t, err)
		require.Contains(t, drawn.Sentence, "the default 0.0 on average, and 7 of its 450 calls")
	})
}

func TestFlagsAreChecked(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"--clients", "0"}, {"--pool", "0"}, {"--rounds", "0"}, {"--slice", "1ms"}, {"--retries", "1.5"}, {"--rate", "-1"},
		{"--gateway", "5s"}, {"--held-gateway=-1s"}, {"--strategies", "magic"}, {"--shapes", "round"},
	} {
		status, _, stderr := command(t, args...)
		require.Equal(t, 1, status, args)
		require.Contains(t, stderr, "claimlab: ", args)
	}
}

func TestPlan(t *testing.T) {
	t.Parallel()
	c := runCommand{Shapes: []string{shapeSpread, shapeHot}, Gateway: []time.Duration{0, 50 * time.Millisecond}, HeldGateway: 800 * time.Millisecond}
	cells := c.plan()
	// Six strategies under four loads; the two held forms, and the default beside them, under two.
	require.Len(t, cells, 6*4+3*2)
	seen := map[cell]bool{}
	for _, cell := range cells {
		require.False(t, seen[cell], "%s twice", cell)
		seen[cell] = true
	}
	c.HeldGateway = 50 * time.Millisecond // which the default is measured under anyway
	require.Len(t, c.plan(), 6*4+2*2)
}

// What this process and its children do is not others' work; the rest of the machine's is.
func TestProcessorTime(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("where the processors' time goes is read from Linux")
	}
	// Not beside other tests, which are this process's work too, and wait for it.
	_, busy, own, ok := processorTime()
	require.True(t, ok)
	require.Greater(t, busy, own)
	child := exec.CommandContext(t.Context(), "sh", "-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done")
	require.NoError(t, child.Run())
	_, busyAfter, ownAfter, _ := processorTime()
	require.Greater(t, ownAfter, own, "the child's work")
	require.GreaterOrEqual(t, busyAfter-busy, ownAfter-own-10)
}

func TestArrivals(t *testing.T) {
	t.Parallel()

	t.Run("ARequestThatHadToWaitForItsTurnIsMeasuredFromWhenItWasDue", func(t *testing.T) {
		t.Parallel()
		const n, interval, takes = 20, 5 * time.Millisecond, 15 * time.Millisecond
		var mu sync.Mutex
		var last time.Duration
		begun := arrivals(t.Context(), float64(time.Second/interval), 1, n, 1, func(int) bool { return false }, func(_ int, due time.Time) {
			time.Sleep(takes)
			mu.Lock()
			defer mu.Unlock()
			last = max(last, time.Since(due))
		})
		require.Equal(t, n, begun)
		// One after the other, each later than due by what those before it took too long: a closed loop would have seen 15 ms each.
		require.GreaterOrEqual(t, last, n*takes-(n-1)*interval)
	})

	t.Run("TwinsShareAnIntent", func(t *testing.T) {
		t.Parallel()
		var mu sync.Mutex
		sent := map[int]int{}
		arrivals(t.Context(), 10_000, 5, 3, 100, func(int) bool { return true }, func(n int, _ time.Time) {
			mu.Lock()
			defer mu.Unlock()
			sent[n]++
		})
		require.Equal(t, map[int]int{0: 5, 1: 5, 2: 5}, sent)
	})
}

func TestBreak(t *testing.T) {
	t.Parallel()
	shared := openLabFor(t)
	for _, b := range breakages {
		t.Run(b.Name, func(t *testing.T) {
			t.Parallel()
			bench := &bench{lab: shared}
			if b.Name == "redis-restart" { // Not under the others.
				bench.lab = openLabFor(t)
			}
			defer bench.close()
			require.NoError(t, b.run(t.Context(), bench))
			var out bytes.Buffer
			bench.print(&out, b.Title)
			require.Empty(t, bench.unseen, out.String())
			require.NotEmpty(t, bench.did)
			require.NotEmpty(t, bench.saw)
			require.GreaterOrEqual(t, len(bench.teaches), 2)
			t.Log(out.String())
		})
	}

	t.Run("WithoutACaseTheyAreListed", func(t *testing.T) {
		t.Parallel()
		status, stdout, _ := command(t, "break")
		require.Zero(t, status)
		for _, b := range breakages {
			require.Contains(t, stdout, b.Name)
		}
		status, _, stderr := command(t, "break", "nothing")
		require.Equal(t, 1, status)
		require.Contains(t, stderr, `there is no case "nothing"`)
	})
}

// openLabFor closes the lab when the test and its sub-tests have ended.
func openLabFor(t *testing.T) *lab {
	t.Helper()
	l, err := openLab(t.Context(), serverSettings{DatabaseURL: os.Getenv("DATABASE_URL")}, os.Stderr)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.close()) })
	return l
}

// The document was written around a real run's report, which is committed beside it.
func TestDocument(t *testing.T) {
	t.Parallel()
	const document, committed = "../../docs/claim-strategies.md", "../../docs/claim-strategies/report.json"
	text, err := os.ReadFile(document)
	require.NoError(t, err)
	r, err := readReport(committed)
	require.NoError(t, err)

	t.Run("ItsFiguresAreThoseOfItsReportAndWhatIsSaidOfThemIsThisProgramsWord", func(t *testing.T) {
		t.Parallel()
		status, _, stderr := command(t, "figures", document, "--report", committed, "--check")
		require.Zero(t, status, "%s\nWrite them with: go run ./cmd/claimlab figures docs/claim-strategies.md --report docs/claim-strategies/report.json", stderr)
	})

	t.Run("NoOtherFigureOfAMeasurementIsInIt", func(t *testing.T) {
		t.Parallel()
		prose := marked.ReplaceAllString(string(text), "")
		allowed := []string{"10 %"} // The tolerance.
		for _, c := range r.Cells {
			allowed = append(allowed, gatewayTime(c.Gateway))
		}
		for _, found := range regexp.MustCompile(`\d[\d.,]*\s?(ms|µs|%|kB|MB|/s|intents per|requests per|times)`).FindAllString(prose, -1) {
			require.True(t, slices.Contains(allowed, found), "%q is in the text and not from the report", found)
		}
	})

	t.Run("ItsReportShowsWhatTheLabIsThereToShow", func(t *testing.T) {
		t.Parallel()
		require.Len(t, r.Verdicts, 4)
		for _, v := range r.Verdicts[:3] {
			require.True(t, v.Holds, v.Claim)
		}
		// The fourth may fail, and is then explained.
		for _, line := range r.Verdicts[3].Why {
			if strings.Contains(line, ": not so: ") {
				require.Regexp(t, "Why: |Nothing that was counted is the reason", line)
			}
		}
		require.Less(t, r.Seconds, 300.0)
		require.Contains(t, r.Versions.Redis, "redis-server")
	})

	t.Run("ItNamesEveryStrategyAndEveryCase", func(t *testing.T) {
		t.Parallel()
		for _, kind := range strategies.Kinds() {
			require.Contains(t, string(text), "`"+kind.Name+"`")
		}
		for _, b := range breakages {
			require.Contains(t, string(text), "`"+b.Name+"`")
		}
	})
}

// Nothing of the lab may be linked into the service.
func TestNothingOfTheLabIsInTheService(t *testing.T) {
	t.Parallel()
	list := exec.CommandContext(t.Context(), "go", "list", "-deps", "example.com/payments/cmd/payments")
	out, err := list.CombinedOutput()
	require.NoError(t, err, string(out))
	deps := strings.Fields(string(out))
	require.Contains(t, deps, "example.com/payments/internal/payments")
	for _, dep := range deps {
		for _, lab := range []string{
			"example.com/payments/internal/idempotency/strategies", "example.com/payments/cmd/claimlab",
			"github.com/redis/", "github.com/alicebob/", "gonum.org/", "github.com/HdrHistogram/", "github.com/schollz/",
		} {
			require.False(t, strings.HasPrefix(dep, lab), "cmd/payments links %s", dep)
		}
	}
}

func TestSpellings(t *testing.T) {
	t.Parallel()
	ms := func(v float64) *float64 { return &v }
	for want, got := range map[string]string{
		"–": milliseconds(nil), "0.12": milliseconds(ms(0.123)), "12.3": milliseconds(ms(12.34)), "1,235": milliseconds(ms(1234.5)),
		"1,234,567": count(1234567), "999": count(999), "99.9": rate(99.94), "100": rate(100.2), "12 kB": kilobytes(12345),
		"0 %": percent(0), "5.0 %": percent(0.05), "50 %": percent(0.5), "99.7 %": percent(0.997), "100 %": percent(1),
		"0 ms": gatewayTime(0), "800 ms": gatewayTime(800 * time.Millisecond),
	} {
		require.Equal(t, want, got)
	}
	require.Equal(t, "100 %", percent(0.9996))
}
