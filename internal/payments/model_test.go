package payments

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"example.com/payments/internal/dbsqlc"
	"example.com/payments/internal/dbtest"
	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/postgres"
)

// The model is what package idempotency's diagram and DESIGN say of a key, without SQL. rapid draws what several holders do in which
// order, several of them at once too; after each step the database must be where the model is. A failure is shrunk to the shortest story
// that shows it.

// modelTTL never runs out by itself: the model's time is moved by a step.
const modelTTL = time.Hour

// modelKey is a key, and the payment it was claimed for.
type modelKey struct {
	key       idempotency.Key
	story     *paymentStory // of the claim that won
	state     idempotency.State
	payment   string
	attempt   int32
	lease     uuid.UUID // zero: released
	expired   bool      // the lease's time has gone
	uncertain bool
	waiting   bool // abandoned_at: the client's time counts from an earlier moment than the lease's end
	answer    string
	spent     bool // retention has passed
	purged    bool
	// held are all leases that anybody has ever had of it, in their order.
	held []idempotency.Lease
}

func (k *modelKey) stale() bool {
	return k.state == idempotency.StateInProgress && (k.lease == uuid.Nil || k.expired)
}

func (k *modelKey) live() bool {
	return k.payment == StatusProcessing || k.payment == StatusSucceeded
}

// model is one order and the two keys that want to pay it.
type model struct {
	service  *Service
	pool     *pgxpool.Pool
	merchant uuid.UUID
	order    Order
	keys     []*modelKey
	events   int
}

func TestKeyAndPaymentFollowTheModel(t *testing.T) {
	t.Parallel()
	// Nothing here depends on what a power cut would leave.
	address := dbtest.New(t) + "&synchronous_commit=off"
	pool := dbtest.Pool(t, address)
	db, err := postgres.Open(t.Context(), address, postgres.Options{MaxConns: 8, AcquireTimeout: 10 * time.Second})
	require.NoError(t, err)
	t.Cleanup(db.Close)
	service := New(db, db, nil, modelAnswers{}, Settings{
		Holder: "model", LeaseTTL: modelTTL, KeyRetention: modelTTL, GatewayTimeout: time.Second, ReapInterval: time.Second, ReapAfter: 2 * modelTTL,
	}, slog.New(slog.DiscardHandler))

	// Forty stories of thirty steps take some seconds; -rapid.checks asks for more.
	if checks := flag.Lookup("rapid.checks"); checks.Value.String() == checks.DefValue {
		require.NoError(t, checks.Value.Set("40"))
	}
	rapid.Check(t, func(rt *rapid.T) {
		m := newModel(rt, service, pool)
		rt.Repeat(map[string]func(*rapid.T){
			"claim":          m.claim,
			"claimAtOnce":    m.claimAtOnce,
			"takeOver":       m.takeOver,
			"takeOverAtOnce": m.takeOverAtOnce,
			"record":         m.record,
			"recordAtOnce":   m.recordAtOnce,
			"release":        m.release,
			"renew":          m.renew,
			"look":           m.look,
			"leaseExpires":   m.leaseExpires,
			"retentionEnds":  m.retentionEnds,
			"purge":          m.purge,
			"":               m.check,
		})
	})
}

func newModel(rt *rapid.T, service *Service, pool *pgxpool.Pool) *model {
	m := &model{service: service, pool: pool, merchant: uuid.New(), order: Order{ID: uuid.Must(uuid.NewV7()), Status: OrderOpen, Amount: 1999, Currency: "EUR"}}
	for i := range 2 {
		m.keys = append(m.keys, &modelKey{key: idempotency.Key("key-" + strconv.Itoa(i))})
	}
	// What earlier stories have left.
	_, err := idempotency.NewPurger(service.db, service.log).Drain(context.Background())
	require.NoError(rt, err)
	m.exec(rt, `INSERT INTO merchants (id, name) VALUES ($1, 'model')`, m.merchant)
	m.exec(rt, `INSERT INTO orders (merchant_id, id, status, amount, currency, metadata, created_at) VALUES ($1, $2, 'open', 1999, 'EUR', '{}', now())`, m.merchant, m.order.ID)
	return m
}

func (m *model) exec(rt *rapid.T, sql string, args ...any) {
	_, err := m.pool.Exec(context.Background(), sql, args...)
	require.NoError(rt, err)
}

func (m *model) draw(rt *rapid.T) *modelKey {
	return m.keys[rapid.IntRange(0, len(m.keys)-1).Draw(rt, "key")]
}

// anyLease is one that somebody has, or had, of the key.
func (m *model) anyLease(rt *rapid.T, k *modelKey) idempotency.Lease {
	if len(k.held) == 0 {
		rt.Skip("nobody has claimed it")
	}
	return k.held[rapid.IntRange(0, len(k.held)-1).Draw(rt, "lease")]
}

// claims makes n requests claim the key at once, and returns the one that won.
func (m *model) claims(rt *rapid.T, k *modelKey, n int) {
	mayWin := k.state == "" && m.order.Status == OrderOpen && !slices.ContainsFunc(m.keys, (*modelKey).live)
	stories, leases, errs := make([]*paymentStory, n), make([]idempotency.Lease, n), make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		id, createdAt := newID()
		stories[i] = &paymentStory{service: m.service, merchantID: m.merchant, payment: Payment{
			ID: id, OrderID: m.order.ID, Status: StatusProcessing, Amount: 1999, Currency: "EUR", PaymentMethod: "pm_ok", CreatedAt: createdAt,
			Metadata: map[string]string{}, gatewayKey: GatewayKey(IntentCharge, m.merchant, string(k.key)),
		}}
		leases[i] = idempotency.Lease{MerchantID: m.merchant, Key: k.key, ID: uuid.New(), Attempt: 1}
		all.Go(func() {
			errs[i] = stories[i].claim(context.Background(), idempotency.Claim{
				MerchantID: m.merchant, Key: k.key, RequestID: "request", Mode: idempotency.ModeSync,
				Request: idempotency.Request{Method: "POST", Route: "/v1/payments"},
			}, leases[i])
		})
	}
	all.Wait()
	won := 0
	for i, err := range errs {
		if err != nil {
			require.True(rt, lost(err), "%v", err)
			continue
		}
		won++
		k.story, k.payment, k.state, k.attempt, k.lease, k.uncertain = stories[i], StatusProcessing, idempotency.StateInProgress, 1, leases[i].ID, true
		k.held = append(k.held, leases[i])
	}
	require.Equal(rt, map[bool]int{true: 1}[mayWin], won, "claims won of %d", n)
}

func (m *model) claim(rt *rapid.T) { m.claims(rt, m.draw(rt), 1) }
func (m *model) claimAtOnce(rt *rapid.T) {
	m.claims(rt, m.draw(rt), rapid.IntRange(2, 4).Draw(rt, "requests"))
}

// takeOvers makes n holders, clients' repeats or reapers, take the key over at once.
func (m *model) takeOvers(rt *rapid.T, k *modelKey, n int) {
	if k.state == "" {
		rt.Skip("nobody has claimed it")
	}
	// What a holder has read may be old by now.
	seen := k.attempt - rapid.Int32Range(0, 1).Draw(rt, "attempts ago")
	byClient := rapid.Bool().Draw(rt, "by a client")
	mayWin := k.stale() && seen == k.attempt
	leases, oks, errs := make([]idempotency.Lease, n), make([]bool, n), make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		var claim *idempotency.Claim
		if byClient {
			claim = &idempotency.Claim{RequestID: "repeat"}
		}
		all.Go(func() {
			mine := idempotency.Lease{MerchantID: m.merchant, Key: k.key, ID: uuid.New(), Attempt: seen}
			leases[i], oks[i], errs[i] = idempotency.TakeOver(context.Background(), m.service.db, mine, "model", claim, modelTTL)
		})
	}
	all.Wait()
	won := 0
	for i := range n {
		require.NoError(rt, errs[i])
		if !oks[i] {
			continue
		}
		won++
		k.attempt, k.lease, k.expired, k.uncertain = k.attempt+1, leases[i].ID, false, true
		k.waiting = !byClient // A client's return starts its time anew; the reaper's visit keeps it.
		k.held = append(k.held, leases[i])
		require.Equal(rt, k.attempt, leases[i].Attempt)
	}
	require.Equal(rt, map[bool]int{true: 1}[mayWin], won, "take-overs won of %d", n)
}

func (m *model) takeOver(rt *rapid.T) { m.takeOvers(rt, m.draw(rt), 1) }
func (m *model) takeOverAtOnce(rt *rapid.T) {
	m.takeOvers(rt, m.draw(rt), rapid.IntRange(2, 4).Draw(rt, "holders"))
}

var modelOutcomes = map[OutcomeStatus]struct {
	state  idempotency.State
	status string
}{
	OutcomeApproved: {idempotency.StateDone, StatusSucceeded},
	OutcomeDeclined: {idempotency.StateDone, StatusDeclined},
	OutcomeCanceled: {idempotency.StateFailed, StatusFailed},
}

// records makes the holders of the leases record what they think has become of the payment, at once. Only the present one is heard, even
// if its lease has expired meanwhile: nobody has taken the key from it.
func (m *model) records(rt *rapid.T, k *modelKey, leases []idempotency.Lease) {
	outcomes, answers, errs := make([]Outcome, len(leases)), make([]idempotency.Answer, len(leases)), make([]error, len(leases))
	var all sync.WaitGroup
	for i, lease := range leases {
		status := rapid.SampledFrom([]OutcomeStatus{OutcomeApproved, OutcomeDeclined, OutcomeCanceled}).Draw(rt, "outcome")
		outcomes[i] = Outcome{Status: status, Reference: fmt.Sprintf("reference of attempt %d", lease.Attempt), DeclineCode: "declined"}
		all.Go(func() { answers[i], errs[i] = k.story.record(context.Background(), lease, "request", outcomes[i]) })
	}
	all.Wait()
	for i, lease := range leases {
		if k.state != idempotency.StateInProgress || lease.ID != k.lease {
			require.ErrorIs(rt, errs[i], pgx.ErrNoRows)
			continue
		}
		require.NoError(rt, errs[i])
		m.events++
		k.answer, k.uncertain, k.expired = string(answers[i].Body), false, false
		k.state, k.payment = modelOutcomes[outcomes[i].Status].state, modelOutcomes[outcomes[i].Status].status
		if k.payment == StatusSucceeded {
			m.order.Status = OrderPaid
		}
	}
}

func (m *model) record(rt *rapid.T) {
	k := m.draw(rt)
	m.records(rt, k, []idempotency.Lease{m.anyLease(rt, k)})
}

func (m *model) recordAtOnce(rt *rapid.T) {
	k := m.draw(rt)
	m.anyLease(rt, k)
	m.records(rt, k, k.held)
}

func (m *model) release(rt *rapid.T) {
	k := m.draw(rt)
	lease, uncertain := m.anyLease(rt, k), rapid.Bool().Draw(rt, "uncertain")
	ok, err := idempotency.Release(context.Background(), m.service.db, lease, uncertain)
	require.NoError(rt, err)
	require.Equal(rt, k.state == idempotency.StateInProgress && lease.ID == k.lease, ok)
	if ok {
		k.lease, k.expired, k.uncertain, k.waiting = uuid.Nil, false, uncertain, true
	}
}

// renew is a process renewing all leases that it ever had. It brings one back to life that has expired and that nobody has taken over.
func (m *model) renew(rt *rapid.T) {
	var ids []uuid.UUID
	var want []uuid.UUID
	for _, k := range m.keys {
		for _, lease := range k.held {
			ids = append(ids, lease.ID)
		}
		if k.state == idempotency.StateInProgress && k.lease != uuid.Nil && k.expired {
			want = append(want, k.lease)
			k.expired = false
		}
	}
	renewed, err := m.service.queries.IdempotencyKeyRenew(context.Background(), m.service.db, dbsqlc.IdempotencyKeyRenewParams{
		LeaseIds: ids, LeaseTTL: modelTTL, TwoThirds: modelTTL * 2 / 3,
	})
	require.NoError(rt, err)
	require.ElementsMatch(rt, want, renewed)
}

// look is the reaper's: it finds exactly the stale keys, and changes nothing that anybody else minds.
func (m *model) look(rt *rapid.T) {
	m.exec(rt, `UPDATE idempotency_keys SET next_look_at = now() - interval '1 second' WHERE merchant_id = $1 AND next_look_at IS NOT NULL`, m.merchant)
	found, err := m.service.queries.IdempotencyKeyLook(context.Background(), m.service.db, dbsqlc.IdempotencyKeyLookParams{LookTimeout: modelTTL, Max: 1000})
	require.NoError(rt, err)
	var got, want []string
	for _, row := range found {
		if row.MerchantID == m.merchant { // The database has the keys of earlier stories too.
			got = append(got, row.Key)
		}
	}
	for _, k := range m.keys {
		if k.stale() {
			want = append(want, string(k.key))
		}
	}
	require.ElementsMatch(rt, want, got)
}

func (m *model) leaseExpires(rt *rapid.T) {
	k := m.draw(rt)
	if k.state != idempotency.StateInProgress || k.lease == uuid.Nil {
		rt.Skip("nobody holds it")
	}
	m.exec(rt, `UPDATE idempotency_keys SET lease_expires_at = now() - interval '1 second' WHERE merchant_id = $1 AND key = $2`, m.merchant, string(k.key))
	k.expired = true
}

func (m *model) retentionEnds(rt *rapid.T) {
	k := m.draw(rt)
	if k.answer == "" {
		rt.Skip("it has no answer")
	}
	m.exec(rt, `UPDATE idempotency_keys SET expires_at = now() - interval '1 second' WHERE merchant_id = $1 AND key = $2`, m.merchant, string(k.key))
	k.spent = true
}

func (m *model) purge(rt *rapid.T) {
	purged, err := idempotency.NewPurger(m.service.db, m.service.log).RunOnce(context.Background())
	require.NoError(rt, err)
	var want int64
	for _, k := range m.keys {
		if k.spent && !k.purged {
			want++
			k.purged = true
		}
	}
	require.Equal(rt, want, purged)
}

// check compares all that the database has with the model.
func (m *model) check(rt *rapid.T) {
	ctx := context.Background()
	for _, k := range m.keys {
		record, err := idempotency.Get(ctx, m.service.db, m.merchant, k.key)
		if k.state == "" {
			require.ErrorIs(rt, err, idempotency.ErrNoRecord)
			continue
		}
		require.NoError(rt, err)
		require.Equal(rt, k.state, record.State)
		require.Equal(rt, k.attempt, record.Attempt)
		require.Equal(rt, k.stale(), record.Stale())
		require.Equal(rt, k.uncertain, record.OutcomeUncertain)
		require.Equal(rt, k.spent, record.Expired)
		require.Equal(rt, k.story.payment.ID, record.ResourceID)
		if k.state == idempotency.StateInProgress {
			require.Equal(rt, k.lease, record.LeaseID)
		}
		answer := ""
		if !k.purged {
			answer = k.answer
		}
		require.Equal(rt, answer, string(record.Answer().Body))
		payment, err := m.service.Payment(ctx, m.merchant, k.story.payment.ID)
		require.NoError(rt, err)
		require.Equal(rt, k.payment, payment.Status)
	}
	order, err := m.service.Order(ctx, m.merchant, m.order.ID)
	require.NoError(rt, err)
	require.Equal(rt, m.order.Status, order.Status)

	var payments, events int
	var waiting []string
	require.NoError(rt, m.pool.QueryRow(ctx, `
		SELECT (SELECT count(*) FROM payments WHERE merchant_id = $1), (SELECT count(*) FROM events WHERE merchant_id = $1),
			(SELECT array_agg(key) FROM idempotency_keys WHERE merchant_id = $1 AND state = 'in_progress' AND abandoned_at IS NOT NULL)`,
		m.merchant).Scan(&payments, &events, &waiting))
	claimed := 0
	var want []string
	for _, k := range m.keys {
		if k.state != "" {
			claimed++
		}
		if k.state == idempotency.StateInProgress && k.waiting {
			want = append(want, string(k.key))
		}
	}
	require.Equal(rt, claimed, payments, "key and payment neither ever exists alone")
	require.Equal(rt, m.events, events, "one event for each end")
	require.ElementsMatch(rt, want, waiting)
}

// modelAnswers says what must be told apart, and no more.
type modelAnswers struct{}

func (modelAnswers) Path(kind Kind, id uuid.UUID) string { return fmt.Sprintf("/%s/%s", kind, id) }
func (modelAnswers) PaymentFinal(p Payment, requestID string) idempotency.Answer {
	body := fmt.Sprintf("%s %s for %s", p.ID, p.Status, requestID)
	if p.GatewayReference != nil {
		body += ", " + *p.GatewayReference
	}
	return idempotency.Answer{Status: 201, Headers: map[string]string{}, Body: []byte(body)}
}
func (modelAnswers) OrderCreated(Order) idempotency.Answer         { panic(errModel) }
func (modelAnswers) OrderCanceled(Order) idempotency.Answer        { panic(errModel) }
func (modelAnswers) PaymentAccepted(Payment) idempotency.Answer    { panic(errModel) }
func (modelAnswers) RefundFinal(Refund, string) idempotency.Answer { panic(errModel) }
func (modelAnswers) RefundAccepted(Refund) idempotency.Answer      { panic(errModel) }

var errModel = errors.New("the model has payments only")
