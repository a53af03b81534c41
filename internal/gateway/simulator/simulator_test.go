package simulator

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-json-experiment/json"
	"github.com/stretchr/testify/require"
)

const chargeBody = `{"amount":1000,"currency":"EUR","payment_method":"pm_ok"}`

func charging(token string) string { return strings.Replace(chargeBody, "pm_ok", token, 1) }

func refunding(chargeKey string, amount int) string {
	return fmt.Sprintf(`{"charge_key":%q,"amount":%d}`, chargeKey, amount)
}

// answer is what a client got; the zero answer is a connection that was cut.
type answer struct {
	status int
	body   map[string]any
}

// testBundle is a simulator whose handler is called without a network. In a synctest bubble its latency is exact and takes no
// time, and synctest.Wait is the signal that every request has come as far as it can.
type testBundle struct {
	*Simulator
	path string
}

func setup(t *testing.T, latency time.Duration) *testBundle {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ledger")
	return &testBundle{open(t, path, latency), path}
}

func open(t *testing.T, path string, latency time.Duration) *Simulator {
	t.Helper()
	s, err := Open(path, Options{Latency: latency})
	require.NoError(t, err)
	t.Cleanup(func() { s.Close() })
	return s
}

// reopen is what a restart does.
func (b *testBundle) reopen(t *testing.T) *testBundle {
	t.Helper()
	require.NoError(t, b.Close())
	return &testBundle{open(t, b.path, b.latency), b.path}
}

func (b *testBundle) send(ctx context.Context, method, path, key, body string) (got answer) {
	r := httptest.NewRequestWithContext(ctx, method, path, strings.NewReader(body))
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	w := httptest.NewRecorder()
	defer func() {
		if p := recover(); p != nil && p != http.ErrAbortHandler {
			panic(p)
		}
	}()
	b.ServeHTTP(w, r)
	got.status = w.Code
	if err := json.Unmarshal(w.Body.Bytes(), &got.body); err != nil {
		panic(err)
	}
	return got
}

func (b *testBundle) post(t *testing.T, path, key, body string) answer {
	return b.send(t.Context(), "POST", path, key, body)
}

func (b *testBundle) get(t *testing.T, path string) answer {
	return b.send(t.Context(), "GET", path, "", "")
}

// start sends a request and returns when it, and everything else, waits for something.
func (b *testBundle) start(ctx context.Context, path, key, body string) <-chan answer {
	got := make(chan answer, 1)
	go func() { got <- b.send(ctx, "POST", path, key, body) }()
	synctest.Wait()
	return got
}

// all lists the charges or refunds.
func (b *testBundle) all(t *testing.T, path string) []any {
	t.Helper()
	got := b.get(t, path)
	require.Equal(t, 200, got.status)
	return got.body["data"].([]any)
}

func TestAnswers(t *testing.T) {
	t.Parallel()

	t.Run("ChargeIsWhatTheContractSays", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 0)
		got := b.post(t, "/charges", "k", chargeBody)
		require.Equal(t, 200, got.status)
		require.Regexp(t, `^ch_[a-z2-7]{26}$`, got.body["id"])
		require.Regexp(t, `^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z$`, got.body["created_at"])
		want := map[string]any{"id": got.body["id"], "key": "k", "status": "approved", "amount": 1000.0, "currency": "EUR", "created_at": got.body["created_at"]}
		require.Equal(t, want, got.body)
		require.Equal(t, got, b.get(t, "/charges/k"))
		want["kind"], want["payment_method"] = "charge", "pm_ok"
		require.Equal(t, []any{want}, b.all(t, "/charges"))
	})

	t.Run("RefundIsWhatTheContractSays", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 0)
		b.post(t, "/charges", "k", chargeBody)
		got := b.post(t, "/refunds", "k", refunding("k", 400)) // the same key names another thing here
		require.Equal(t, 200, got.status)
		require.Regexp(t, `^re_[a-z2-7]{26}$`, got.body["id"])
		want := map[string]any{"id": got.body["id"], "key": "k", "status": "approved", "amount": 400.0, "currency": "EUR",
			"charge_key": "k", "created_at": got.body["created_at"]}
		require.Equal(t, want, got.body)
		require.Equal(t, got, b.get(t, "/refunds/k"))
		require.Equal(t, got, b.post(t, "/refunds", "k", refunding("k", 400)))
		require.Len(t, b.all(t, "/refunds"), 1)
		require.Len(t, b.all(t, "/charges"), 1)
	})

	t.Run("EmptyLedgerIsAnEmptyList", func(t *testing.T) {
		t.Parallel()
		require.Empty(t, setup(t, 0).all(t, "/charges"))
	})

	t.Run("UnknownKeyIsNeverSeen", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, answer{404, map[string]any{"error": "never_seen"}}, setup(t, 0).get(t, "/charges/k"))
	})

	t.Run("RepeatGetsTheSameCharge", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 0)
		require.Equal(t, b.post(t, "/charges", "k", chargeBody), b.post(t, "/charges", "k", chargeBody))
		require.Len(t, b.all(t, "/charges"), 1)
	})

	t.Run("OtherParametersAreRefused", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 0)
		b.post(t, "/charges", "k", chargeBody)
		b.post(t, "/refunds", "r", refunding("k", 1))
		refused := answer{422, map[string]any{"error": "key_reused"}}
		for _, change := range []string{"1000/1001", "EUR/USD", "pm_ok/pm_declined"} {
			from, to, _ := strings.Cut(change, "/")
			require.Equal(t, refused, b.post(t, "/charges", "k", strings.Replace(chargeBody, from, to, 1)))
		}
		require.Equal(t, refused, b.post(t, "/refunds", "r", refunding("k", 2)))
		require.Equal(t, refused, b.post(t, "/refunds", "r", refunding("j", 1)))
	})

	t.Run("NonsenseIsInvalidAndEntersNoKey", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 0)
		invalid := answer{400, map[string]any{"error": "invalid_request"}}
		for _, body := range []string{"", "null", "[]", "{}", chargeBody + "{}", `{"amount":0` + chargeBody[14:], `{"amount":1e3` + chargeBody[14:],
			`{"amount":1000000000000` + chargeBody[14:], `{"amount":1,` + chargeBody[1:], strings.Replace(chargeBody, "EUR", "eur", 1), charging("pm_"),
			charging("PM_ok"), `{"more":1,` + chargeBody[1:], `{"charge_key":"k",` + chargeBody[1:], chargeBody + strings.Repeat(" ", maxBodyBytes)} {
			require.Equal(t, invalid, b.post(t, "/charges", "k", body), body)
		}
		for _, body := range []string{`{"amount":1}`, refunding("", 1), refunding("k", -1), `{"currency":"EUR",` + refunding("k", 1)[1:]} {
			require.Equal(t, invalid, b.post(t, "/refunds", "k", body), body)
		}
		for _, key := range []string{"", "a b", "ü", strings.Repeat("k", 256)} {
			require.Equal(t, invalid, b.post(t, "/charges", key, chargeBody), key)
		}
		require.Equal(t, invalid, b.post(t, "/charges/%ff/cancel", "", ""))
		require.Equal(t, 404, b.get(t, "/charges/%ff").status)
		require.Equal(t, 404, b.get(t, "/charges/k").status)
		require.Empty(t, b.entries)
	})
}

func TestPaymentMethods(t *testing.T) {
	t.Parallel()
	cut := answer{}
	failed := answer{500, map[string]any{"error": "internal_error"}}
	for _, tt := range []struct {
		token, status, declineCode string
		first                      *answer // nil: the charge itself
	}{
		{"ok", "approved", "", nil},
		{"something_else", "approved", "", nil},
		{"slow", "approved", "", nil},
		{"declined", "declined", "generic_decline", nil},
		{"insufficient_funds", "declined", "insufficient_funds", nil},
		{"error_after", "approved", "", &failed},
		{"drop_after", "approved", "", &cut},
		{"error_before", "", "", &failed},
	} {
		check := func(t *testing.T, b *testBundle, path, key, body string) {
			first, second := b.post(t, path, key, body), b.post(t, path, key, body)
			if tt.first != nil {
				require.Equal(t, *tt.first, first)
			}
			if tt.status == "" { // nothing happens, however often it is asked for
				require.Equal(t, failed, second)
				require.Equal(t, 404, b.get(t, path+"/"+key).status)
				require.Empty(t, b.all(t, path))
				return
			}
			if tt.first == nil {
				require.Equal(t, first, second)
			}
			require.Equal(t, 200, second.status)
			require.Equal(t, tt.status, second.body["status"])
			if tt.declineCode != "" {
				require.Equal(t, tt.declineCode, second.body["decline_code"])
			} else {
				require.NotContains(t, second.body, "decline_code")
			}
			require.Equal(t, second, b.get(t, path+"/"+key))
			require.Len(t, b.all(t, path), 1)
		}
		t.Run("Charge/"+tt.token, func(t *testing.T) {
			t.Parallel()
			check(t, setup(t, 0), "/charges", "k", charging("pm_"+tt.token))
		})
		t.Run("Refund/"+tt.token, func(t *testing.T) {
			t.Parallel()
			b := setup(t, 0)
			require.Equal(t, "approved", b.post(t, "/charges", "k", charging("pm_refund_"+tt.token)).body["status"])
			check(t, b, "/refunds", "r", refunding("k", 1000))
		})
	}
}

func TestRefundsNeverExceedTheirCharge(t *testing.T) {
	t.Parallel()

	t.Run("OneAfterTheOther", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 0)
		b.post(t, "/charges", "k", chargeBody)
		require.Equal(t, "approved", b.post(t, "/refunds", "r1", refunding("k", 600)).body["status"])
		require.Equal(t, "amount_exceeds_charge", b.post(t, "/refunds", "r2", refunding("k", 401)).body["decline_code"])
		b = b.reopen(t)
		require.Equal(t, "amount_exceeds_charge", b.post(t, "/refunds", "r3", refunding("k", 401)).body["decline_code"])
		require.Equal(t, "approved", b.post(t, "/refunds", "r4", refunding("k", 400)).body["status"])
	})

	t.Run("DeclinedOnesDoNotCount", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 0)
		b.post(t, "/charges", "k", charging("pm_refund_declined"))
		for _, key := range []string{"r1", "r2", "r3"} {
			require.Equal(t, "generic_decline", b.post(t, "/refunds", key, refunding("k", 1000)).body["decline_code"])
		}
	})

	t.Run("AtOnce", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			b := setup(t, time.Second)
			b.post(t, "/charges", "k", chargeBody)
			var started []<-chan answer
			for i := range 50 {
				started = append(started, b.start(t.Context(), "/refunds", fmt.Sprint("r", i), refunding("k", 300)))
			}
			count := map[any]int{}
			for _, got := range started {
				count[(<-got).body["status"]]++
			}
			require.Equal(t, map[any]int{"approved": 3, "declined": 47}, count)
		})
	})

	t.Run("OnlyAnApprovedChargeIsRefundable", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 0)
		b.post(t, "/charges", "no", charging("pm_declined"))
		b.post(t, "/charges/never/cancel", "", "")
		for _, key := range []string{"no", "never", "nothing"} {
			got := b.post(t, "/refunds", key, refunding(key, 1))
			require.Equal(t, 200, got.status)
			require.Equal(t, "declined", got.body["status"])
			require.Equal(t, "charge_not_refundable", got.body["decline_code"])
			b = b.reopen(t)
			require.Equal(t, got, b.get(t, "/refunds/"+key), "and that is final")
		}
	})
}

func TestLatency(t *testing.T) {
	t.Parallel()
	for token, want := range map[string]time.Duration{"pm_ok": 800 * time.Millisecond, "pm_declined": 800 * time.Millisecond, "pm_slow": 2400 * time.Millisecond} {
		t.Run(token, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				b := setup(t, DefaultLatency)
				begin := time.Now()
				b.post(t, "/charges", "k", charging(token))
				require.InDelta(t, want.Seconds(), time.Since(begin).Seconds(), want.Seconds()/10)

				begin = time.Now()
				b.post(t, "/charges", "k", charging(token))
				b.get(t, "/charges/k")
				b.post(t, "/charges/k/cancel", "", "")
				b.post(t, "/charges/j/cancel", "", "")
				require.Zero(t, time.Since(begin))
			})
		})
	}

	t.Run("AThousandChargesTakeAsLongAsOne", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			b := setup(t, DefaultLatency)
			begin := time.Now()
			got := make(chan answer)
			for i := range 1000 {
				go func() { got <- b.send(context.Background(), "POST", "/charges", fmt.Sprint("k", i), chargeBody) }()
			}
			for range 1000 {
				require.Equal(t, "approved", (<-got).body["status"])
			}
			require.InDelta(t, 0.8, time.Since(begin).Seconds(), 0.08)
			require.Len(t, b.all(t, "/charges"), 1000)
		})
	})
}

// One key, several requests: who comes first, and what the others get.
func TestOneKey(t *testing.T) {
	t.Parallel()
	inBubble := func(name string, test func(t *testing.T, b *testBundle)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { test(t, setup(t, DefaultLatency)) })
		})
	}
	processingAnswer := answer{200, map[string]any{"key": "k", "status": "processing"}}
	canceledAnswer := answer{200, map[string]any{"key": "k", "status": "canceled"}}
	refused := answer{409, map[string]any{"error": "canceled"}}
	reused := answer{422, map[string]any{"error": "key_reused"}}
	failed := answer{500, map[string]any{"error": "internal_error"}}

	inBubble("InWorkIsProcessing", func(t *testing.T, b *testBundle) {
		post := b.start(t.Context(), "/charges", "k", chargeBody)
		require.Equal(t, processingAnswer, b.get(t, "/charges/k"))
		require.Equal(t, 404, b.get(t, "/refunds/k").status)
		require.Equal(t, <-post, b.get(t, "/charges/k"))
	})

	inBubble("TwinsGetOneCharge", func(t *testing.T, b *testBundle) {
		var twins []<-chan answer
		for range 50 {
			twins = append(twins, b.start(t.Context(), "/charges", "k", chargeBody))
		}
		begin, first := time.Now(), <-twins[0]
		for _, twin := range twins[1:] {
			require.Equal(t, first, <-twin)
		}
		require.Less(t, time.Since(begin), time.Second, "the twins waited for the first's charge, and for none of their own")
		require.Len(t, b.all(t, "/charges"), 1)
	})

	inBubble("TwinOfAHangingPostGetsItsCharge", func(t *testing.T, b *testBundle) {
		first := b.start(t.Context(), "/charges", "k", charging("pm_hang_after"))
		second := b.start(t.Context(), "/charges", "k", charging("pm_hang_after"))
		require.Equal(t, 200, (<-second).status)
		synctest.Wait()
		require.Empty(t, first, "the first still hangs")
		require.NoError(t, b.Close())
		require.Equal(t, answer{}, <-first)
	})

	inBubble("OtherParametersAreRefusedWhileInWork", func(t *testing.T, b *testBundle) {
		post, begin := b.start(t.Context(), "/charges", "k", chargeBody), time.Now()
		require.Equal(t, reused, b.post(t, "/charges", "k", charging("pm_slow")))
		require.Zero(t, time.Since(begin))
		require.Equal(t, 200, (<-post).status)
	})

	inBubble("SecondBecomesFirstWhenTheFirstIsCut", func(t *testing.T, b *testBundle) {
		ctx, leave := context.WithCancel(t.Context())
		first := b.start(ctx, "/charges", "k", chargeBody)
		time.Sleep(DefaultLatency / 2)
		second, begin := b.start(t.Context(), "/charges", "k", chargeBody), time.Now()
		leave()
		require.Equal(t, answer{}, <-first)
		require.Equal(t, processingAnswer, b.get(t, "/charges/k"), "not for a moment is the key unknown")
		got := <-second
		require.Equal(t, "approved", got.body["status"])
		require.InDelta(t, 0.8, time.Since(begin).Seconds(), 0.08)
		require.Len(t, b.all(t, "/charges"), 1)
	})

	inBubble("NothingHappensAfterACut", func(t *testing.T, b *testBundle) {
		ctx, leave := context.WithCancel(t.Context())
		first := b.start(ctx, "/charges", "k", chargeBody)
		leave()
		require.Equal(t, answer{}, <-first)
		require.Equal(t, 404, b.get(t, "/charges/k").status)
		time.Sleep(time.Hour)
		require.Equal(t, 404, b.get(t, "/charges/k").status)
		require.Empty(t, b.all(t, "/charges"))
		require.Empty(t, b.entries)
	})

	inBubble("AWaiterMayLeave", func(t *testing.T, b *testBundle) {
		ctx, leave := context.WithCancel(t.Context())
		first := b.start(t.Context(), "/charges", "k", chargeBody)
		second := b.start(ctx, "/charges", "k", chargeBody)
		third := b.start(t.Context(), "/charges", "k", chargeBody)
		leave()
		require.Equal(t, answer{}, <-second)
		require.Equal(t, <-first, <-third)
		require.Zero(t, b.entries[name{charges, "k"}].guests)
	})

	inBubble("OtherParametersMayTakeAKeyThatWasReleased", func(t *testing.T, b *testBundle) {
		require.Equal(t, failed, b.post(t, "/charges", "k", charging("pm_error_before")))
		require.Equal(t, 200, b.post(t, "/charges", "k", chargeBody).status)
	})

	inBubble("WaitersBehindAFailureFailThemselves", func(t *testing.T, b *testBundle) {
		first := b.start(t.Context(), "/charges", "k", charging("pm_error_before"))
		second := b.start(t.Context(), "/charges", "k", charging("pm_error_before"))
		require.Equal(t, failed, <-first)
		require.Equal(t, failed, <-second)
		require.Empty(t, b.entries)
	})

	inBubble("CancelFirst", func(t *testing.T, b *testBundle) {
		require.Equal(t, canceledAnswer, b.post(t, "/charges/k/cancel", "", ""))
		require.Equal(t, canceledAnswer, b.post(t, "/charges/k/cancel", "", ""))
		require.Equal(t, canceledAnswer, b.get(t, "/charges/k"))
		require.Equal(t, refused, b.post(t, "/charges", "k", chargeBody))
		require.Equal(t, refused, b.post(t, "/charges", "k", charging("pm_error_before")))
		b = b.reopen(t)
		require.Equal(t, refused, b.post(t, "/charges", "k", chargeBody))
		require.Empty(t, b.all(t, "/charges"))
		require.Equal(t, 404, b.get(t, "/refunds/k").status)
	})

	inBubble("CancelDuringAPostIsTooLate", func(t *testing.T, b *testBundle) {
		post := b.start(t.Context(), "/charges", "k", chargeBody)
		cancel := b.start(t.Context(), "/charges/k/cancel", "", "")
		require.Empty(t, cancel)
		require.Equal(t, <-post, <-cancel)
		require.Equal(t, "approved", b.get(t, "/charges/k").body["status"])
	})

	inBubble("CancelDuringAPostThatIsCutTakesEffect", func(t *testing.T, b *testBundle) {
		ctx, leave := context.WithCancel(t.Context())
		post := b.start(ctx, "/charges", "k", chargeBody)
		cancel := b.start(t.Context(), "/charges/k/cancel", "", "")
		late := b.start(t.Context(), "/charges", "k", chargeBody)
		leave()
		require.Equal(t, answer{}, <-post)
		require.Equal(t, canceledAnswer, <-cancel)
		require.Equal(t, refused, <-late, "it came after the cancel")
	})

	inBubble("CancelDuringAPostThatFailsTakesEffect", func(t *testing.T, b *testBundle) {
		post := b.start(t.Context(), "/charges", "k", charging("pm_error_before"))
		cancel := b.start(t.Context(), "/charges/k/cancel", "", "")
		require.Equal(t, failed, <-post)
		require.Equal(t, canceledAnswer, <-cancel)
	})

	inBubble("CancelBehindTwoPostsWaitsForBoth", func(t *testing.T, b *testBundle) {
		ctx, leave := context.WithCancel(t.Context())
		first := b.start(ctx, "/charges", "k", chargeBody)
		second := b.start(t.Context(), "/charges", "k", chargeBody)
		cancel := b.start(t.Context(), "/charges/k/cancel", "", "")
		leave()
		require.Equal(t, answer{}, <-first)
		require.Equal(t, <-second, <-cancel)
	})

	inBubble("CancelOfADeclinedChargeIsTooLate", func(t *testing.T, b *testBundle) {
		got := b.post(t, "/charges", "k", charging("pm_declined"))
		require.Equal(t, got, b.post(t, "/charges/k/cancel", "", ""))
	})

	inBubble("RefundsCancelAlike", func(t *testing.T, b *testBundle) {
		require.Equal(t, canceledAnswer, b.post(t, "/refunds/k/cancel", "", ""))
		require.Equal(t, refused, b.post(t, "/refunds", "k", refunding("k", 1)))
		require.Equal(t, 404, b.get(t, "/charges/k").status)
	})
}

func TestClose(t *testing.T) {
	t.Parallel()
	unavailable := answer{503, map[string]any{"error": "unavailable"}}
	synctest.Test(t, func(t *testing.T) {
		b := setup(t, DefaultLatency)
		hanging := b.start(t.Context(), "/charges", "hang", charging("pm_hang_after"))
		time.Sleep(2 * DefaultLatency)
		working := b.start(t.Context(), "/charges", "k", chargeBody)
		waiting := b.start(t.Context(), "/charges", "k", chargeBody)
		require.NoError(t, b.Close())
		require.Equal(t, answer{}, <-hanging)
		require.Equal(t, unavailable, <-working)
		require.Equal(t, unavailable, <-waiting)
		require.Equal(t, unavailable, b.get(t, "/charges/k"))

		b = b.reopen(t)
		require.Equal(t, "approved", b.get(t, "/charges/hang").body["status"])
		require.Equal(t, 404, b.get(t, "/charges/k").status, "a 503 enters no key")
	})
}

// What only a real connection shows.
func TestOverHTTP(t *testing.T) {
	t.Parallel()
	serve := func(t *testing.T, latency time.Duration) (*testBundle, func(ctx context.Context, key, token string) (*http.Response, error)) {
		b := setup(t, latency)
		server := httptest.NewServer(b)
		t.Cleanup(server.Close)
		t.Cleanup(func() { b.Close() }) // before server.Close, which waits for what hangs
		return b, func(ctx context.Context, key, token string) (*http.Response, error) {
			r, err := http.NewRequestWithContext(ctx, "POST", server.URL+"/charges", io.NopCloser(strings.NewReader(charging(token))))
			require.NoError(t, err)
			r.Header.Set("Idempotency-Key", key)
			return server.Client().Do(r)
		}
	}
	becomes := func(t *testing.T, b *testBundle, key string, is func(answer) bool) {
		t.Helper()
		require.Eventually(t, func() bool { return is(b.get(t, "/charges/"+key)) }, 10*time.Second, time.Millisecond)
	}

	t.Run("ClientThatLeavesCutsItsPost", func(t *testing.T) {
		t.Parallel()
		b, post := serve(t, time.Hour)
		ctx, leave := context.WithCancel(t.Context())
		failed := make(chan error, 1)
		go func() {
			_, err := post(ctx, "k", "pm_ok")
			failed <- err
		}()
		becomes(t, b, "k", func(got answer) bool { return got.body["status"] == "processing" })
		leave()
		require.ErrorIs(t, <-failed, context.Canceled)
		becomes(t, b, "k", func(got answer) bool { return got.status == 404 })
	})

	t.Run("DropCutsTheConnection", func(t *testing.T) {
		t.Parallel()
		b, post := serve(t, 0)
		_, err := post(t.Context(), "k", "pm_drop_after")
		require.ErrorIs(t, err, io.EOF)
		require.Equal(t, "approved", b.get(t, "/charges/k").body["status"])
	})

	t.Run("HangLastsUntilTheSimulatorCloses", func(t *testing.T) {
		t.Parallel()
		b, post := serve(t, 0)
		failed := make(chan error, 1)
		go func() {
			_, err := post(t.Context(), "k", "pm_hang_after")
			failed <- err
		}()
		becomes(t, b, "k", func(got answer) bool { return got.body["status"] == "approved" })
		require.Empty(t, failed)
		require.NoError(t, b.Close())
		require.ErrorIs(t, <-failed, io.EOF)
	})

	t.Run("UnknownRoutesAreNotTheGatewaysJSON", func(t *testing.T) {
		t.Parallel()
		b, _ := serve(t, 0)
		w := httptest.NewRecorder()
		b.ServeHTTP(w, httptest.NewRequest("GET", "/charge/k", nil))
		require.Equal(t, 404, w.Code)
		require.NotContains(t, w.Body.String(), "{", "or it would read as never seen")
	})
}

func TestMain(m *testing.M) {
	if path := os.Getenv("SIMULATOR_TEST_LEDGER"); path != "" {
		serveUntilKilled(path)
	}
	os.Exit(m.Run())
}
