package main

import (
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
)

// A quantile is told only when this many samples lie beyond it; with fewer it is an anecdote. So there is no p50 under 20 samples, no p95 under
// 200 and no p99 under 1,000.
const samplesBeyond = 10

// quantiles are a distribution of times, in milliseconds. What has too few samples is nil.
type quantiles struct {
	Samples int64    `json:"samples"`
	P50     *float64 `json:"p50_ms,omitempty"`
	P95     *float64 `json:"p95_ms,omitempty"`
	P99     *float64 `json:"p99_ms,omitempty"`
	Max     float64  `json:"max_ms"`
}

// histogram keeps times from a microsecond to ten minutes, to three digits.
type histogram struct{ *hdrhistogram.Histogram }

func newHistogram() histogram {
	return histogram{hdrhistogram.New(1, (10 * time.Minute).Microseconds(), 3)}
}

func (h histogram) record(d time.Duration) {
	// Beyond ten minutes nothing is measured: the program would have been stopped.
	_ = h.RecordValue(min(max(d.Microseconds(), 1), h.HighestTrackableValue()))
}

func (h histogram) quantiles() quantiles {
	q := quantiles{Samples: h.TotalCount(), Max: float64(h.Max()) / 1000}
	for _, at := range []struct {
		percentile float64
		enough     int64
		value      **float64
	}{
		{50, 2 * samplesBeyond, &q.P50},
		{95, 20 * samplesBeyond, &q.P95},
		{99, 100 * samplesBeyond, &q.P99},
	} {
		if q.Samples >= at.enough {
			ms := float64(h.ValueAtPercentile(at.percentile)) / 1000
			*at.value = &ms
		}
	}
	return q
}
