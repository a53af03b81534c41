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
}

func startTracing(ctx context.Context) (tracing, error) {
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
	return tracing{provider}, nil
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

// stop sends what has not been sent yet.
func (t tracing) stop(ctx context.Context) error {
	if t.provider == nil {
		return nil
	}
	return t.provider.Shutdown(ctx)
}
