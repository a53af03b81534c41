package payments

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"example.com/payments/internal/dbsqlc"
	"example.com/payments/internal/idempotency"
)

// metrics are what the story counts, where the decision falls. No key, id or merchant is ever a label: their number has no bound.
type metrics struct {
	claims       *prometheus.CounterVec
	claimSeconds prometheus.Histogram
	chargeTime   *prometheus.HistogramVec
	recordTime   prometheus.Histogram
	gatewayCalls *prometheus.CounterVec
	reaped       *prometheus.CounterVec
	reaperRound  prometheus.Gauge
	leasesLost   prometheus.Counter
}

// A statement takes from a fraction of a millisecond to the statement timeout; a charge from a millisecond to the attempt's budget.
var (
	statementBuckets = []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5}
	chargeBuckets    = []float64{.01, .05, .1, .2, .5, .8, 1, 1.5, 2, 3, 5, 8, 10, 15, 30}
)

// newMetrics registers the story's collectors; with a nil registerer they count for nobody.
func newMetrics(s *Service, registerer prometheus.Registerer) *metrics {
	auto := promauto.With(registerer)
	m := &metrics{
		claims: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "payments_claims_total",
			Help: "Requests with a key by their route and by what became of their claim. All but won and taken_over are losers.",
		}, []string{"route", "result"}),
		claimSeconds: auto.NewHistogram(prometheus.HistogramOpts{
			Name: "payments_claim_duration_seconds", Help: "The claim's statement, won or lost.", Buckets: statementBuckets,
		}),
		chargeTime: auto.NewHistogramVec(prometheus.HistogramOpts{
			Name: "payments_charge_duration_seconds", Help: "One attempt at the gateway, repetitions included, by its ending.", Buckets: chargeBuckets,
		}, []string{"ending"}),
		recordTime: auto.NewHistogram(prometheus.HistogramOpts{
			Name: "payments_record_duration_seconds", Help: "From the known outcome to its record, repetitions included.", Buckets: statementBuckets,
		}),
		gatewayCalls: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "payments_gateway_calls_total", Help: "Exchanges with the gateway by call and by how they ended.",
		}, []string{"call", "ending"}),
		reaped: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "payments_reaper_keys_total", Help: "Stale keys that the reaper looked at, by what became of them.",
		}, []string{"ending"}),
		reaperRound: auto.NewGauge(prometheus.GaugeOpts{
			Name: "payments_reaper_last_round_timestamp_seconds", Help: "When the reaper last finished a round.",
		}),
		leasesLost: auto.NewCounter(prometheus.CounterOpts{
			Name: "payments_leases_lost_total", Help: "Attempts that found their lease taken over when they came to record or release.",
		}),
	}
	auto.NewCounterFunc(prometheus.CounterOpts{
		Name: "payments_leases_renewed_total", Help: "Leases renewed because their work took long.",
	}, func() float64 { return float64(s.leases.Renewed()) })
	auto.NewCounterFunc(prometheus.CounterOpts{
		Name: "payments_lease_renewal_failures_total", Help: "Renewals that the database has not carried out. A few in a row, and leases are lost.",
	}, func() float64 { return float64(s.leases.Failed()) })
	auto.NewCounterFunc(prometheus.CounterOpts{
		Name: "payments_purged_answers_total", Help: "Stored answers stripped after their retention.",
	}, func() float64 { return float64(s.purger.Purged()) })
	auto.NewCounterFunc(prometheus.CounterOpts{
		Name: "payments_purge_failures_total", Help: "Batches of the purge that the database has refused.",
	}, func() float64 { return float64(s.purger.Failed()) })
	auto.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "payments_purge_last_round_timestamp_seconds", Help: "When the purge last finished a batch; 0 if never.",
	}, func() float64 { return seconds(s.purger.LastRound()) })
	if registerer != nil {
		registerer.MustRegister(backlog{s})
	}
	// Claims, attempts and looks that have never been are there all the same, so that an alert can tell zero from absent.
	for _, ending := range chargeEndings {
		m.chargeTime.WithLabelValues(ending)
	}
	for _, route := range claimRoutes {
		for _, result := range idempotency.ClaimResults {
			m.claims.WithLabelValues(route, string(result))
		}
	}
	for _, ending := range reapEndings {
		m.reaped.WithLabelValues(string(ending))
	}
	return m
}

// claimRoutes are the routes that take a key.
var claimRoutes = []string{"/v1/orders", "/v1/orders/{id}/cancel", "/v1/payments", "/v1/payments/{id}/refunds"}

func seconds(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1000
}

// decided counts what became of a request's claim, and tells the request.
func (s *Service) decided(claim idempotency.Claim, result idempotency.ClaimResult, subject Subject) {
	s.metrics.claims.WithLabelValues(claim.Request.Route, string(result)).Inc()
	if claim.Report != nil {
		*claim.Report = idempotency.Report{Result: result, ResourcePath: subject.Path}
	}
}

const (
	endingNotCharged = "not_charged"
	endingUnknown    = "unknown"
)

var chargeEndings = []string{string(OutcomeApproved), string(OutcomeDeclined), string(OutcomeCanceled), endingNotCharged, endingUnknown}

// chargeEnding is the label of an attempt's ending.
func chargeEnding(outcome Outcome, err error) string {
	switch {
	case err == nil:
		return string(outcome.Status)
	case errors.Is(err, ErrNotCharged):
		return endingNotCharged
	}
	return endingUnknown
}

// countedGateway counts every exchange with the gateway, and gives it a span in the trace it belongs to.
type countedGateway struct {
	gateway Gateway
	calls   *prometheus.CounterVec
}

var tracer = otel.Tracer("example.com/payments/internal/payments")

func (g countedGateway) exchange(ctx context.Context, call string, intent Intent, exchange func(context.Context, Intent) (Outcome, error)) (Outcome, error) {
	ctx, span := tracer.Start(ctx, "gateway "+call, trace.WithSpanKind(trace.SpanKindClient))
	defer span.End()
	outcome, err := exchange(ctx, intent)
	ending := string(outcome.Status)
	switch {
	case errors.Is(err, ErrNotSent):
		ending = "not_sent"
	case errors.Is(err, ErrRefused):
		ending = "refused"
	case err != nil:
		ending = "unclear"
	}
	g.calls.WithLabelValues(call, ending).Inc()
	span.SetAttributes(attribute.String("payments.gateway.ending", ending), attribute.String("payments.gateway.kind", string(intent.Kind)))
	return outcome, err
}

func (g countedGateway) Charge(ctx context.Context, intent Intent) (Outcome, error) {
	return g.exchange(ctx, "charge", intent, g.gateway.Charge)
}

func (g countedGateway) LookUp(ctx context.Context, intent Intent) (Outcome, error) {
	return g.exchange(ctx, "look_up", intent, g.gateway.LookUp)
}

func (g countedGateway) Cancel(ctx context.Context, intent Intent) (Outcome, error) {
	return g.exchange(ctx, "cancel", intent, g.gateway.Cancel)
}

// backlog asks the database, when it is scraped, what is waiting to be ended or stripped. While the database does not answer, these
// metrics are absent, and the alerts on them say so.
type backlog struct {
	service *Service
}

var (
	keysInProgress = prometheus.NewDesc("payments_keys_in_progress",
		"Keys whose answer is not known yet, of all replicas.", nil, nil)
	oldestStaleKey = prometheus.NewDesc("payments_oldest_stale_key_age_seconds",
		"How long the longest abandoned key in progress has been stale; 0 if there is none.", nil, nil)
	oldestUnpurged = prometheus.NewDesc("payments_oldest_unpurged_answer_age_seconds",
		"How long the stored answer that is longest past its retention has been so; 0 if there is none.", nil, nil)
)

// A scrape that takes longer than this is worth less than the connection it holds.
const backlogTimeout = 2 * time.Second

func (b backlog) Describe(descriptions chan<- *prometheus.Desc) {
	descriptions <- keysInProgress
	descriptions <- oldestStaleKey
	descriptions <- oldestUnpurged
}

func (b backlog) Collect(values chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), backlogTimeout)
	defer cancel()
	row, err := dbsqlc.New().IdempotencyKeyBacklog(ctx, b.service.db)
	if err != nil {
		b.service.log.WarnContext(ctx, "backlog was not measured", "error", err)
		return
	}
	values <- prometheus.MustNewConstMetric(keysInProgress, prometheus.GaugeValue, float64(row.InProgress))
	values <- prometheus.MustNewConstMetric(oldestStaleKey, prometheus.GaugeValue, row.StaleFor.Seconds())
	values <- prometheus.MustNewConstMetric(oldestUnpurged, prometheus.GaugeValue, row.UnpurgedFor.Seconds())
}
