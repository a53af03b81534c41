package deploy_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"

	"example.com/payments/internal/devdb"
)

type composeFile struct {
	Services map[string]composeService
	Volumes  map[string]any
}

type composeService struct {
	Image           string
	Command         []string
	Environment     map[string]string
	Ports, Volumes  []string
	ReadOnly        bool     `yaml:"read_only"`
	CapDrop         []string `yaml:"cap_drop"`
	StopGracePeriod string   `yaml:"stop_grace_period"`
	DependsOn       map[string]struct {
		Condition string
	} `yaml:"depends_on"`
	Healthcheck struct {
		Test    []string
		Disable bool
	}
}

func compose(t *testing.T) composeFile {
	t.Helper()
	file := readYAML[composeFile](t, "../compose.yaml")
	require.NotEmpty(t, file.Services)
	return file
}

// ours are the services that run our image.
func (f composeFile) ours() map[string]composeService {
	services := make(map[string]composeService)
	for name, service := range f.Services {
		if strings.HasPrefix(service.Image, "payments:") {
			services[name] = service
		}
	}
	return services
}

// replicas are those of them that serve.
func (f composeFile) replicas() map[string]composeService {
	services := f.ours()
	for name, service := range services {
		if service.Command[0] != "serve" {
			delete(services, name)
		}
	}
	return services
}

type prometheusConfig struct {
	ScrapeConfigs []struct {
		JobName       string `yaml:"job_name"`
		StaticConfigs []struct {
			Targets []string
		} `yaml:"static_configs"`
	} `yaml:"scrape_configs"`
	RuleFiles []string `yaml:"rule_files"`
}

func TestCompose(t *testing.T) {
	t.Parallel()
	file := compose(t)

	t.Run("RunsTwoReplicasOnOneDatabaseAfterItIsMigrated", func(t *testing.T) {
		t.Parallel()
		require.Len(t, file.replicas(), 2)
		for name, replica := range file.replicas() {
			require.Equal(t, "service_completed_successfully", replica.DependsOn["migrate"].Condition, name)
			require.Equal(t, file.Services["migrate"].Environment["DATABASE_URL"], replica.Environment["DATABASE_URL"], name)
		}
		require.Equal(t, "service_healthy", file.Services["migrate"].DependsOn["postgres"].Condition)
		database, err := url.Parse(file.Services["migrate"].Environment["DATABASE_URL"])
		require.NoError(t, err)
		password, _ := database.User.Password()
		require.Equal(t, map[string]string{
			"POSTGRES_USER": database.User.Username(), "POSTGRES_PASSWORD": password, "POSTGRES_DB": strings.TrimPrefix(database.Path, "/"),
		}, file.Services["postgres"].Environment)
		require.Equal(t, "postgres:5432", database.Host)
	})

	t.Run("SetsOnlyWhatTheServiceReads", func(t *testing.T) {
		t.Parallel()
		for _, service := range file.ours() {
			requireKnownSettings(t, service.Environment)
		}
	})

	t.Run("RunsOurImageWithoutRights", func(t *testing.T) {
		t.Parallel()
		for name, service := range file.ours() {
			require.True(t, service.ReadOnly, name)
			require.Equal(t, []string{"ALL"}, service.CapDrop, name)
		}
	})

	t.Run("GivesAPaymentInFlightTheTimeToEnd", func(t *testing.T) {
		t.Parallel()
		for name, replica := range file.replicas() {
			grace, err := time.ParseDuration(replica.StopGracePeriod)
			require.NoError(t, err, name)
			require.Greater(t, grace, shutdownTimeout(t, replica.Environment), name)
		}
	})

	t.Run("AsksForTheHealthOfThoseThatHaveOne", func(t *testing.T) {
		t.Parallel()
		for name, service := range file.ours() {
			require.Equal(t, service.Command[0] != "serve", service.Healthcheck.Disable, name)
		}
	})

	t.Run("IsReachedFromThisMachineAlone", func(t *testing.T) {
		t.Parallel()
		seen := make(map[string]string)
		for name, service := range file.Services {
			for _, port := range service.Ports {
				require.True(t, strings.HasPrefix(port, "127.0.0.1:"), "%s %s", name, port)
				host, _, _ := strings.Cut(strings.TrimPrefix(port, "127.0.0.1:"), ":")
				require.Empty(t, seen[host], "%s and %s both want port %s", name, seen[host], host)
				seen[host] = name
			}
		}
	})

	t.Run("MountsWhatIsThere", func(t *testing.T) {
		t.Parallel()
		for name, service := range file.Services {
			for _, volume := range service.Volumes {
				source, _, _ := strings.Cut(volume, ":")
				if strings.HasPrefix(source, "./") {
					require.FileExists(t, existing(filepath.Join("..", source)), name)
				} else {
					require.Contains(t, file.Volumes, source, name)
				}
			}
		}
	})

	t.Run("ScrapesEveryReplica", func(t *testing.T) {
		t.Parallel()
		config := readYAML[prometheusConfig](t, "observability/prometheus.yml")
		var targets []string
		for name, replica := range file.replicas() {
			require.True(t, strings.HasPrefix(replica.Environment["ADMIN_ADDR"], ":"), "another container has to reach it")
			targets = append(targets, name+replica.Environment["ADMIN_ADDR"])
		}
		require.ElementsMatch(t, targets, config.ScrapeConfigs[0].StaticConfigs[0].Targets)
		require.Equal(t, []string{"rules/payments.yaml"}, config.RuleFiles)
		require.Contains(t, file.Services["prometheus"].Volumes, "./deploy/observability/rules/payments.yaml:/etc/prometheus/rules/payments.yaml:ro")
	})

	t.Run("IsUnderstoodByCompose", func(t *testing.T) {
		t.Parallel()
		external(t)
		config := exec.Command(tool(t, "docker-compose", "docker-compose"), "-f", "../compose.yaml", "config")
		out := output(t, config)
		var understood composeFile
		require.NoError(t, yaml.Unmarshal([]byte(out), &understood), out)
		require.Len(t, understood.Services, len(file.Services))
	})
}

// existing is path, or a file in it when it is a directory.
func existing(path string) string {
	var found string
	_ = filepath.WalkDir(path, func(name string, entry os.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			found = name
		}
		return nil
	})
	return found
}

// patience is how long a test waits for what should take a moment, on a machine that is busy with other tests.
const patience = time.Minute

// stack is what compose.yaml describes, as processes of this machine: the same commands and the same settings, but for the names of hosts,
// which only Compose knows.
type stack struct {
	file     composeFile
	binary   string
	database string            // the server's address, as compose.yaml's postgres is here
	ports    map[string]string // those that are listened on here, by service and setting
	ledger   string
}

func newStack(t *testing.T) *stack {
	t.Helper()
	s := &stack{file: compose(t), ports: make(map[string]string), binary: filepath.Join(t.TempDir(), "payments"), ledger: filepath.Join(t.TempDir(), "ledger")}
	build := exec.Command("go", "build", "-o", s.binary, "./cmd/payments")
	build.Dir = ".."
	output(t, build)

	server, err := devdb.Start(t.Context(), devdb.Options{Throwaway: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Stop()) })
	require.NoError(t, server.CreateDatabase(t.Context(), "payments"))
	s.database = server.URL("payments")

	for name, service := range s.file.ours() {
		s.ports[name+"/LISTEN_ADDR"] = freePort(t)
		if service.Command[0] == "serve" {
			s.ports[name+"/ADMIN_ADDR"] = freePort(t)
		}
	}
	return s
}

// freePort is one that nobody else is likely to take before it is listened on.
func freePort(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	return fmt.Sprint(listener.Addr().(*net.TCPAddr).Port)
}

// environment is a service's, with this machine's addresses in place of Compose's.
func (s *stack) environment(t *testing.T, name string) []string {
	t.Helper()
	settings := map[string]string{"LOG_FORMAT": "json"} // the image's
	for setting, value := range s.file.Services[name].Environment {
		switch setting {
		case "DATABASE_URL":
			value = s.database
		case "GATEWAY_URL":
			require.Equal(t, "http://gateway"+s.file.Services["gateway"].Environment["LISTEN_ADDR"], value)
			value = "http://127.0.0.1:" + s.ports["gateway/LISTEN_ADDR"]
		case "GATEWAY_LEDGER":
			value = s.ledger
		}
		settings[setting] = value
	}
	for _, setting := range []string{"LISTEN_ADDR", "ADMIN_ADDR"} {
		if port, ok := s.ports[name+"/"+setting]; ok {
			settings[setting] = "127.0.0.1:" + port
		}
	}
	var environment []string
	for setting, value := range settings {
		environment = append(environment, setting+"="+value)
	}
	return environment
}

// run runs a command with a service's settings to its end.
func (s *stack) run(t *testing.T, name string, args ...string) string {
	t.Helper()
	cmd := exec.Command(s.binary, args...)
	cmd.Env = s.environment(t, name)
	return output(t, cmd)
}

// start runs a service's own command, until it is stopped or the test ends.
func (s *stack) start(t *testing.T, name string) (stop func() error) {
	t.Helper()
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), s.binary, s.file.Services[name].Command...)
	cmd.Env = s.environment(t, name)
	return startProcess(t, cmd)
}

// startProcess starts what is to be ended by SIGTERM. Its last words are shown when the test fails.
func startProcess(t *testing.T, cmd *exec.Cmd) (stop func() error) {
	t.Helper()
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	require.NoError(t, cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	stopped := false
	stop = func() error {
		if stopped {
			return nil
		}
		stopped = true
		_ = cmd.Process.Signal(syscall.SIGTERM) // The one error is that it has exited.
		select {
		case err := <-ended:
			return err
		case <-time.After(patience):
			_ = cmd.Process.Kill()
			<-ended
			return errors.New("it did not end on SIGTERM")
		}
	}
	t.Cleanup(func() {
		_ = stop()
		if t.Failed() {
			t.Logf("%s said:\n%s", cmd, said.String())
		}
	})
	return stop
}

func (s *stack) url(name, path string) string {
	return "http://127.0.0.1:" + s.ports[name+"/LISTEN_ADDR"] + path
}

// await waits until the address answers 200.
func await(t *testing.T, address string) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		response, err := http.Get(address)
		if err == nil {
			response.Body.Close()
			if response.StatusCode == http.StatusOK {
				return
			}
			err = errors.New(response.Status)
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %v", address, err)
		}
	}
}

// client is a merchant's.
type client struct{ apiKey string }

type answer struct {
	status int
	header http.Header
	body   string
}

func (a answer) id(t *testing.T) string {
	t.Helper()
	var resource struct{ ID string }
	require.NoError(t, json.Unmarshal([]byte(a.body), &resource), a.body)
	return resource.ID
}

func (c client) post(t *testing.T, address, key, body string) answer {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, address, strings.NewReader(body))
	require.NoError(t, err)
	request.Header.Set("Authorization", "Bearer "+c.apiKey)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", key)
	response, err := http.DefaultClient.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return answer{response.StatusCode, response.Header, string(raw)}
}

// pay makes an order and pays it.
func (c client) pay(t *testing.T, s *stack, replica, key, method string) (payment string, a answer) {
	t.Helper()
	order := c.post(t, s.url(replica, "/v1/orders"), "order-"+key, `{"amount":1999,"currency":"EUR"}`)
	require.Equal(t, http.StatusCreated, order.status, order.body)
	payment = fmt.Sprintf(`{"order_id":%q,"amount":1999,"currency":"EUR","payment_method":%q}`, order.id(t), method)
	return payment, c.post(t, s.url(replica, "/v1/payments"), key, payment)
}

func TestStack(t *testing.T) {
	t.Parallel()
	external(t)
	prometheus := tool(t, "prometheus", "prometheus")
	s := newStack(t)

	s.run(t, "migrate", s.file.Services["migrate"].Command...)
	s.run(t, "migrate", s.file.Services["migrate"].Command...) // A second `up` migrates nothing, and succeeds.
	s.start(t, "gateway")
	await(t, s.url("gateway", "/charges"))
	stops := make(map[string]func() error)
	for name := range s.file.replicas() {
		stops[name] = s.start(t, name)
	}
	for name := range s.file.replicas() {
		await(t, s.url(name, "/readyz"))
		s.run(t, name, "health")
	}

	printed := s.run(t, "payments-1", "merchant", "create", "Shop")
	merchant := client{apiKey: regexp.MustCompile(`sk_\S+`).FindString(printed)}
	require.NotEmpty(t, merchant.apiKey, printed)

	payment, first := merchant.pay(t, s, "payments-1", "pay-1", "pm_ok")
	require.Equal(t, http.StatusCreated, first.status, first.body)
	repeat := merchant.post(t, s.url("payments-2", "/v1/payments"), "pay-1", payment)
	require.Equal(t, first.body, repeat.body, "the other replica has the same answer")
	require.Equal(t, "true", repeat.header.Get("Idempotent-Replayed"))

	// Every panel gets something to show, by a Prometheus with the configuration that compose.yaml gives it.
	config := s.prometheusConfig(t)
	port := freePort(t)
	startProcess(t, exec.Command(prometheus, "--config.file="+config, "--storage.tsdb.path="+t.TempDir(), "--web.listen-address=127.0.0.1:"+port))
	base := "http://127.0.0.1:" + port
	await(t, base+"/-/ready")

	open := paymentsDashboard(t).expressions()
	for i, deadline := 0, time.Now().Add(patience); len(open) > 0; i++ {
		for _, method := range []string{"pm_ok", "pm_declined", "pm_error_before", "pm_error_after"} {
			key := fmt.Sprintf("%s-%d", method, i)
			payment, _ := merchant.pay(t, s, "payments-1", key, method)
			merchant.post(t, s.url("payments-2", "/v1/payments"), key, payment)
		}
		forgetAnswered(t, base, open)
		if time.Now().After(deadline) {
			t.Fatalf("these panels have shown nothing: %v", open)
		}
	}

	var alerting struct {
		Data struct {
			Alerts []struct {
				Labels map[string]string
				State  string
			}
		}
	}
	getJSON(t, base+"/api/v1/alerts", &alerting)
	for _, alert := range alerting.Data.Alerts {
		require.NotEqual(t, "firing", alert.State, "in a stack that is well, this alarms: %v", alert.Labels)
	}

	for name, stop := range stops {
		require.NoError(t, stop(), "%s ends with 0 on SIGTERM", name)
	}
}

// prometheusConfig is compose.yaml's, for this machine's ports.
func (s *stack) prometheusConfig(t *testing.T) string {
	t.Helper()
	raw, err := os.ReadFile("observability/prometheus.yml")
	require.NoError(t, err)
	config := string(raw)
	for name, replica := range s.file.replicas() {
		target := name + replica.Environment["ADMIN_ADDR"]
		require.Contains(t, config, target)
		config = strings.ReplaceAll(config, target, "127.0.0.1:"+s.ports[name+"/ADMIN_ADDR"])
	}
	dir := t.TempDir()
	require.NoError(t, os.Mkdir(filepath.Join(dir, "rules"), 0o700))
	rules, err := os.ReadFile(rulesPath)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "rules", "payments.yaml"), rules, 0o600))
	path := filepath.Join(dir, "prometheus.yml")
	require.NoError(t, os.WriteFile(path, []byte(config), 0o600))
	return path
}

// forgetAnswered takes out the queries of the dashboard that have a number to show.
func forgetAnswered(t *testing.T, base string, open map[string]string) {
	t.Helper()
	for where, expr := range open {
		if strings.HasPrefix(expr, "label_values(") { // Grafana's own, not Prometheus's.
			delete(open, where)
			continue
		}
		var result struct {
			Status string
			Data   struct {
				Result []struct{ Value [2]any }
			}
		}
		getJSON(t, base+"/api/v1/query?query="+url.QueryEscape(asPromQL(expr)), &result)
		require.Equal(t, "success", result.Status, expr)
		for _, series := range result.Data.Result {
			if series.Value[1] != "NaN" {
				delete(open, where)
			}
		}
	}
}

func getJSON(t *testing.T, address string, into any) {
	t.Helper()
	response, err := http.Get(address)
	require.NoError(t, err)
	defer response.Body.Close()
	require.NoError(t, json.NewDecoder(response.Body).Decode(into))
}
