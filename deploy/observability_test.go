package deploy_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/IBM/pgxpoolprometheus"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"example.com/payments/internal/api"
	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

type ruleFile struct {
	Groups []struct {
		Rules []rule `yaml:"rules"`
	} `yaml:"groups"`
}

type rule struct {
	Record      string            `yaml:"record"`
	Alert       string            `yaml:"alert"`
	Expr        string            `yaml:"expr"`
	Labels      map[string]string `yaml:"labels"`
	Annotations map[string]string `yaml:"annotations"`
}

const rulesPath = "observability/rules/payments.yaml"

func rules(t *testing.T) (all []rule) {
	t.Helper()
	for _, group := range readYAML[ruleFile](t, rulesPath).Groups {
		all = append(all, group.Rules...)
	}
	require.NotEmpty(t, all)
	return all
}

type dashboard struct {
	UID         string  `json:"uid"`
	Panels      []panel `json:"panels"`
	Annotations struct {
		List []struct {
			Expr string `json:"expr"`
		} `json:"list"`
	} `json:"annotations"`
	Templating struct {
		List []struct {
			Name, Type, Definition string
		} `json:"list"`
	} `json:"templating"`
}

type panel struct {
	Type, Title string
	GridPos     struct{ X, Y, W, H int }
	Datasource  struct{ UID string }
	Targets     []struct {
		Expr       string
		Datasource struct{ UID string }
	}
}

func paymentsDashboard(t *testing.T) dashboard {
	t.Helper()
	raw, err := os.ReadFile("observability/grafana/dashboards/payments.json")
	require.NoError(t, err)
	var d dashboard
	require.NoError(t, json.Unmarshal(raw, &d))
	return d
}

// expressions are those of the dashboard, by where they stand.
func (d dashboard) expressions() map[string]string {
	exprs := make(map[string]string)
	for _, panel := range d.Panels {
		for i, target := range panel.Targets {
			exprs[fmt.Sprintf("panel %q, query %d", panel.Title, i)] = target.Expr
		}
	}
	for _, variable := range d.Templating.List {
		if variable.Definition != "" {
			exprs["variable "+variable.Name] = variable.Definition
		}
	}
	return exprs
}

// registered are the service's metrics with their labels, as it registers them. No database is asked for them.
func registered(t *testing.T) map[string][]string {
	t.Helper()
	registry := prometheus.NewRegistry()
	pool, err := postgres.Open(context.Background(), "postgres://nobody@localhost/nowhere", postgres.Options{MaxConns: 2, AcquireTimeout: time.Second})
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	registry.MustRegister(pgxpoolprometheus.NewCollector(pool, map[string]string{"pool": "requests"}))
	log := slog.New(slog.DiscardHandler)
	service := payments.New(pool, pool, nil, api.Answers{}, payments.Settings{Metrics: registry, LeaseTTL: time.Second}, log)
	api.New(api.Config{Payments: service, Metrics: registry, Log: log})

	descriptions := make(chan *prometheus.Desc)
	go func() {
		defer close(descriptions)
		registry.Describe(descriptions)
	}()
	shape := regexp.MustCompile(`fqName: "([^"]+)".*constLabels: \{(.*)\}, variableLabels: \{(.*)\}\}$`)
	metrics := make(map[string][]string)
	for description := range descriptions {
		match := shape.FindStringSubmatch(description.String())
		require.NotNil(t, match, description)
		labels := []string{"job", "instance"} // those that a scrape adds
		for label := range strings.SplitSeq(match[2]+","+match[3], ",") {
			if name, _, _ := strings.Cut(label, "="); name != "" {
				labels = append(labels, name)
			}
		}
		name := match[1]
		metrics[name] = labels
		if strings.HasSuffix(name, "_seconds") { // It may be a histogram, and then has these.
			metrics[name+"_bucket"] = append(slices.Clone(labels), "le")
			metrics[name+"_sum"], metrics[name+"_count"] = labels, labels
		}
	}
	return metrics
}

var (
	metricName = regexp.MustCompile(`\b(payments|pgxpool)[_:][a-z0-9_:]+`)
	selector   = regexp.MustCompile(`\b((?:payments|pgxpool)[_:][a-z0-9_:]+)\{([^}]*)\}`)
	matcher    = regexp.MustCompile(`(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"`)
)

// requireKnownMetrics holds an expression against what there is.
func requireKnownMetrics(t *testing.T, where, expr string, metrics map[string][]string) {
	t.Helper()
	names := metricName.FindAllString(expr, -1)
	require.NotEmpty(t, names, "%s: %s", where, expr)
	for _, name := range names {
		require.Contains(t, metrics, name, "%s: %s", where, expr)
	}
	for _, match := range selector.FindAllStringSubmatch(expr, -1) {
		for _, condition := range matcher.FindAllStringSubmatch(match[2], -1) {
			label, value := condition[1], condition[3]
			require.Contains(t, metrics[match[1]], label, "%s: %s", where, expr)
			if known, ok := labelValues[match[1]+"/"+label]; ok {
				for one := range strings.SplitSeq(value, "|") {
					require.Contains(t, known, one, "%s: %s", where, expr)
				}
			}
		}
	}
}

// labelValues are those that an expression may ask for. A misspelt one would never match, and never alert.
var labelValues = map[string][]string{
	"payments_claims_total/result": func() (values []string) {
		for _, result := range idempotency.ClaimResults {
			values = append(values, string(result))
		}
		return values
	}(),
	"payments_gateway_calls_total/ending": {
		string(payments.OutcomeApproved), string(payments.OutcomeDeclined), string(payments.OutcomeCanceled),
		string(payments.OutcomeProcessing), string(payments.OutcomeNeverSeen), string(payments.OutcomeNotFound),
		"not_sent", "refused", "unclear",
	},
}

func TestRules(t *testing.T) {
	t.Parallel()
	metrics := registered(t)
	for _, rule := range rules(t) {
		if rule.Record != "" {
			metrics[rule.Record] = []string{"job", "instance", "pool"}
		}
	}

	t.Run("AskForMetricsThatTheServiceHas", func(t *testing.T) {
		t.Parallel()
		for _, rule := range rules(t) {
			requireKnownMetrics(t, rule.Record+rule.Alert, rule.Expr, metrics)
		}
	})

	t.Run("SayForEveryAlertWhoIsCalledAndWhereTheRunbookIs", func(t *testing.T) {
		t.Parallel()
		headings := regexp.MustCompile(`(?m)^#+ (Payments\w+)$`).FindAllStringSubmatch(runbook(t), -1)
		var explained []string
		for _, heading := range headings {
			explained = append(explained, heading[1])
		}
		var alerts []string
		for _, rule := range rules(t) {
			if rule.Alert == "" {
				continue
			}
			alerts = append(alerts, rule.Alert)
			require.Contains(t, []string{"page", "ticket"}, rule.Labels["severity"], rule.Alert)
			require.NotEmpty(t, rule.Annotations["summary"], rule.Alert)
			require.NotEmpty(t, rule.Annotations["description"], rule.Alert)
			_, anchor, _ := strings.Cut(rule.Annotations["runbook_url"], "docs/operations.md#")
			require.Equal(t, strings.ToLower(rule.Alert), anchor, "the anchor of its section")
		}
		require.ElementsMatch(t, alerts, explained, "every alert has a section of its name in docs/operations.md, and nothing else has")
	})

	t.Run("PassTheirUnitTests", func(t *testing.T) {
		t.Parallel()
		external(t)
		promtool := tool(t, "promtool", "prometheus")
		output(t, exec.Command(promtool, "check", "rules", rulesPath))
		output(t, exec.Command(promtool, "check", "config", "observability/prometheus.yml"))
		test := exec.Command(promtool, "test", "rules", "payments_test.yaml")
		test.Dir = filepath.Dir(rulesPath)
		output(t, test)

		tests, err := os.ReadFile(filepath.Join(filepath.Dir(rulesPath), "payments_test.yaml"))
		require.NoError(t, err)
		for _, rule := range rules(t) {
			if rule.Alert != "" {
				require.Contains(t, string(tests), "alertname: "+rule.Alert+"\n", "an alert that is never tested to fire")
			} else {
				require.Contains(t, string(tests), rule.Record, "what is recorded is tested")
			}
		}
	})
}

func TestDashboard(t *testing.T) {
	t.Parallel()
	d := paymentsDashboard(t)

	t.Run("AsksForMetricsThatThereAre", func(t *testing.T) {
		t.Parallel()
		metrics := registered(t)
		for _, rule := range rules(t) {
			if rule.Record != "" {
				metrics[rule.Record] = []string{"job", "instance", "pool"}
			}
		}
		exprs := d.expressions()
		require.Greater(t, len(exprs), 20)
		for where, expr := range exprs {
			requireKnownMetrics(t, where, expr, metrics)
		}
	})

	t.Run("HasARowForEachOfTheVerbsAndForWhatCanGoWrong", func(t *testing.T) {
		t.Parallel()
		var rows []string
		for _, panel := range d.Panels {
			if panel.Type == "row" {
				rows = append(rows, panel.Title)
			}
		}
		require.Subset(t, rows, []string{"Claim", "Charge", "Record", "Losers", "Pool", "Reaper"})
		for i, panel := range d.Panels {
			if panel.Type == "row" {
				require.NotEqual(t, "row", d.Panels[min(i+1, len(d.Panels)-1)].Type, "the row %s is empty", panel.Title)
			}
		}
	})

	t.Run("TakesItsDataFromWhereTheReaderSays", func(t *testing.T) {
		t.Parallel()
		for _, panel := range d.Panels {
			if panel.Type == "row" {
				continue
			}
			require.Equal(t, "${datasource}", panel.Datasource.UID, panel.Title)
			require.NotEmpty(t, panel.Targets, panel.Title)
			for _, target := range panel.Targets {
				require.Equal(t, "${datasource}", target.Datasource.UID, panel.Title)
				require.Contains(t, target.Expr, `job="$job"`, panel.Title)
			}
		}
		require.Equal(t, "datasource", d.Templating.List[0].Name)
		require.Equal(t, "datasource", d.Templating.List[0].Type)
	})

	t.Run("CoversNoPanelWithAnother", func(t *testing.T) {
		t.Parallel()
		taken := make(map[[2]int]string)
		for _, panel := range d.Panels {
			at := panel.GridPos
			require.LessOrEqual(t, at.X+at.W, 24, panel.Title)
			for x := at.X; x < at.X+at.W; x++ {
				for y := at.Y; y < at.Y+at.H; y++ {
					require.Empty(t, taken[[2]int{x, y}], "%s covers it", panel.Title)
					taken[[2]int{x, y}] = panel.Title
				}
			}
		}
	})

	t.Run("SpeaksPromQL", func(t *testing.T) {
		t.Parallel()
		external(t)
		var group struct {
			Groups []map[string]any `yaml:"groups"`
		}
		var checks []map[string]string
		for _, expr := range d.expressions() {
			if !strings.HasPrefix(expr, "label_values(") {
				checks = append(checks, map[string]string{"record": fmt.Sprintf("query:%d", len(checks)), "expr": asPromQL(expr)})
			}
		}
		group.Groups = []map[string]any{{"name": "dashboard", "rules": checks}}
		encoded, err := yaml.Marshal(group)
		require.NoError(t, err)
		path := filepath.Join(t.TempDir(), "dashboard.yaml")
		require.NoError(t, os.WriteFile(path, encoded, 0o600))
		output(t, exec.Command(tool(t, "promtool", "prometheus"), "check", "rules", path))
	})
}

// asPromQL puts in what Grafana would.
func asPromQL(expr string) string {
	return strings.NewReplacer("$__rate_interval", "20s", "$job", "payments").Replace(expr)
}

func TestGrafana(t *testing.T) {
	t.Parallel()

	t.Run("IsProvisionedWithTheDashboardAndItsData", func(t *testing.T) {
		t.Parallel()
		sources := readYAML[struct {
			Datasources []struct {
				Type, URL string
				IsDefault bool `yaml:"isDefault"`
			}
		}](t, "observability/grafana/provisioning/datasources/prometheus.yaml").Datasources
		require.Len(t, sources, 1)
		require.Equal(t, "prometheus", sources[0].Type)
		require.True(t, sources[0].IsDefault)
		providers := readYAML[struct {
			Providers []struct {
				Type    string
				Options struct{ Path string }
			}
		}](t, "observability/grafana/provisioning/dashboards/payments.yaml").Providers
		require.Len(t, providers, 1)

		// Both are where compose.yaml has put them.
		grafana := compose(t).Services["grafana"]
		require.Contains(t, grafana.Volumes, "./deploy/observability/grafana/dashboards:"+providers[0].Options.Path+":ro")
		require.Contains(t, grafana.Volumes, "./deploy/observability/grafana/provisioning:/etc/grafana/provisioning:ro")
		require.Contains(t, compose(t).Services, strings.TrimSuffix(strings.TrimPrefix(sources[0].URL, "http://"), ":9090"))
	})
}
