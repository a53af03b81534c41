package servicetest

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Caller is a merchant's client for benchmarks: one kept connection, and of the answer it looks at the status alone. It shares the
// processors with what is measured, and [Client], which checks every answer, would take more of them than the service does.
type Caller struct {
	host   string
	apiKey string
	conn   net.Conn
	reader *bufio.Reader
}

// NewCallers makes n of them for the service at url. Each connects when it first has something to say, for the service does not wait long for
// somebody who says nothing, and hangs up when the benchmark ends.
func NewCallers(t testing.TB, n int, url, apiKey string) []*Caller {
	t.Helper()
	callers := make([]*Caller, n)
	for i := range callers {
		callers[i] = &Caller{host: strings.TrimPrefix(url, "http://"), apiKey: apiKey}
	}
	t.Cleanup(func() {
		for _, c := range callers {
			if c.conn != nil {
				c.conn.Close()
			}
		}
	})
	return callers
}

// Send sends a request, waits for the answer whole, and returns an error unless it has the status. An empty key or body is none. It is for
// one goroutine at a time.
func (c *Caller) Send(status int, method, path, key, body string) error {
	if c.conn == nil {
		conn, err := net.Dial("tcp", c.host)
		if err != nil {
			return err
		}
		c.conn, c.reader = conn, bufio.NewReader(conn)
	}
	var request strings.Builder
	fmt.Fprintf(&request, "%s %s HTTP/1.1\r\nHost: %s\r\nAuthorization: Bearer %s\r\n", method, path, c.host, c.apiKey)
	if key != "" {
		fmt.Fprintf(&request, "Idempotency-Key: %s\r\n", key)
	}
	if body != "" {
		fmt.Fprintf(&request, "Content-Type: application/json\r\nContent-Length: %d\r\n", len(body))
	}
	request.WriteString("\r\n" + body)
	if _, err := io.WriteString(c.conn, request.String()); err != nil {
		return err
	}
	response, err := http.ReadResponse(c.reader, nil)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode != status {
		err = fmt.Errorf("%s %s is answered with %d: %s", method, path, response.StatusCode, content)
	}
	return err
}

// AllOf has the callers send n requests as fast as they are answered, and returns how many that were in a second.
func AllOf(t testing.TB, callers []*Caller, n int, send func(c *Caller, i int) error) (perSecond float64) {
	t.Helper()
	var next atomic.Int64
	var done sync.WaitGroup
	started := time.Now()
	for _, caller := range callers {
		done.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				if err := send(caller, int(i)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	done.Wait()
	return float64(n) / time.Since(started).Seconds()
}

// Took is how long a request took that was due at that time.
type Took struct {
	Due  time.Time
	Took time.Duration
}

// Every has one of the callers send a request each time the interval has passed, whether or not those before are answered, until stop is
// closed, and returns how long each took. What waits for a caller to be free is taking its time already.
func Every(t testing.TB, callers []*Caller, interval time.Duration, stop <-chan struct{}, send func(c *Caller, i int) error) []Took {
	t.Helper()
	type job struct {
		i   int
		due time.Time
	}
	jobs := make(chan job, 1<<16)
	var mu sync.Mutex
	var all []Took
	var done sync.WaitGroup
	for _, caller := range callers {
		done.Go(func() {
			var mine []Took
			for j := range jobs {
				if err := send(caller, j.i); err != nil {
					t.Error(err)
					break
				}
				mine = append(mine, Took{j.due, time.Since(j.due)})
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, mine...)
		})
	}
	started := time.Now()
	for i := 0; ; i++ {
		select {
		case <-stop:
			close(jobs)
			done.Wait()
			return all
		case <-time.After(time.Until(started.Add(time.Duration(i) * interval))):
			// By the clock and not by the plan: that the benchmark's own process comes late is not the service's doing.
			jobs <- job{i, time.Now()}
		}
	}
}

// For is a stop for [Every] that comes after a while.
func For(d time.Duration) <-chan struct{} {
	stop := make(chan struct{})
	time.AfterFunc(d, func() { close(stop) })
	return stop
}

// P99 is the time that one of a hundred requests exceeds.
func P99(all []Took) time.Duration {
	if len(all) == 0 {
		return 0
	}
	slices.SortFunc(all, func(a, b Took) int { return int(a.Took - b.Took) })
	return all[len(all)*99/100].Took
}

// TakeTurns has two loads take turns, each the first in every other pair, so that whatever else the machine does meets both. It returns the
// median of each one's rates, and of the ratios of the first's to the second's, pair by pair.
func TakeTurns(pairs int, first, second func() (perSecond float64)) (firstRate, secondRate, ratio float64) {
	var firsts, seconds, ratios []float64
	for i := range pairs {
		if i%2 == 0 {
			firsts, seconds = append(firsts, first()), append(seconds, second())
		} else {
			seconds, firsts = append(seconds, second()), append(firsts, first())
		}
		ratios = append(ratios, firsts[i]/seconds[i])
	}
	return Median(firsts), Median(seconds), Median(ratios)
}

// Median is the one in the middle, which a neighbour on the machine moves less than the mean.
func Median(figures []float64) float64 {
	sorted := slices.Sorted(slices.Values(figures))
	return sorted[len(sorted)/2]
}
