package api_test

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"example.com/payments/internal/servicetest"
)

// raw sends bytes as they are, closes its half of the connection if told to, and returns the answer's status and problem.
func raw(t *testing.T, w *world, hangUp bool, headers, body string) (status int, slug string) {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(w.Replica.URL, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	_, err = fmt.Fprintf(conn, "POST /v1/orders HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n%s\r\n%s", w.Merchant.APIKey, headers, body)
	require.NoError(t, err)
	if hangUp {
		require.NoError(t, conn.(*net.TCPConn).CloseWrite())
	}
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(30*time.Second)))
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer response.Body.Close()
	content := make([]byte, 4096)
	n, _ := response.Body.Read(content)
	_, slug, _ = strings.Cut(string(content[:n]), servicetest.PublicURL+"/problems/")
	slug, _, _ = strings.Cut(slug, `"`)
	return response.StatusCode, slug
}

func TestBodyThatDoesNotArrive(t *testing.T) {
	t.Parallel()
	const typed, keyed = "Content-Type: application/json\r\n", "Idempotency-Key: k\r\n"
	facts(t, []fact{
		{"IsTooLargeWhenItSaysSoItself", func(t *testing.T) {
			status, slug := raw(t, setup(t, options{}), false, typed+keyed+"Content-Length: 1000000000\r\n", "")
			require.Equal(t, "413 content-too-large", fmt.Sprint(status, " ", slug))
		}},
		{"IsNotInvitedWhenItIsTooLarge", func(t *testing.T) {
			status, slug := raw(t, setup(t, options{}), false, typed+keyed+"Expect: 100-continue\r\nContent-Length: 70000\r\n", "")
			require.Equal(t, "413 content-too-large", fmt.Sprint(status, " ", slug))
		}},
		{"IsOfTheWrongTypeBeforeItIsTooLarge", func(t *testing.T) {
			status, slug := raw(t, setup(t, options{}), false, keyed+"Content-Type: text/plain\r\nContent-Length: 70000\r\n", "")
			require.Equal(t, "415 unsupported-media-type", fmt.Sprint(status, " ", slug))
		}},
		{"IsMalformed", func(t *testing.T) {
			status, slug := raw(t, setup(t, options{}), true, typed+keyed+"Content-Length: 100\r\n", "{")
			require.Equal(t, "400 request-malformed", fmt.Sprint(status, " ", slug))
		}},
		{"IsWithoutAKeyBeforeItIsMalformed", func(t *testing.T) {
			status, slug := raw(t, setup(t, options{}), true, typed+"Content-Length: 100\r\n", "{")
			require.Equal(t, "400 idempotency-key-missing", fmt.Sprint(status, " ", slug))
		}},
	})
}

// The answer of a payment in the background is that of the request which claimed its key, whoever has resumed it.
func TestResumedInTheBackgroundItAnswersForTheFirstRequest(t *testing.T) {
	t.Parallel()
	w := setup(t, options{GatewayTimeout: 5 * time.Second})
	req := payment.new(w.Client, "declined")
	off := w.Gateway.On(payment.post, servicetest.Always, servicetest.Answers(503, `{"error":"busy"}`))
	first := req.from(w.Client, "Prefer: respond-async").Is(202).Header.Get("X-Request-Id")
	w.Eventually("the first attempt has let go", func() bool { return w.Key(req.key).LeaseLeft <= 0 })
	off()
	a := req.from(w.Client, "Prefer: wait=20").Is(402).Replayed().Has("Original-Request-Id", first).Says("instance", first)
	a.Has("Preference-Applied", "wait=20")
}
