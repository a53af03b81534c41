package api_test

import (
	"io"
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/servicetest"
)

// Row 16 of CONTRACT §4, and the retention of §2.
func TestRetention(t *testing.T) {
	t.Parallel()
	purger := func(w *world) *idempotency.Purger {
		return idempotency.NewPurger(w.DB, slog.New(slog.NewTextHandler(io.Discard, nil)))
	}
	facts(t, []fact{
		{"SpentKeyOfEveryRouteIs410ForEverWithItsLocation", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			paid := w.NewPayment("pm_refund_ok")
			declined := w.NewPayment("pm_refund_declined")
			requests := []request{
				{"/v1/orders", "order", `{"amount":1999,"currency":"EUR"}`},
				{"/v1/orders/" + order + "/cancel", "cancel", ""},
				{"/v1/payments", "paid", servicetest.PayBody(w.NewOrder(), "pm_ok")},
				{"/v1/payments", "declined", servicetest.PayBody(w.NewOrder(), "pm_declined")},
				{"/v1/payments/" + paid + "/refunds", "refund", ""},
				{"/v1/payments/" + declined + "/refunds", "no-refund", ""},
			}
			locations := map[string]string{}
			for _, req := range requests {
				locations[req.key] = req.from(w.Client).Fresh().Header.Get("Location")
			}
			spent := func() {
				for _, req := range requests {
					req.from(w.Client).Is(410, "idempotency-key-expired").Has("Location", locations[req.key]).
						Has("Link", `</docs/idempotency>; rel="describedby"`).Has("Idempotent-Replayed", "").Has("Retry-After", "")
					w.Do("GET", locations[req.key], "", "").Is(200)
				}
			}
			for _, req := range requests {
				// The moment itself is the first at which the answer is not kept any more.
				w.MoveBack(req.key, *w.Key(req.key).ExpiresIn)
			}
			spent()
			purged, err := purger(w).RunOnce(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, len(requests), purged)
			require.Zero(t, w.Rows("idempotency_keys WHERE expires_at <= now() AND (answer_status IS NOT NULL OR answer_headers IS NOT NULL OR answer_body IS NOT NULL)"))
			spent()
			for _, req := range requests {
				w.MoveBack(req.key, 10*365*servicetest.Day)
			}
			spent()
			// Should the database's clock be set back, what is stripped stays spent.
			for _, req := range requests {
				w.MoveBack(req.key, -20*365*servicetest.Day)
			}
			spent()
			require.Len(t, w.Gateway.Charges(), 4)
		}},
		{"AnswerIsKeptUntilThen", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			first := w.Pay(order, "k", "pm_ok").Is(201)
			w.MoveBack("k", servicetest.Day-time.Minute)
			purged, err := purger(w).RunOnce(t.Context())
			require.NoError(t, err)
			require.Zero(t, purged)
			w.Pay(order, "k", "pm_ok").Same(first).Replayed()
		}},
		{"ChangeOfTheSettingBreaksNoPromise", func(t *testing.T) {
			w := setup(t, options{KeyRetention: 48 * time.Hour})
			order := w.NewOrder()
			first := w.Pay(order, "k", "pm_ok").Is(201)
			require.WithinDuration(t, time.Now().Add(48*time.Hour), first.HTTPDate("Idempotency-Expires"), time.Minute)
			shorter := w.NewReplica(options{KeyRetention: time.Hour}).As(w.Merchant)
			w.MoveBack("k", 47*time.Hour)
			shorter.Pay(order, "k", "pm_ok").Same(first).Replayed()
		}},
		{"KeyInProgressNeverExpires", func(t *testing.T) {
			w := setup(t, options{})
			req := payment.leaveBehind(w, "ok", true)
			w.MoveBack(req.key, 365*servicetest.Day)
			req.from(w.Client).Is(201).Fresh()
		}},
		{"PurgeStripsInBatchesAndOnlyWhatIsDue", func(t *testing.T) {
			w := setup(t, options{})
			for expires, n := range map[string]int{"-1 second": 1200, "1 hour": 50} {
				w.Exec(`INSERT INTO idempotency_keys (merchant_id, key, route, resource_id, resource_path, recipe, fingerprint, mode, state, attempt,
						holder, request_id, outcome_uncertain, answer_status, answer_headers, answer_body, created_at, final_at, expires_at)
					SELECT $1, $2 || i, 'POST /v1/orders', gen_random_uuid(), '/v1/orders/x', 1, sha256('x'), 'sync', 'done', 1,
						'', '', false, 201, '{}', 'x', now(), now(), now() + $3::text::interval
					FROM generate_series(1, $4::int) i`, w.Merchant.ID, "old"+expires[:1], expires, n)
			}
			// What somebody else holds is skipped, not waited for.
			tx, err := w.DB.Begin(t.Context())
			require.NoError(t, err)
			_, err = tx.Exec(t.Context(), "SELECT FROM idempotency_keys WHERE key = 'old-1' FOR UPDATE")
			require.NoError(t, err)
			p := purger(w)
			for _, want := range []int64{500, 500, 199, 0} {
				got, err := p.RunOnce(t.Context())
				require.NoError(t, err)
				require.Equal(t, want, got)
			}
			require.NoError(t, tx.Rollback(t.Context()))
			total, err := p.Drain(t.Context())
			require.NoError(t, err)
			require.EqualValues(t, 1, total)
			require.Equal(t, 1200, w.Rows("idempotency_keys WHERE answer_status IS NULL"), "the rows stay")
			require.Equal(t, 50, w.Rows("idempotency_keys WHERE answer_status IS NOT NULL"))
		}},
	})
}
