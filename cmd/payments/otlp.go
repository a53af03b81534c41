package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"
)

// Traces that a collector has not taken in ten seconds are dropped: they are worth less than what they would hold up.
const otlpTimeout = 10 * time.Second

// otlpClient sends traces to a collector, over HTTP as protobuf. OpenTelemetry's own client does so too, and brings gRPC along: two of the 25 MB
// that the image may have, and a protocol's worth of vulnerabilities. It implements otlptrace.Client.
type otlpClient struct {
	url     string
	headers map[string]string
}

// newOTLPClient reads the variables that OpenTelemetry specifies. Only HTTP is spoken, whatever OTEL_EXPORTER_OTLP_PROTOCOL says.
func newOTLPClient() (otlpClient, error) {
	address := os.Getenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
	if address == "" {
		address = strings.TrimRight(os.Getenv("OTEL_EXPORTER_OTLP_ENDPOINT"), "/") + "/v1/traces"
	}
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return otlpClient{}, fmt.Errorf("OTEL_EXPORTER_OTLP_ENDPOINT must be http(s)://host[:port][/path]")
	}
	c := otlpClient{url: address, headers: make(map[string]string)}
	for _, variable := range []string{"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"} {
		for pair := range strings.SplitSeq(os.Getenv(variable), ",") {
			name, value, ok := strings.Cut(pair, "=")
			if !ok {
				continue
			}
			if value, err = url.PathUnescape(strings.TrimSpace(value)); err != nil {
				return otlpClient{}, fmt.Errorf("%s must be name=value,…, percent-encoded", variable)
			}
			c.headers[strings.TrimSpace(name)] = value
		}
	}
	return c, nil
}

func (otlpClient) Start(context.Context) error { return nil }
func (otlpClient) Stop(context.Context) error  { return nil }

// UploadTraces sends once. A collector that is away loses these traces and nothing else.
func (c otlpClient) UploadTraces(ctx context.Context, spans []*tracepb.ResourceSpans) error {
	ctx, cancel := context.WithTimeout(ctx, otlpTimeout)
	defer cancel()
	body, err := proto.Marshal(&tracepb.TracesData{ResourceSpans: spans}) // on the wire the same as an ExportTraceServiceRequest
	if err != nil {
		return fmt.Errorf("encode traces: %w", err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("send traces: %w", err)
	}
	request.Header.Set("Content-Type", "application/x-protobuf")
	for name, value := range c.headers {
		request.Header.Set(name, value)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return fmt.Errorf("send traces: %w", err)
	}
	defer response.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(response.Body, 64<<10)) // so that the connection is used again
	if response.StatusCode/100 != 2 {
		return fmt.Errorf("send traces: the collector answered %d", response.StatusCode)
	}
	return nil
}
