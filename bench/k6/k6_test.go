package k6

import (
	"bufio"
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"example.com/payments/internal/dbtest"
)

func TestMain(m *testing.M) { dbtest.Main(m) }

// TestScripts runs k6.test.mjs, with Node, against the service as its commands bring it up.
func TestScripts(t *testing.T) {
	node, err := exec.LookPath("node")
	if err != nil {
		const sentence = "the k6 scripts are not tested: that needs Node 20 or newer on PATH"
		if os.Getenv("CI") != "" {
			t.Fatal(sentence)
		}
		t.Skip(sentence)
	}
	program := filepath.Join(t.TempDir(), "payments")
	build, err := exec.CommandContext(t.Context(), "go", "build", "-o", program, "example.com/payments/cmd/payments").CombinedOutput()
	require.NoError(t, err, string(build))

	env := append(os.Environ(), "DATABASE_URL="+dbtest.New(t), "LISTEN_ADDR=127.0.0.1:0", "GATEWAY_LATENCY=50ms")
	run := func(args ...string) string {
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Env = env
		out, err := cmd.Output()
		require.NoError(t, err, "payments %v", args)
		return string(out)
	}
	run("migrate", "up")
	apiKey := regexp.MustCompile(`sk_live_\S+`).FindString(run("merchant", "create", "k6"))
	gateway := "http://" + serve(t, program, append(env, "GATEWAY_LEDGER="+filepath.Join(t.TempDir(), "ledger.jsonl")), "gateway")
	service := "http://" + serve(t, program, append(env, "GATEWAY_URL="+gateway), "serve")

	test := exec.CommandContext(t.Context(), node, "--test", "--test-reporter=tap", "k6.test.mjs")
	test.Env = append(os.Environ(), "BASE_URL="+service, "API_KEY="+apiKey)
	out, err := test.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Contains(t, string(out), "# pass 2", string(out))

	sent := 0
	for _, told := range regexp.MustCompile(`# keys sent: (\d+)`).FindAllStringSubmatch(string(out), -1) {
		n, err := strconv.Atoi(told[1])
		require.NoError(t, err)
		sent += n
	}
	// Three spread ones, and one for each second in which the hot ones ran.
	require.GreaterOrEqual(t, sent, 4, string(out))

	response, err := http.Get(gateway + "/charges")
	require.NoError(t, err)
	defer response.Body.Close()
	var ledger struct {
		Data []struct {
			Status string `json:"status"`
		} `json:"data"`
	}
	require.NoError(t, json.NewDecoder(response.Body).Decode(&ledger))
	approved := 0
	for _, charge := range ledger.Data {
		if charge.Status == "approved" {
			approved++
		}
	}
	require.Equal(t, sent, approved, "charges for the keys that were sent")
}

// serve starts a command that listens, and returns the address from its log. It is stopped when the test ends.
func serve(t *testing.T, program string, env []string, command string) string {
	t.Helper()
	cmd := exec.Command(program, command)
	cmd.Env = env
	log, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		_ = cmd.Wait()
	})
	addresses := make(chan string, 1)
	var said bytes.Buffer
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		address := regexp.MustCompile(`address=(\S+)`)
		for lines := bufio.NewScanner(log); lines.Scan(); { // To the end, or the program would wait for its log to be read.
			said.WriteString(lines.Text() + "\n")
			if found := address.FindStringSubmatch(lines.Text()); found != nil {
				select {
				case addresses <- found[1]:
				default:
				}
			}
		}
	}()
	select {
	case address := <-addresses:
		return address
	case <-ended:
		t.Fatalf("payments %s has ended: %s", command, said.String())
	case <-time.After(30 * time.Second):
		t.Fatalf("payments %s does not say where it listens", command)
	}
	return ""
}
