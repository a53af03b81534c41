package main

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// collector takes traces as OpenTelemetry's own does.
type collector struct {
	url     string
	status  atomic.Int32 // what it answers
	uploads chan upload
}

type upload struct {
	path   string
	header http.Header
	traces *tracepb.TracesData
}

func newCollector(t *testing.T) *collector {
	t.Helper()
	c := &collector{uploads: make(chan upload, 100)}
	c.status.Store(http.StatusOK)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		traces := new(tracepb.TracesData)
		if err := proto.Unmarshal(body, traces); err != nil {
			t.Error(err)
		}
		c.uploads <- upload{r.URL.Path, r.Header, traces}
		w.WriteHeader(int(c.status.Load()))
	}))
	t.Cleanup(server.Close)
	c.url = server.URL
	return c
}

// spans are all that have come.
func (c *collector) spans() (spans []*tracepb.Span) {
	for {
		select {
		case u := <-c.uploads:
			for _, resource := range u.traces.ResourceSpans {
				for _, scope := range resource.ScopeSpans {
					spans = append(spans, scope.Spans...)
				}
			}
		default:
			return spans
		}
	}
}

func TestTracing(t *testing.T) {
	collector := newCollector(t)

	t.Run("IsOffUnlessItIsSaidWhereTracesGo", func(t *testing.T) {
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
		traces, err := startTracing(t.Context(), slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		require.Nil(t, traces.provider)
		require.Nil(t, traces.queries())
		traces.stop()
	})

	t.Run("ReachesTheCollectorWithItsHeaders", func(t *testing.T) {
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url+"/")
		t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc, x-tenant = 7")
		traces, err := startTracing(t.Context(), slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		_, span := traces.provider.Tracer("test").Start(t.Context(), "POST /v1/payments")
		span.End()
		traces.stop()

		u := <-collector.uploads
		require.Equal(t, "/v1/traces", u.path)
		require.Equal(t, "application/x-protobuf", u.header.Get("Content-Type"))
		require.Equal(t, "Bearer abc", u.header.Get("Authorization"))
		require.Equal(t, "7", u.header.Get("X-Tenant"))
		require.Equal(t, "POST /v1/payments", u.traces.ResourceSpans[0].ScopeSpans[0].Spans[0].Name)
		named := false
		for _, attribute := range u.traces.ResourceSpans[0].Resource.Attributes {
			named = named || attribute.Key == "service.name" && attribute.Value.GetStringValue() == "payments"
		}
		require.True(t, named)
	})

	t.Run("RefusesAnAddressThatItCannotSpeakTo", func(t *testing.T) {
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4317")
		_, err := startTracing(t.Context(), slog.New(slog.DiscardHandler))
		require.ErrorContains(t, err, "OTEL_EXPORTER_OTLP_ENDPOINT must be http(s)://")
	})

	t.Run("SaysWhatTheCollectorHasSaid", func(t *testing.T) {
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
		client, err := newOTLPClient()
		require.NoError(t, err)
		collector.status.Store(http.StatusServiceUnavailable)
		require.ErrorContains(t, client.UploadTraces(t.Context(), nil), "503")
	})
}

func TestTrace(t *testing.T) {
	t.Parallel()
	// What a client is traced by, and what its request's span has to be a child of.
	const clientTrace, clientSpan = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"

	t.Run("GoesThroughStatementsAndGatewayAndAReplayLeadsToTheOriginal", func(t *testing.T) {
		t.Parallel()
		b, collector := setup(t), newCollector(t)
		s := b.ready(t, "OTEL_EXPORTER_OTLP_ENDPOINT="+collector.url)
		i := b.intend(t, s)
		request := b.paymentRequest(t.Context(), t, s, i)
		request.Header.Set("Traceparent", "00-"+clientTrace+"-"+clientSpan+"-01")
		paid := send(request)
		require.Equal(t, http.StatusCreated, paid.status, paid)
		require.Contains(t, b.gateway.traceparent.Load(), clientTrace, "the trace goes on at the gateway")
		require.Equal(t, "true", b.pay(t, s, i).replayed())
		s.signal(t, syscall.SIGTERM)
		require.Zero(t, s.wait(t))

		var requests []*tracepb.Span
		children := map[string]*tracepb.Span{}
		for _, span := range collector.spans() {
			switch {
			case span.Name == "POST /v1/payments":
				requests = append(requests, span)
			case hexOf(span.TraceId) == clientTrace:
				children[span.Name] = span
			}
			for _, secret := range []string{b.apiKey, i.key, "pm_ok", "1999"} {
				require.NotContains(t, span.String(), secret)
			}
		}
		require.Len(t, requests, 2)
		original, replay := requests[0], requests[1]
		require.Equal(t, clientTrace, hexOf(original.TraceId))
		require.Equal(t, clientSpan, hexOf(original.ParentSpanId))
		require.Equal(t, "won", attribute(original, "payments.claim"))
		require.Equal(t, "/v1/payments/"+paid.field("id"), attribute(original, "payments.resource"))
		for _, name := range []string{"PaymentClaim", "gateway charge", "PaymentRecord"} {
			require.Contains(t, children, name)
			require.Equal(t, original.SpanId, children[name].ParentSpanId, name)
		}

		require.NotEqual(t, clientTrace, hexOf(replay.TraceId))
		require.Equal(t, "replayed", attribute(replay, "payments.claim"))
		require.Len(t, replay.Links, 1)
		require.Equal(t, clientTrace, hexOf(replay.Links[0].TraceId))
		require.Equal(t, original.SpanId, replay.Links[0].SpanId)
	})

	t.Run("HoldsNothingUpWhenTheCollectorHangs", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer listener.Close() // It accepts, by the kernel, and never answers.
		s := b.ready(t, "OTEL_EXPORTER_OTLP_ENDPOINT=http://"+listener.Addr().String(), "LOG_FORMAT=json")
		require.Equal(t, http.StatusCreated, b.pay(t, s, b.intend(t, s)).status)
		since := time.Now()
		s.signal(t, syscall.SIGTERM)
		require.Zero(t, s.wait(t))
		require.Less(t, time.Since(since), otlpTimeout, "it does not wait for the collector as long as a send may take")
		for line := range strings.Lines(s.stderr.String()) {
			require.True(t, strings.HasPrefix(line, "{"), "it complains like everybody else: %s", line)
		}
		require.Contains(t, s.stderr.String(), "traces were not sent")
	})

	t.Run("IsNotBegunWhenNobodyWantsIt", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		i := b.intend(t, s)
		request := b.paymentRequest(t.Context(), t, s, i)
		request.Header.Set("Traceparent", "00-"+clientTrace+"-"+clientSpan+"-01")
		require.Equal(t, http.StatusCreated, send(request).status)
		require.Empty(t, b.gateway.traceparent.Load())
		require.NotContains(t, b.everything(t, i), clientTrace)
	})
}

func hexOf(id []byte) string { return fmt.Sprintf("%x", id) }

// attribute is a text attribute of a span.
func attribute(span *tracepb.Span, name string) string {
	for _, attribute := range span.Attributes {
		if attribute.Key == name {
			return attribute.Value.GetStringValue()
		}
	}
	return ""
}
