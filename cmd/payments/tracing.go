package main

import (
	"context"
	"fmt"
	"net/http"
	"os"

	"github.com/exaring/otelpgx"
	"github.com/jackc/pgx/v5"
	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	semconv "go.opentelemetry.io/otel/semconv/v1.37.0"
)

// tracing is off, and then costs nothing, unless OTEL_EXPORTER_OTLP_ENDPOINT says where traces go. The exporter reads that and the other
// OTEL_ variables by itself.
type tracing struct {
	provider *sdktrace.TracerProvider // nil: off
}

func startTracing(ctx context.Context) (tracing, error) {
	if os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT") == "" {
		return tracing{}, nil
	}
	exporter, err := otlptracehttp.New(ctx)
	if err != nil {
		return tracing{}, fmt.Errorf("OTEL_EXPORTER_OTLP_ENDPOINT: %w", err)
	}
	described, err := resource.New(ctx, resource.WithAttributes(semconv.ServiceName("payments"), semconv.ServiceVersion(version())), resource.WithFromEnv())
	if err != nil {
		return tracing{}, fmt.Errorf("describe this process for its traces: %w", err)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(exporter), sdktrace.WithResource(described))
	otel.SetTracerProvider(provider)
	otel.SetTextMapPropagator(propagation.TraceContext{})
	return tracing{provider}, nil
}

// queries traces the statements: their text, which has no values, and never their parameters.
func (t tracing) queries() pgx.QueryTracer {
	if t.provider == nil {
		return nil
	}
	return otelpgx.NewTracer()
}

// requests traces HTTP. It goes outermost, and package api names the span by its route.
func (t tracing) requests(handler http.Handler) http.Handler {
	if t.provider == nil {
		return handler
	}
	return otelhttp.NewHandler(handler, "request")
}

// stop sends what has not been sent yet.
func (t tracing) stop(ctx context.Context) error {
	if t.provider == nil {
		return nil
	}
	return t.provider.Shutdown(ctx)
}
