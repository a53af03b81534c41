package main

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

func TestTracing(t *testing.T) {
	type upload struct {
		path   string
		header http.Header
		traces tracepb.TracesData
	}
	var status atomic.Int32
	status.Store(http.StatusOK)
	uploads := make(chan *upload, 10)
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		u := &upload{path: r.URL.Path, header: r.Header}
		if err := proto.Unmarshal(body, &u.traces); err != nil {
			t.Error(err)
		}
		uploads <- u
		w.WriteHeader(int(status.Load()))
	}))
	defer collector.Close()

	t.Run("IsOffUnlessItIsSaidWhereTracesGo", func(t *testing.T) {
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
		traces, err := startTracing(t.Context())
		require.NoError(t, err)
		require.Nil(t, traces.provider)
		require.Nil(t, traces.queries())
		require.NoError(t, traces.stop(t.Context()))
	})

	t.Run("ReachesTheCollectorWithItsHeaders", func(t *testing.T) {
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL+"/")
		t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc, x-tenant = 7")
		traces, err := startTracing(t.Context())
		require.NoError(t, err)
		_, span := traces.provider.Tracer("test").Start(t.Context(), "POST /v1/payments")
		span.End()
		require.NoError(t, traces.stop(context.WithoutCancel(t.Context())))

		u := <-uploads
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
		_, err := startTracing(t.Context())
		require.ErrorContains(t, err, "OTEL_EXPORTER_OTLP_ENDPOINT must be http(s)://")
	})

	t.Run("SaysWhatTheCollectorHasSaid", func(t *testing.T) {
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
		client, err := newOTLPClient()
		require.NoError(t, err)
		status.Store(http.StatusServiceUnavailable)
		require.ErrorContains(t, client.UploadTraces(t.Context(), nil), "503")
	})
}
