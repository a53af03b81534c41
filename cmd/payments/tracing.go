package main

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"time"

	"github.com/exaring/otelpgx"
	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.37.0"

	"example.com/payments/internal/postgres"
)

// tracing is off, and then costs nothing, unless OTEL_EXPORTER_OTLP_ENDPOINT says where traces go. Which other OTEL_ variables count is said
// in otlp.go; the resource's are OpenTelemetry's own to read.
type tracing struct {
	provider *sdktrace.TracerProvider // nil: off
	log      *slog.Logger
}

// startTracing begins it, and has what goes wrong with it told in the log.
func startTracing(ctx context.Context, log *slog.Logger) (tracing, error) {
	if os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") == "" {
		return tracing{}, nil
	}
	client, err := newOTLPClient()
	if err != nil {
		return tracing{}, err
	}
	exporter, err := otlptrace.New(ctx, client)
	if err != nil {
		return tracing{}, fmt.Errorf("start sending traces: %w", err)
	}
	described, err := resource.New(ctx, resource.WithAttributes(semconv.ServiceName("payments"), semconv.ServiceVersion(version())), resource.WithFromEnv())
	if err != nil {
		return tracing{}, fmt.Errorf("describe this process for its traces: %w", err)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(described))
	otel.SetTracerProvider(provider)
	otel.SetTextMapPropagator(propagation.TraceContext{})
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("traces were not sent", "error", err) }))
	return tracing{provider, log}, nil
}

// queries traces the statements, by their names: their text, which has no values, and never their parameters.
func (t tracing) queries() pgx.QueryTracer {
	if t.provider == nil {
		return nil
	}
	return otelpgx.NewTracer(otelpgx.WithSpanNameFunc(postgres.StatementName))
}

// requests traces HTTP. It goes outermost, and package api names the span by its route.
func (t tracing) requests(handler http.Handler) http.Handler {
	if t.provider == nil {
		return handler
	}
	return otelhttp.NewHandler(handler, "request")
}

// flushTimeout is how long a process that ends waits for a collector.
const flushTimeout = 2 * time.Second

// stop sends what has not been sent yet. A collector that does not take it holds nothing up.
func (t tracing) stop() {
	if t.provider == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), flushTimeout)
	defer cancel()
	if err := t.provider.Shutdown(ctx); err != nil {
		t.log.Warn("traces were not sent", "error", err)
	}
}
