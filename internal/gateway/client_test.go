package gateway_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"example.com/payments/internal/gateway"
	"example.com/payments/internal/gateway/simulator"
	"example.com/payments/internal/payments"
)

var (
	charge = payments.Intent{Kind: payments.IntentCharge, Key: "c0ffee", Amount: 1000, Currency: "EUR", PaymentMethod: "pm_ok"}
	refund = payments.Intent{Kind: payments.IntentRefund, Key: "decaf", Amount: 400, Currency: "EUR", ChargeKey: "c0ffee"}

	approved  = payments.Outcome{Status: payments.OutcomeApproved, Reference: "ch_1"}
	canceled  = payments.Outcome{Status: payments.OutcomeCanceled}
	working   = payments.Outcome{Status: payments.OutcomeProcessing}
	neverSeen = payments.Outcome{Status: payments.OutcomeNeverSeen}
	notFound  = payments.Outcome{Status: payments.OutcomeNotFound}
)

const (
	approvedJSON   = `{"id":"ch_1","key":"c0ffee","status":"approved","amount":1000,"currency":"EUR","created_at":"2026-01-02T03:04:05Z"}`
	canceledJSON   = `{"key":"c0ffee","status":"canceled"}`
	processingJSON = `{"key":"c0ffee","status":"processing"}`
)

// call is one of the client's three methods.
type call func(*gateway.Client, context.Context, payments.Intent) (payments.Outcome, error)

var (
	doCharge call = (*gateway.Client).Charge
	doLookUp call = (*gateway.Client).LookUp
	doCancel call = (*gateway.Client).Cancel
)

// says is a gateway, or something in front of it, that gives everybody the same answer.
func says(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}
}

// raw is a server below HTTP: it is handed each connection on which a whole request has arrived.
func raw(t *testing.T, serve func(conn net.Conn, r *http.Request)) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				buffered := bufio.NewReader(conn)
				for {
					r, err := http.ReadRequest(buffered)
					if err != nil {
						return
					}
					if _, err := io.Copy(io.Discard, r.Body); err != nil {
						return
					}
					serve(conn, r)
				}
			}()
		}
	}()
	return "http://" + listener.Addr().String()
}

func newClient(t *testing.T, baseURL string) *gateway.Client {
	t.Helper()
	client, err := gateway.New(baseURL)
	require.NoError(t, err)
	t.Cleanup(client.CloseIdleConnections)
	return client
}

func serve(t *testing.T, handler http.Handler) string {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return server.URL
}

// check makes sure that an error is the wanted one of the three and no other, and tells nothing that it must not.
func check(t *testing.T, want payments.Outcome, wantErr error, got payments.Outcome, err error) {
	t.Helper()
	if wantErr == nil {
		require.NoError(t, err)
		require.Equal(t, want, got)
		return
	}
	require.Zero(t, got)
	for _, sentinel := range []error{payments.ErrNotSent, payments.ErrRefused, payments.ErrUnclear} {
		require.Equal(t, sentinel == wantErr, errors.Is(err, sentinel), "%v is %v", err, sentinel)
	}
	require.NotContains(t, err.Error(), "pm_")
	require.NotContains(t, err.Error(), "html")
	require.NotContains(t, err.Error(), "leak")
}

func TestAnswersAreClassified(t *testing.T) {
	t.Parallel()
	html := "<html>leak</html>"
	for _, tt := range []struct {
		name   string
		call   call
		answer http.HandlerFunc
		want   payments.Outcome
		err    error
	}{
		{"ChargeApproved", doCharge, says(200, approvedJSON), approved, nil},
		{"ChargeCreatedIsLikeOK", doCharge, says(201, approvedJSON), approved, nil},
		{"ChargeUnknownMembersAreIgnored", doCharge, says(200, `{"leak":{},`+approvedJSON[1:]), approved, nil},
		{"ChargeDeclined", doCharge, says(200, change(`"approved"`, `"declined","decline_code":"insufficient_funds"`)),
			payments.Outcome{Status: payments.OutcomeDeclined, Reference: "ch_1", DeclineCode: "insufficient_funds"}, nil},
		{"ChargeDeclinedWithoutReason", doCharge, says(200, change(`"approved"`, `"declined"`)),
			payments.Outcome{Status: payments.OutcomeDeclined, Reference: "ch_1", DeclineCode: "generic_decline"}, nil},
		{"ChargeCanceledByStatus409", doCharge, says(409, `{"error":"canceled"}`), canceled, nil},
		{"ChargeCanceledByBody", doCharge, says(200, canceledJSON), canceled, nil},

		{"ChargeRefusedBy500", doCharge, says(500, `{"error":"leak"}`), payments.Outcome{}, payments.ErrRefused},
		{"ChargeRefusedBy503", doCharge, says(503, "{}\n"), payments.Outcome{}, payments.ErrRefused},
		{"ChargeProxys503IsUnclear", doCharge, says(503, html), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeEmpty503IsUnclear", doCharge, says(503, ""), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeNull503IsUnclear", doCharge, says(503, "null"), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeHalf503IsUnclear", doCharge, says(503, `{"error":`), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeTwice503IsUnclear", doCharge, says(503, `{} {}`), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeJSON502IsUnclear", doCharge, says(502, `{"error":"leak"}`), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeJSON504IsUnclear", doCharge, says(504, `{"error":"leak"}`), payments.Outcome{}, payments.ErrUnclear},

		{"ChargeStillProcessingIsUnclear", doCharge, says(200, processingJSON), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeNeverSeenIsUnclear", doCharge, says(404, `{"error":"never_seen"}`), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeAcceptedIsUnclear", doCharge, says(202, approvedJSON), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeNoContentIsUnclear", doCharge, says(204, ""), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeInvalidIsUnclear", doCharge, says(400, `{"error":"invalid_request"}`), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeKeyReusedIsUnclear", doCharge, says(422, `{"error":"key_reused"}`), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeOther409IsUnclear", doCharge, says(409, `{"error":"leak"}`), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeProxys409IsUnclear", doCharge, says(409, html), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeTooManyRequestsIsUnclear", doCharge, says(429, `{}`), payments.Outcome{}, payments.ErrUnclear},

		{"ChargeHTMLIsUnclear", doCharge, says(200, html), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeEmptyIsUnclear", doCharge, says(200, ""), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeNullIsUnclear", doCharge, says(200, "null"), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeTrailingDataIsUnclear", doCharge, says(200, approvedJSON+"{}"), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeDuplicateNamesAreUnclear", doCharge, says(200, `{"status":"declined",`+approvedJSON[1:]), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeNamesInOtherCaseAreUnclear", doCharge, says(200, change(`"key"`, `"Key"`)), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeOtherKeyIsUnclear", doCharge, says(200, change("c0ffee", "leak")), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeCanceledOtherKeyIsUnclear", doCharge, says(200, `{"key":"leak","status":"canceled"}`), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeOtherAmountIsUnclear", doCharge, says(200, change("1000", "1001")), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeAmountAsStringIsUnclear", doCharge, says(200, change("1000", `"1000"`)), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeAmountAsFloatIsUnclear", doCharge, says(200, change("1000", "1e3")), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeNoAmountIsUnclear", doCharge, says(200, change(`"amount":1000,`, "")), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeOtherCurrencyIsUnclear", doCharge, says(200, change("EUR", "USD")), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeNoCurrencyIsUnclear", doCharge, says(200, change(`"currency":"EUR",`, "")), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeUnknownStatusIsUnclear", doCharge, says(200, change("approved", "leak")), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeInventedNeverSeenIsUnclear", doCharge, says(200, `{"key":"c0ffee","status":"never_seen"}`), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeWithoutIDIsUnclear", doCharge, says(200, change(`"ch_1"`, `""`)), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeUnprintableIDIsUnclear", doCharge, says(200, change("ch_1", `leak\u0000`)), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeEndlessIDIsUnclear", doCharge, says(200, change("ch_1", strings.Repeat("x", 256))), payments.Outcome{}, payments.ErrUnclear},
		{"ChargeEndlessDeclineCodeIsUnclear", doCharge, says(200, change(`"approved"`, `"declined","decline_code":"`+strings.Repeat("x", 256)+`"`)),
			payments.Outcome{}, payments.ErrUnclear},
		{"ChargeTooLongIsUnclear", doCharge, says(200, approvedJSON+strings.Repeat(" ", 1<<20)), payments.Outcome{}, payments.ErrUnclear},

		{"LookUpApproved", doLookUp, says(200, approvedJSON), approved, nil},
		{"LookUpProcessing", doLookUp, says(200, processingJSON), working, nil},
		{"LookUpCanceled", doLookUp, says(200, canceledJSON), canceled, nil},
		{"LookUpNeverSeen", doLookUp, says(404, `{"error":"leak"}`), neverSeen, nil},
		{"LookUpEmpty404IsNotTheGatewaysWord", doLookUp, says(404, ""), notFound, nil},
		{"LookUpProxys404IsNotTheGatewaysWord", doLookUp, says(404, html), notFound, nil},
		{"LookUpTexts404IsNotTheGatewaysWord", doLookUp, says(404, "404 page not found\n"), notFound, nil},
		{"LookUpOtherKeyIsUnclear", doLookUp, says(200, `{"key":"leak","status":"processing"}`), payments.Outcome{}, payments.ErrUnclear},
		{"LookUpOtherAmountIsUnclear", doLookUp, says(200, change("1000", "1001")), payments.Outcome{}, payments.ErrUnclear},
		{"LookUpIsNeverRefused", doLookUp, says(503, `{}`), payments.Outcome{}, payments.ErrUnclear},
		{"LookUpProxys502IsUnclear", doLookUp, says(502, html), payments.Outcome{}, payments.ErrUnclear},
		{"LookUpConflictIsUnclear", doLookUp, says(409, `{"error":"canceled"}`), payments.Outcome{}, payments.ErrUnclear},

		{"CancelCanceled", doCancel, says(200, canceledJSON), canceled, nil},
		{"CancelTooLate", doCancel, says(200, approvedJSON), approved, nil},
		{"CancelProcessingIsUnclear", doCancel, says(200, processingJSON), payments.Outcome{}, payments.ErrUnclear},
		{"CancelOtherKeyIsUnclear", doCancel, says(200, `{"key":"leak","status":"canceled"}`), payments.Outcome{}, payments.ErrUnclear},
		{"CancelUnknownRouteIsUnclear", doCancel, says(404, `{}`), payments.Outcome{}, payments.ErrUnclear},
		{"CancelIsNeverRefused", doCancel, says(500, `{}`), payments.Outcome{}, payments.ErrUnclear},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := tt.call(newClient(t, serve(t, tt.answer)), t.Context(), charge)
			check(t, tt.want, tt.err, got, err)
		})
	}
}

// change returns the approved charge with one thing about it different.
func change(from, to string) string { return strings.ReplaceAll(approvedJSON, from, to) }

func TestRefundsAnswerForTheirCharge(t *testing.T) {
	t.Parallel()
	accepted := payments.Outcome{Status: payments.OutcomeApproved, Reference: "re_1"}
	for _, tt := range []struct {
		name, body string
		want       payments.Outcome
		err        error
	}{
		{"Approved", `{"id":"re_1","key":"decaf","status":"approved","amount":400,"currency":"EUR","charge_key":"c0ffee"}`, accepted, nil},
		{"CurrencyAndChargeMayBeLeftOut", `{"id":"re_1","key":"decaf","status":"approved","amount":400}`, accepted, nil},
		{"OtherCurrencyIsUnclear", `{"id":"re_1","key":"decaf","status":"approved","amount":400,"currency":"USD"}`, payments.Outcome{}, payments.ErrUnclear},
		{"OtherChargeIsUnclear", `{"id":"re_1","key":"decaf","status":"approved","amount":400,"charge_key":"leak"}`, payments.Outcome{}, payments.ErrUnclear},
		{"OtherAmountIsUnclear", `{"id":"re_1","key":"decaf","status":"approved","amount":401}`, payments.Outcome{}, payments.ErrUnclear},
		{"TheChargeItselfIsUnclear", approvedJSON, payments.Outcome{}, payments.ErrUnclear},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			for _, call := range []call{doCharge, doLookUp, doCancel} {
				got, err := call(newClient(t, serve(t, says(200, tt.body))), t.Context(), refund)
				check(t, tt.want, tt.err, got, err)
			}
		})
	}
}

func TestRequestsAreTheContracts(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		call   call
		intent payments.Intent
		want   string
	}{
		{"Charge", doCharge, charge, `POST /v9/charges [c0ffee] {"amount":1000,"currency":"EUR","payment_method":"pm_ok"}`},
		{"LookUpCharge", doLookUp, charge, `GET /v9/charges/c0ffee [] `},
		{"CancelCharge", doCancel, charge, `POST /v9/charges/c0ffee/cancel [] `},
		{"Refund", doCharge, refund, `POST /v9/refunds [decaf] {"charge_key":"c0ffee","amount":400}`},
		{"LookUpRefund", doLookUp, refund, `GET /v9/refunds/decaf [] `},
		{"CancelRefund", doCancel, refund, `POST /v9/refunds/decaf/cancel [] `},
		{"KeysAreEscaped", doLookUp, payments.Intent{Kind: payments.IntentCharge, Key: "a/b?c"}, `GET /v9/charges/a%2Fb%3Fc [] `},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			requests := make(chan string, 1)
			url := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				body, _ := io.ReadAll(r.Body)
				requests <- fmt.Sprintf("%s %s %v %s", r.Method, r.URL.EscapedPath(), r.Header["Idempotency-Key"], body)
				if r.Header.Get("Accept-Encoding") != "" {
					t.Error("a compressed answer would have another length than the one that is limited")
				}
			}))
			_, err := tt.call(newClient(t, url+"/v9/"), t.Context(), tt.intent)
			require.ErrorIs(t, err, payments.ErrUnclear)
			require.Equal(t, tt.want, <-requests)
		})
	}
}

func TestNotSentMeansThatNothingLeft(t *testing.T) {
	t.Parallel()
	closed := httptest.NewServer(nil)
	closed.Close()
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections, and never speaks TLS on them
	require.NoError(t, err)
	t.Cleanup(func() { silent.Close() })
	strange := httptest.NewUnstartedServer(says(200, approvedJSON)) // its certificate is signed by nobody we know
	strange.Config.ErrorLog = log.New(io.Discard, "", 0)
	strange.StartTLS()
	t.Cleanup(strange.Close)
	ended, end := context.WithCancel(t.Context())
	end()
	handshaking, hangUp := context.WithCancel(t.Context())
	go func() {
		if conn, err := silent.Accept(); err == nil {
			hangUp()
			<-t.Context().Done()
			conn.Close()
		}
	}()

	for _, tt := range []struct {
		name   string
		url    string
		ctx    context.Context
		intent payments.Intent
		cause  error
	}{
		{"ConnectionRefused", closed.URL, t.Context(), charge, nil},
		{"ContextEndedBefore", serve(t, says(200, approvedJSON)), ended, charge, context.Canceled},
		{"ContextEndedDuringTheHandshake", "https://" + silent.Addr().String(), handshaking, charge, context.Canceled},
		{"HandshakeFailed", strange.URL, t.Context(), charge, nil},
		{"NoSuchKind", closed.URL, t.Context(), payments.Intent{Key: "c0ffee"}, nil},
		{"NoKey", closed.URL, t.Context(), payments.Intent{Kind: payments.IntentCharge}, nil},
		{"KeyIsNoHeader", serve(t, says(200, approvedJSON)), t.Context(), payments.Intent{Kind: payments.IntentCharge, Key: "a\nb"}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			got, err := newClient(t, tt.url).Charge(tt.ctx, tt.intent)
			check(t, payments.Outcome{}, payments.ErrNotSent, got, err)
			if tt.cause != nil {
				require.ErrorIs(t, err, tt.cause)
			}
		})
	}
}

func TestSilenceAfterSendingIsUnclear(t *testing.T) {
	t.Parallel()
	writes := func(text string) func(net.Conn, *http.Request) {
		return func(conn net.Conn, _ *http.Request) {
			_, _ = io.WriteString(conn, text)
			conn.Close()
		}
	}
	head := func(status string) string { return "HTTP/1.1 " + status + "\r\nContent-Length: 400\r\n\r\n" }
	for _, tt := range []struct {
		name  string
		serve func(net.Conn, *http.Request)
		cause error
	}{
		{"ConnectionClosedAfterTheRequest", writes(""), io.EOF},
		{"ConnectionResetAfterTheRequest", func(conn net.Conn, _ *http.Request) {
			_ = conn.(*net.TCPConn).SetLinger(0)
			conn.Close()
		}, nil},
		{"BodyCutShort", writes(head("200 OK") + approvedJSON), io.ErrUnexpectedEOF},
		{"RefusalCutShort", writes(head("503 Service Unavailable") + "{}"), io.ErrUnexpectedEOF},
		{"NeverSeenCutShort", writes(head("404 Not Found")), io.ErrUnexpectedEOF},
		{"ChunkedBodyCutShort", writes("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{\"id\""), io.ErrUnexpectedEOF},
		{"ChunksAreNonsense", writes("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nleak\r\n"), nil},
		{"TrailerIsNonsense", writes("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nleak\r\n\r\n"), nil},
		{"HeadCutShort", writes("HTTP/1.1 200 OK\r\nContent-"), nil},
		{"NotHTTP", writes("220 leak.example.com ESMTP\r\n"), nil},
		{"HeaderEchoesTheRequest", writes("HTTP/1.1 200 OK\r\n\"payment_method\" \"pm_ok\"\r\n\r\n"), nil},
		{"ProtocolSwitchedAndSilent", func(conn net.Conn, _ *http.Request) {
			_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: leak\r\n\r\n")
		}, nil},
		// The context ends as soon as the request has arrived and been treated so:
		{"NoAnswer", func(net.Conn, *http.Request) {}, context.Canceled},
		{"NoBody", func(conn net.Conn, _ *http.Request) { _, _ = io.WriteString(conn, head("200 OK")) }, context.Canceled},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			for _, call := range []call{doCharge, doLookUp, doCancel} {
				ctx, end := context.WithCancel(t.Context())
				defer end()
				url := raw(t, func(conn net.Conn, r *http.Request) {
					tt.serve(conn, r)
					if tt.cause == context.Canceled {
						end()
					}
				})
				got, err := call(newClient(t, url), ctx, charge)
				check(t, payments.Outcome{}, payments.ErrUnclear, got, err)
				if tt.cause != nil {
					require.ErrorIs(t, err, tt.cause)
				}
			}
		})
	}
}

func TestChargeIsSentOnceEvenIfAReusedConnectionDies(t *testing.T) {
	t.Parallel()
	var charges atomic.Int32
	url := raw(t, func(conn net.Conn, r *http.Request) {
		if r.Method == http.MethodGet {
			fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(processingJSON), processingJSON)
			return
		}
		charges.Add(1)
		conn.Close()
	})
	client := newClient(t, url)
	_, err := client.LookUp(t.Context(), charge) // leaves an idle connection behind
	require.NoError(t, err)
	got, err := client.Charge(t.Context(), charge)
	check(t, payments.Outcome{}, payments.ErrUnclear, got, err)
	require.EqualValues(t, 1, charges.Load())
}

func TestRedirectsAreNotFollowed(t *testing.T) {
	t.Parallel()
	for _, status := range []int{301, 302, 303, 307, 308} {
		elsewhere := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			t.Errorf("status %d: %s was followed", status, r.Method)
		}))
		url := serve(t, http.RedirectHandler(elsewhere, status))
		for _, call := range []call{doCharge, doLookUp, doCancel} {
			got, err := call(newClient(t, url), t.Context(), charge)
			check(t, payments.Outcome{}, payments.ErrUnclear, got, err)
		}
	}
}

func TestConnectionsAreKept(t *testing.T) {
	t.Parallel()
	const inFlight = 200 // well over the two idle connections that net/http keeps by default
	var dialed atomic.Int32
	arrived, gate := make(chan struct{}, inFlight), make(chan struct{})
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		arrived <- struct{}{}
		<-gate
		_, _ = io.WriteString(w, processingJSON)
	}))
	server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			dialed.Add(1)
		}
	}
	server.Start()
	t.Cleanup(server.Close)
	client := newClient(t, server.URL)

	for range 2 {
		results := make(chan error, inFlight)
		for range inFlight {
			go func() {
				_, err := client.LookUp(t.Context(), charge)
				results <- err
			}()
		}
		for range inFlight {
			<-arrived
		}
		for range inFlight {
			gate <- struct{}{}
		}
		for range inFlight {
			require.NoError(t, <-results)
		}
	}
	// A connection is idle a moment after its answer is read, so a few of the second wave may have found none.
	require.Less(t, dialed.Load(), int32(inFlight*3/2))
}

func TestNewWantsAPlainURL(t *testing.T) {
	t.Parallel()
	for _, bad := range []string{"", "gateway", "gateway:8081", "ftp://gateway", "http://", "http://:8081", "http://user:leak@gateway",
		"http://gateway?leak=1", "http://gateway#leak", "http://gateway:leak", "http://[::1", "http:gateway"} {
		_, err := gateway.New(bad)
		require.Error(t, err, bad)
		require.NotContains(t, err.Error(), "leak")
	}
	for _, good := range []string{"http://gateway", "https://gateway:8081/", "http://[::1]:8081/v1"} {
		_, err := gateway.New(good)
		require.NoError(t, err, good)
	}
}

func TestTheSimulatorAndTheClientMeanTheSame(t *testing.T) {
	t.Parallel()
	sim, err := simulator.Open(filepath.Join(t.TempDir(), "ledger"), simulator.Options{})
	require.NoError(t, err)
	url := serve(t, sim)
	t.Cleanup(func() { require.NoError(t, sim.Close()) })
	client := newClient(t, url)

	is := func(status payments.OutcomeStatus, declineCode string) func(*testing.T, payments.Outcome, error) {
		return func(t *testing.T, got payments.Outcome, err error) {
			require.NoError(t, err)
			require.Equal(t, status, got.Status)
			require.Equal(t, declineCode, got.DeclineCode)
		}
	}
	isErr := func(sentinel error) func(*testing.T, payments.Outcome, error) {
		return func(t *testing.T, got payments.Outcome, err error) { check(t, payments.Outcome{}, sentinel, got, err) }
	}
	for _, tt := range []struct {
		token        string
		first, later func(*testing.T, payments.Outcome, error)
	}{
		{"pm_ok", is(payments.OutcomeApproved, ""), is(payments.OutcomeApproved, "")},
		{"pm_declined", is(payments.OutcomeDeclined, "generic_decline"), is(payments.OutcomeDeclined, "generic_decline")},
		{"pm_insufficient_funds", is(payments.OutcomeDeclined, "insufficient_funds"), is(payments.OutcomeDeclined, "insufficient_funds")},
		{"pm_error_before", isErr(payments.ErrRefused), is(payments.OutcomeNeverSeen, "")},
		{"pm_error_after", isErr(payments.ErrRefused), is(payments.OutcomeApproved, "")},
		{"pm_hang_after", isErr(payments.ErrUnclear), is(payments.OutcomeApproved, "")},
		{"pm_drop_after", isErr(payments.ErrUnclear), is(payments.OutcomeApproved, "")},
	} {
		for _, kind := range []payments.IntentKind{payments.IntentCharge, payments.IntentRefund} {
			t.Run(tt.token+"/"+string(kind), func(t *testing.T) {
				t.Parallel()
				intent := payments.Intent{Kind: kind, Key: tt.token, Amount: 1000, Currency: "EUR", PaymentMethod: tt.token}
				if kind == payments.IntentRefund {
					charged := payments.Intent{Kind: payments.IntentCharge, Key: "for_" + tt.token, Amount: 1000, Currency: "EUR",
						PaymentMethod: strings.Replace(tt.token, "pm_", "pm_refund_", 1)}
					got, err := client.Charge(t.Context(), charged)
					is(payments.OutcomeApproved, "")(t, got, err)
					intent.ChargeKey, intent.PaymentMethod = charged.Key, ""
				}
				got, err := client.LookUp(t.Context(), intent)
				is(payments.OutcomeNeverSeen, "")(t, got, err)

				ctx, end := context.WithCancel(t.Context())
				defer end()
				if tt.token == "pm_hang_after" {
					go func() { // hang up once the money has moved
						for ctx.Err() == nil {
							if found, err := client.LookUp(ctx, intent); err == nil && found.Final() {
								end()
							}
						}
					}()
				}
				got, err = client.Charge(ctx, intent)
				tt.first(t, got, err)
				found, err := client.LookUp(t.Context(), intent)
				tt.later(t, found, err)
				if found.Final() {
					again, err := client.Charge(t.Context(), intent)
					require.NoError(t, err)
					require.Equal(t, found, again)
					tooLate, err := client.Cancel(t.Context(), intent)
					require.NoError(t, err)
					require.Equal(t, found, tooLate)
					return
				}
				got, err = client.Cancel(t.Context(), intent)
				is(payments.OutcomeCanceled, "")(t, got, err)
				got, err = client.Charge(t.Context(), intent)
				is(payments.OutcomeCanceled, "")(t, got, err)
			})
		}
	}
}
