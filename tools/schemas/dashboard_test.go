package schemas

import (
	"errors"
	"os"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
)

func TestDashboard(t *testing.T) {
	plugins.RegisterDefaultPlugins() // With them the options of every kind of panel and of query are known, too.
	for _, file := range files(t, "../../deploy/observability/grafana/dashboards/*.json") {
		raw, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		var d dashboard.Dashboard
		for _, err := range []error{d.UnmarshalJSONStrict(raw), d.Validate()} {
			// The generated code returns its list of faults as an error even when it is empty.
			var faults cog.BuildErrors
			if err != nil && (!errors.As(err, &faults) || len(faults) > 0) {
				t.Errorf("%s: %v", file, err)
			}
		}
	}
}
