package servicetest

import (
	"slices"
	"strings"

	dto "github.com/prometheus/client_model/go"
)

// Metric is the value of the replica's counters or gauges of a name, or how often its histograms have observed, added up over all that
// have these labels ("name=value").
func (r *Replica) Metric(name string, labels ...string) (sum float64) {
	r.world.t.Helper()
	for _, metric := range r.family(name) {
		matches := true
		for _, label := range labels {
			matches = matches && slices.ContainsFunc(metric.Label, func(pair *dto.LabelPair) bool {
				return pair.GetName()+"="+pair.GetValue() == label
			})
		}
		if matches {
			sum += metric.GetCounter().GetValue() + metric.GetGauge().GetValue() + float64(metric.GetHistogram().GetSampleCount())
		}
	}
	return sum
}

// Counted is what the replica's counters of a name stand at, those at zero left out, by the value of their label or labels, joined by
// spaces in the order of the labels' names.
func (r *Replica) Counted(name string) map[string]int {
	r.world.t.Helper()
	counted := map[string]int{}
	for _, metric := range r.family(name) {
		var values []string
		for _, label := range metric.Label {
			values = append(values, label.GetValue())
		}
		if n := int(metric.GetCounter().GetValue()); n > 0 {
			counted[strings.Join(values, " ")] = n
		}
	}
	return counted
}

func (r *Replica) family(name string) []*dto.Metric {
	r.world.t.Helper()
	families, err := r.Metrics.Gather()
	if err != nil {
		r.world.t.Errorf("metrics: %v", err)
	}
	for _, family := range families {
		if family.GetName() == name {
			return family.Metric
		}
	}
	r.world.t.Errorf("there is no metric %s", name)
	return nil
}
