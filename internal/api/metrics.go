package api

import (
	"net/http"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// metrics count requests by route, never by path: ids have no place in a label.
type metrics struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
}

func newMetrics(registerer prometheus.Registerer) *metrics {
	auto := promauto.With(registerer)
	return &metrics{
		requests: auto.NewCounterVec(prometheus.CounterOpts{
			Name: "payments_http_requests_total", Help: "Requests by method, route and status.",
		}, []string{"method", "route", "status"}),
		duration: auto.NewHistogramVec(prometheus.HistogramOpts{
			Name: "payments_http_request_duration_seconds", Help: "Whole requests by method and route.",
			Buckets: []float64{.001, .005, .01, .05, .1, .5, 1, 2, 5, 10, 20, 30},
		}, []string{"method", "route"}),
	}
}

func (m *metrics) observe(c echo.Context, took time.Duration) {
	method, route := methodLabel(c.Request().Method), routeTemplate(c.Path())
	if route == "" {
		route = "unmatched"
	}
	m.requests.WithLabelValues(method, route, strconv.Itoa(c.Response().Status)).Inc()
	m.duration.WithLabelValues(method, route).Observe(took.Seconds())
}

// methodLabel keeps what a client has made up out of labels, spans and the log.
func methodLabel(method string) string {
	switch method {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
		return method
	}
	return "other"
}
