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
	request   string // whose the attempt is: the claim's, until a client's repeat has taken over
	spent     bool   // retention has passed
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
	gateway  *modelGateway
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
	gateway := &modelGateway{words: map[string]modelWord{}}
	service := New(db, db, gateway, modelAnswers{}, Settings{
		Holder: "model", LeaseTTL: modelTTL, KeyRetention: modelTTL, GatewayTimeout: 10 * time.Second, ReapInterval: time.Second,
		ReapAfter: time.Nanosecond, // Nobody's patience ends in between: what the gateway has never seen, the reaper closes.
	}, slog.New(slog.DiscardHandler))

	// A hundred stories of thirty steps take some seconds; -rapid.checks asks for more.
	if checks := flag.Lookup("rapid.checks"); checks.Value.String() == checks.DefValue {
		require.NoError(t, checks.Value.Set("100"))
	}
	rapid.Check(t, func(rt *rapid.T) {
		m := newModel(rt, service, pool, gateway)
		rt.Repeat(map[string]func(*rapid.T){
			"claim":          m.claim,
			"claimAtOnce":    m.claimAtOnce,
			"takeOver":       m.takeOver,
			"takeOverAtOnce": m.takeOverAtOnce,
			"record":         m.record,
			"recordAtOnce":   m.recordAtOnce,
			"release":        m.release,
			"renew":          m.renew,
			"reap":           m.reap,
			"twoAtOnce":      m.twoAtOnce,
			"look":           m.look,
			"leaseExpires":   m.leaseExpires,
			"retentionEnds":  m.retentionEnds,
			"purge":          m.purge,
			"":               m.check,
		})
	})
}

func newModel(rt *rapid.T, service *Service, pool *pgxpool.Pool, gateway *modelGateway) *model {
	m := &model{service: service, pool: pool, gateway: gateway, merchant: uuid.New(), order: Order{ID: uuid.Must(uuid.NewV7()), Status: OrderOpen, Amount: 1999, Currency: "EUR"}}
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
		k.request = "request"
		k.held = append(k.held, leases[i])
	}
	require.Equal(rt, map[bool]int{true: 1}[mayWin], won, "claims won of %d", n)
}

func (m *model) claim(rt *rapid.T) { m.claims(rt, m.draw(rt), 1) }
func (m *model) claimAtOnce(rt *rapid.T) {
	m.claims(rt, m.draw(rt), rapid.IntRange(2, 4).Draw(rt, "requests"))
}

// deed is something that somebody does to a key.
type deed struct {
	name string
	do   func()              // in the database
	fits func(m *model) bool // whether the model allows what has come of it; if so, it moves the model
}

// perform does the deeds at once. What came of each must be what comes of it when they are done one after the other, in one order or another.
func (m *model) perform(rt *rapid.T, deeds ...deed) {
	var all sync.WaitGroup
	var names []string
	for _, d := range deeds {
		names = append(names, d.name)
		all.Go(d.do)
	}
	all.Wait()
	require.True(rt, m.explains(deeds), "what came of %v at once comes of them in no order", names)
}

func (m *model) explains(deeds []deed) bool {
	for i, d := range deeds {
		next := m.clone()
		if d.fits(next) && next.explains(slices.Delete(slices.Clone(deeds), i, i+1)) {
			*m = *next
			return true
		}
	}
	return len(deeds) == 0
}

func (m *model) clone() *model {
	next := *m
	next.keys = nil
	for _, k := range m.keys {
		key := *k
		key.held = slices.Clone(k.held)
		next.keys = append(next.keys, &key)
	}
	return &next
}

// of is the key as this model has it.
func (m *model) of(k *modelKey) *modelKey {
	return m.keys[slices.IndexFunc(m.keys, func(other *modelKey) bool { return other.key == k.key })]
}

// taking is a holder, for a client's repeat or a reaper, taking the key over.
func (m *model) taking(rt *rapid.T, k *modelKey) deed {
	if k.state == "" {
		rt.Skip("nobody has claimed it")
	}
	// What a holder has read may be old by now.
	mine := idempotency.Lease{MerchantID: m.merchant, Key: k.key, ID: uuid.New(), Attempt: k.attempt - rapid.Int32Range(0, 1).Draw(rt, "attempts ago")}
	var claim *idempotency.Claim
	if rapid.Bool().Draw(rt, "by a client") {
		claim = &idempotency.Claim{RequestID: "repeat"}
	}
	var taken idempotency.Lease
	var ok bool
	var err error
	return deed{"take over", func() {
		taken, ok, err = idempotency.TakeOver(context.Background(), m.service.db, mine, "model", claim, modelTTL)
	}, func(m *model) bool {
		k := m.of(k)
		mayWin := k.stale() && mine.Attempt == k.attempt
		if ok {
			k.takenOver(taken.ID, claim)
			k.held = append(k.held, taken)
		}
		return err == nil && ok == mayWin && (!ok || taken.Attempt == k.attempt)
	}}
}

func (k *modelKey) takenOver(lease uuid.UUID, claim *idempotency.Claim) {
	k.attempt, k.lease, k.expired, k.uncertain = k.attempt+1, lease, false, true
	k.waiting = claim == nil // A client's return starts its time anew; the reaper's visit keeps it.
	if claim != nil {
		k.request = claim.RequestID
	}
}

func (m *model) takeOver(rt *rapid.T) { m.perform(rt, m.taking(rt, m.draw(rt))) }

func (m *model) takeOverAtOnce(rt *rapid.T) {
	k := m.draw(rt)
	var deeds []deed
	for range rapid.IntRange(2, 4).Draw(rt, "holders") {
		deeds = append(deeds, m.taking(rt, k))
	}
	m.perform(rt, deeds...)
}

var modelOutcomes = map[OutcomeStatus]struct {
	state  idempotency.State
	status string
}{
	OutcomeApproved: {idempotency.StateDone, StatusSucceeded},
	OutcomeDeclined: {idempotency.StateDone, StatusDeclined},
	OutcomeCanceled: {idempotency.StateFailed, StatusFailed},
}

// recording is the holder of the lease recording what it thinks has become of the payment. Only the present one is heard, even if its lease
// has expired meanwhile: nobody has taken the key from it.
func (m *model) recording(rt *rapid.T, k *modelKey, lease idempotency.Lease) deed {
	status := rapid.SampledFrom([]OutcomeStatus{OutcomeApproved, OutcomeDeclined, OutcomeCanceled}).Draw(rt, "outcome")
	outcome := Outcome{Status: status, Reference: fmt.Sprintf("reference of attempt %d", lease.Attempt), DeclineCode: "declined"}
	var answer idempotency.Answer
	var err error
	return deed{"record", func() {
		answer, err = k.story.record(context.Background(), lease, "request", outcome)
	}, func(m *model) bool {
		k := m.of(k)
		if k.state != idempotency.StateInProgress || lease.ID != k.lease {
			return errors.Is(err, pgx.ErrNoRows)
		}
		m.recorded(k, outcome, string(answer.Body))
		return err == nil
	}}
}

func (m *model) recorded(k *modelKey, outcome Outcome, answer string) {
	m.events++
	k.answer, k.uncertain, k.expired = answer, false, false
	k.state, k.payment = modelOutcomes[outcome.Status].state, modelOutcomes[outcome.Status].status
	if k.payment == StatusSucceeded {
		m.order.Status = OrderPaid
	}
}

func (m *model) record(rt *rapid.T) {
	k := m.draw(rt)
	m.perform(rt, m.recording(rt, k, m.anyLease(rt, k)))
}

func (m *model) recordAtOnce(rt *rapid.T) {
	k := m.draw(rt)
	m.anyLease(rt, k)
	var deeds []deed
	for _, lease := range k.held {
		deeds = append(deeds, m.recording(rt, k, lease))
	}
	m.perform(rt, deeds...)
}

// releasing is the holder of the lease letting go of the key.
func (m *model) releasing(rt *rapid.T, k *modelKey, lease idempotency.Lease) deed {
	uncertain := rapid.Bool().Draw(rt, "uncertain")
	var ok bool
	var err error
	return deed{"release", func() {
		ok, err = idempotency.Release(context.Background(), m.service.db, lease, uncertain)
	}, func(m *model) bool {
		k := m.of(k)
		mayWin := k.state == idempotency.StateInProgress && lease.ID == k.lease
		if ok {
			k.lease, k.expired, k.uncertain, k.waiting = uuid.Nil, false, uncertain, true
		}
		return err == nil && ok == mayWin
	}}
}

func (m *model) release(rt *rapid.T) {
	k := m.draw(rt)
	m.perform(rt, m.releasing(rt, k, m.anyLease(rt, k)))
}

// renewing is a process renewing all leases that it ever had. It brings one back to life that has expired and that nobody has taken over.
// A row that somebody else has locked at that moment it leaves for the next time.
func (m *model) renewing(alone bool) deed {
	var ids, renewed []uuid.UUID
	for _, k := range m.keys {
		for _, lease := range k.held {
			ids = append(ids, lease.ID)
		}
	}
	var err error
	return deed{"renew", func() {
		renewed, err = m.service.queries.IdempotencyKeyRenew(context.Background(), m.service.db, dbsqlc.IdempotencyKeyRenewParams{
			LeaseIds: ids, LeaseTTL: modelTTL, TwoThirds: modelTTL * 2 / 3,
		})
	}, func(m *model) bool {
		want := 0
		for _, k := range m.keys {
			if k.state == idempotency.StateInProgress && k.lease != uuid.Nil && k.expired {
				if slices.Contains(renewed, k.lease) {
					want++
					k.expired = false
				} else if alone {
					return false
				}
			}
		}
		return err == nil && len(renewed) == want
	}}
}

func (m *model) renew(rt *rapid.T) { m.perform(rt, m.renewing(true)) }

// reaping is the reaper's step for the key, with whatever the gateway says just then.
func (m *model) reaping(rt *rapid.T, k *modelKey, alone bool) deed {
	if k.state == "" {
		rt.Skip("nobody has claimed it")
	}
	word := modelWord{err: ErrUnclear}
	if status := rapid.SampledFrom([]OutcomeStatus{OutcomeApproved, OutcomeDeclined, OutcomeNeverSeen, OutcomeProcessing, ""}).Draw(rt, "gateway"); status != "" {
		word = modelWord{outcome: Outcome{Status: status, Reference: "the gateway's", DeclineCode: "declined"}}
	}
	m.gateway.say(k.story.payment.gatewayKey, word)
	var ending ReapEnding
	var err error
	return deed{"reap", func() {
		ending, err = NewReaper(m.service).RunKey(context.Background(), m.merchant, k.key)
	}, func(m *model) bool {
		k := m.of(k)
		if !k.stale() { // It may have been when it was looked at.
			return errors.Is(err, ErrNotFound) || !alone && err == nil && ending == ReapOvertaken
		}
		outcome, want := word.outcome, ReapRecorded
		switch {
		case word.err != nil || outcome.Status == OutcomeProcessing:
			return err == nil && ending == ReapUnclear
		case outcome.Status == OutcomeNeverSeen:
			outcome, want = Outcome{Status: OutcomeCanceled}, ReapCanceled
		}
		k.takenOver(uuid.Nil, nil)
		m.recorded(k, outcome, string(modelAnswers{}.PaymentFinal(k.story.payment.ended(outcome), k.request).Body))
		return err == nil && ending == want
	}}
}

func (m *model) reap(rt *rapid.T) { m.perform(rt, m.reaping(rt, m.draw(rt), true)) }

// twoAtOnce are two different things that happen to a key at one moment. Most of them can only win while it is stale.
func (m *model) twoAtOnce(rt *rapid.T) {
	k := m.draw(rt)
	lease := m.anyLease(rt, k)
	if k.state != idempotency.StateInProgress {
		rt.Skip("nothing can happen to it any more")
	}
	if rapid.Bool().Draw(rt, "the last to hold it") {
		lease = k.held[len(k.held)-1]
	}
	if k.lease != uuid.Nil && rapid.Bool().Draw(rt, "expired") {
		m.expire(rt, k)
	}
	deeds := map[string]func() deed{
		"record":    func() deed { return m.recording(rt, k, lease) },
		"release":   func() deed { return m.releasing(rt, k, lease) },
		"take over": func() deed { return m.taking(rt, k) },
		"renew":     func() deed { return m.renewing(false) },
		"reap":      func() deed { return m.reaping(rt, k, false) },
	}
	names := rapid.Permutation([]string{"record", "release", "take over", "renew", "reap"}).Draw(rt, "deeds")
	m.perform(rt, deeds[names[0]](), deeds[names[1]]())
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
	m.expire(rt, k)
}

func (m *model) expire(rt *rapid.T, k *modelKey) {
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

// modelWord is what the gateway says about a payment.
type modelWord struct {
	outcome Outcome
	err     error
}

// modelGateway says of each payment what the story wants it to.
type modelGateway struct {
	mu    sync.Mutex
	words map[string]modelWord
}

func (g *modelGateway) say(key string, word modelWord) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.words[key] = word
}

func (g *modelGateway) LookUp(_ context.Context, intent Intent) (Outcome, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.words[intent.Key].outcome, g.words[intent.Key].err
}

func (*modelGateway) Cancel(context.Context, Intent) (Outcome, error) {
	return Outcome{Status: OutcomeCanceled}, nil
}

func (*modelGateway) Charge(context.Context, Intent) (Outcome, error) {
	panic(errors.New("the reaper never charges"))
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
