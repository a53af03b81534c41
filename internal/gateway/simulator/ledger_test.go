package simulator

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestLedger(t *testing.T) {
	t.Parallel()

	t.Run("OutlivesARestart", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 0)
		charged := b.post(t, "/charges", "k", chargeBody)
		declined := b.post(t, "/charges", "no", charging("pm_declined"))
		refunded := b.post(t, "/refunds", "r", refunding("k", 1))
		canceled := b.post(t, "/charges/c/cancel", "", "")
		before, refundsBefore := b.all(t, "/charges"), b.all(t, "/refunds")

		b = b.reopen(t)
		require.Equal(t, charged, b.post(t, "/charges", "k", chargeBody))
		require.Equal(t, declined, b.get(t, "/charges/no"))
		require.Equal(t, refunded, b.post(t, "/refunds", "r", refunding("k", 1)))
		require.Equal(t, canceled, b.get(t, "/charges/c"))
		require.Equal(t, 422, b.post(t, "/charges", "k", charging("pm_declined")).status)
		require.Equal(t, before, b.all(t, "/charges"))
		require.Equal(t, refundsBefore, b.all(t, "/refunds"))
	})

	t.Run("TornLastLineIsCutOff", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 0)
		charged := b.post(t, "/charges", "k1", chargeBody)
		b.post(t, "/charges", "k2", chargeBody)
		content, err := os.ReadFile(b.path)
		require.NoError(t, err)
		firstLine := strings.Index(string(content), "\n") + 1
		require.NoError(t, b.Close())
		for cut := firstLine; cut < len(content); cut++ { // wherever the crash came
			require.NoError(t, os.WriteFile(b.path, content[:cut], 0o600))
			again := &testBundle{open(t, b.path, 0), b.path}
			require.Equal(t, charged, again.get(t, "/charges/k1"))
			require.Equal(t, 404, again.get(t, "/charges/k2").status)
			if cut == len(content)-1 {
				again.post(t, "/charges", "k3", chargeBody)
				again = again.reopen(t)
				require.Len(t, again.all(t, "/charges"), 2)
			}
			require.NoError(t, again.Close())
		}
	})

	t.Run("NonsenseIsNotOpened", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 0)
		b.post(t, "/charges", "k", chargeBody)
		require.NoError(t, b.Close())
		content, err := os.ReadFile(b.path)
		require.NoError(t, err)
		for name, lines := range map[string]string{
			"line 2":         "{}\n",
			"line 3":         strings.Replace(string(content), `"k"`, `"j"`, 1) + "nonsense\n",
			"two last words": string(content),
		} {
			require.NoError(t, os.WriteFile(b.path, append(content, lines...), 0o600))
			for range 2 { // the error lets go of the lock
				_, err = Open(b.path, Options{})
				require.ErrorContains(t, err, name)
			}
		}
	})

	t.Run("TwoSimulatorsCannotHaveOne", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 0)
		_, err := Open(b.path, Options{})
		require.ErrorIs(t, err, ErrLedgerInUse)
		require.ErrorContains(t, err, b.path)
		b.reopen(t)
	})

	t.Run("CannotBeADirectory", func(t *testing.T) {
		t.Parallel()
		_, err := Open(t.TempDir(), Options{})
		require.ErrorContains(t, err, "open ledger")
	})

	t.Run("BrokenDiskLeavesTheKeyInWork", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 0)
		charged := b.post(t, "/charges", "k", chargeBody)
		healthy := b.ledger.file
		readOnly, err := os.Open(b.path)
		require.NoError(t, err)
		b.ledger.file = readOnly
		require.Equal(t, answer{}, b.post(t, "/charges", "j", chargeBody))
		require.Equal(t, "processing", b.get(t, "/charges/j").body["status"])
		require.Equal(t, answer{}, b.post(t, "/charges/c/cancel", "", ""))
		require.Equal(t, "processing", b.get(t, "/charges/c").body["status"])
		require.Equal(t, charged, b.post(t, "/charges", "k", chargeBody))

		b.ledger.file = healthy
		require.NoError(t, readOnly.Close())
		require.Equal(t, answer{}, b.post(t, "/charges", "i", chargeBody), "after half a line, another must not follow")
		content, err := os.ReadFile(b.path)
		require.NoError(t, err)
		require.Equal(t, 1, strings.Count(string(content), "\n"))
	})

	t.Run("ConcurrentRecordsAreWholeLines", func(t *testing.T) {
		t.Parallel()
		b := setup(t, 0)
		var all sync.WaitGroup
		for i := range 500 {
			all.Go(func() { b.post(t, "/charges", fmt.Sprint("k", i), chargeBody) })
		}
		all.Wait()
		require.Len(t, b.reopen(t).all(t, "/charges"), 500)
	})
}

// The whole process is killed while charges are being made: every charge that was answered is in the ledger, and no key has two.
func TestLedgerOutlivesKill9(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "ledger")
	process := exec.Command(os.Args[0])
	process.Env = append(os.Environ(), "SIMULATOR_TEST_LEDGER="+path)
	stdout, err := process.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, process.Start())
	t.Cleanup(func() { _ = process.Process.Kill() })
	address, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)

	var clients sync.WaitGroup
	var mu sync.Mutex
	answered := map[string]string{} // key → the charge as it was answered
	enough := make(chan struct{})
	for client := range 20 {
		clients.Go(func() {
			for i := 0; ; i++ {
				key := fmt.Sprintf("%d-%d", client, i)
				r, err := http.NewRequest("POST", "http://"+strings.TrimSpace(address)+"/charges", strings.NewReader(chargeBody))
				if err != nil {
					return
				}
				r.Header.Set("Idempotency-Key", key)
				resp, err := http.DefaultClient.Do(r)
				if err != nil {
					return // killed
				}
				body, err := io.ReadAll(resp.Body)
				resp.Body.Close()
				if err != nil {
					return
				}
				mu.Lock()
				answered[key] = string(body)
				if len(answered) == 200 {
					close(enough)
				}
				mu.Unlock()
			}
		})
	}
	<-enough
	require.NoError(t, process.Process.Kill())
	_ = process.Wait()
	clients.Wait()

	b := &testBundle{open(t, path, 0), path}
	for key, body := range answered {
		require.Contains(t, body, fmt.Sprintf(`"id":%q`, b.get(t, "/charges/"+key).body["id"]))
	}
	require.GreaterOrEqual(t, len(b.all(t, "/charges")), len(answered))
}

// serveUntilKilled is the process that the test kills.
func serveUntilKilled(path string) {
	s, err := Open(path, Options{Latency: time.Millisecond})
	if err != nil {
		panic(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Println(listener.Addr())
	panic(http.Serve(listener, s))
}
