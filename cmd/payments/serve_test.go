package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestBodyTime(t *testing.T) {
	t.Parallel()
	const limit = 200 * time.Millisecond

	t.Run("EndsTheReadingOfABodyThatDoesNotCome", func(t *testing.T) {
		t.Parallel()
		for name, handler := range map[string]http.HandlerFunc{
			"ThatIsRead": func(w http.ResponseWriter, r *http.Request) {
				_, _ = io.ReadAll(r.Body)
				w.WriteHeader(http.StatusBadRequest)
			},
			"ThatIsNotRead": func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusUnauthorized) },
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				server := httptest.NewServer(limitBodyTime(limit, handler))
				defer server.Close()
				conn, err := net.Dial("tcp", server.Listener.Addr().String())
				require.NoError(t, err)
				defer conn.Close()
				_, err = fmt.Fprint(conn, "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
				require.NoError(t, err)
				require.NoError(t, conn.SetReadDeadline(time.Now().Add(patience)))
				answer, err := io.ReadAll(conn)
				require.NoError(t, err, "the connection is closed")
				require.Contains(t, string(answer), "HTTP/1.1 40")
			})
		}
	})

	t.Run("IsNotTheTimeOfTheRequest", func(t *testing.T) {
		t.Parallel()
		server := httptest.NewServer(limitBodyTime(limit, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = io.ReadAll(r.Body)
			select {
			case <-r.Context().Done():
				w.WriteHeader(http.StatusGatewayTimeout)
			case <-time.After(3 * limit):
			}
		})))
		defer server.Close()
		for range 2 { // The second on the same connection.
			response, err := server.Client().Post(server.URL, "application/json", strings.NewReader("{}"))
			require.NoError(t, err)
			_, _ = io.Copy(io.Discard, response.Body)
			require.NoError(t, response.Body.Close())
			require.Equal(t, http.StatusOK, response.StatusCode, "its end passed for a hang-up")
		}
	})
}

func TestOptionsOfTheWholeServerIsARequestLikeAnyOther(t *testing.T) {
	t.Parallel()
	b := setup(t)
	s := b.ready(t)
	conn, err := net.Dial("tcp", strings.TrimPrefix(s.url, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	_, err = fmt.Fprint(conn, "OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	require.NoError(t, err)
	answer, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.Regexp(t, `^HTTP/1.1 404 `, string(answer))
	require.Contains(t, string(answer), "X-Request-Id: ")
	require.Contains(t, string(answer), "/problems/not-found")
}
