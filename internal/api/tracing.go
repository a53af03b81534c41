package api

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/labstack/echo/v4"
)

// Spans are begun by whoever serves the handler (see cmd/payments); when nobody does, everything here costs a look into the context.

const traceParentField = "traceparent"

// traceParent is the request's own span, as W3C Trace Context writes it; nil when it is not traced.
func traceParent(ctx context.Context) *string {
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(ctx, carrier)
	if parent, ok := carrier[traceParentField]; ok {
		return &parent
	}
	return nil
}

// linkTrace makes a replay's trace lead to the one of the request that the answer was made for.
func linkTrace(ctx context.Context, original string) {
	if original == "" {
		return
	}
	carrier := propagation.MapCarrier{traceParentField: original}
	span := trace.SpanContextFromContext(propagation.TraceContext{}.Extract(context.Background(), carrier))
	if span.IsValid() {
		trace.SpanFromContext(ctx).AddLink(trace.Link{SpanContext: span})
	}
}

// nameSpan gives the request's span its route, which is not known when the span begins.
func nameSpan(c echo.Context) {
	span := trace.SpanFromContext(c.Request().Context())
	if !span.IsRecording() {
		return
	}
	route := routeTemplate(c.Path())
	if route != "" {
		span.SetName(methodLabel(c.Request().Method) + " " + route)
	}
	state := stateOf(c)
	span.SetAttributes(
		attribute.String("http.route", route),
		attribute.String("payments.request_id", state.requestID),
		attribute.String("payments.claim", string(state.report.Result)),
		attribute.String("payments.resource", state.report.ResourcePath),
	)
}
