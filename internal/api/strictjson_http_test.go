package api_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"example.com/payments/internal/servicetest"
)

// What a body must be, on its way through real HTTP: the strict JSON of CONTRACT §2, rows 7 and 8 of §4. How the reader judges each text
// is in strictjson_test.go and fields_test.go; here is that nothing gets past it.
func TestBody(t *testing.T) {
	t.Parallel()
	facts(t, []fact{
		{"MustBeStrictJSON", bodyIsStrict},
		{"FaultsOfFieldsAreToldAllAtOnce", faultsAllAtOnce},
		{"CardNumbersAreRefusedAndLoggedNowhere", noCardNumbers},
		{"MustBeLabelledAsJSONInUTF8", bodyIsLabelled},
		{"MayHave64KiBAndNotAByteMore", bodyIsBounded},
		{"MayArriveAsItLikes", bodyArrives},
		{"ThatNeverArrivesWholeClaimsNothing", bodyIsCutShort},
		{"MayBeAbsentWhereNothingIsRequired", bodyIsAbsent},
	})
}

func bodyIsStrict(t *testing.T) {
	w := setup(t, options{})
	good := servicetest.PayBody(w.NewOrder(), "pm_ok")
	in := func(old, new string) string {
		require.Contains(t, good, old)
		return strings.Replace(good, old, new, 1)
	}
	for name, body := range map[string]string{
		"no object":                    "[" + good + "]",
		"a string":                     `"x"`,
		"null":                         `null`,
		"white space":                  " \n ",
		"cut short":                    good[:len(good)-1],
		"a duplicate name":             in(`"amount":1999`, `"amount":1999,"amount":1999`),
		"a duplicate name, escaped":    in(`"amount":1999`, `"amount":1999,"\u0061mount":1999`),
		"a duplicate name in metadata": in(`"amount":1999`, `"amount":1999,"metadata":{"a":"1","a":"1"}`),
		"an unknown name":              in(`"amount":1999`, `"amount":1999,"capture":true`),
		"a case variant":               in(`"amount"`, `"Amount"`),
		"a case variant beside it":     in(`"amount":1999`, `"amount":1999,"AMOUNT":1999`),
		"trailing data":                good + good,
		"a trailing comma":             in(`"amount":1999`, `"amount":1999,`) + ",",
		"a comment":                    good + "// thanks",
		"invalid UTF-8":                in("pm_ok", "pm_\xff"),
		"an overlong encoding":         in("pm_ok", "pm_\xc1\xa1"),
		"U+0000":                       in(`"amount":1999`, `"amount":1999,"metadata":{"a":"\u0000"}`),
		"U+0000 in a name":             in(`"amount":1999`, `"amount":1999,"metadata":{"\u0000":"a"}`),
		"a lone surrogate":             in(`"amount":1999`, `"amount":1999,"metadata":{"a":"\ud83d"}`),
		"an exponent":                  in("1999", "1999e0"),
		"an exponent that is exact":    in("1999", "1.999e3"),
		"a fraction of zero":           in("1999", "1999.0"),
		"a leading zero":               in("1999", "01999"),
		"minus zero":                   in("1999", "-0"),
		"a plus":                       in("1999", "+1999"),
		"NaN":                          in("1999", "NaN"),
		"single quotes":                strings.ReplaceAll(good, `"`, `'`),
		"17 levels":                    in(`"amount":1999`, `"amount":1999,"metadata":`+strings.Repeat(`{"a":`, 16)+`{}`+strings.Repeat("}", 16)),
		"10,000 levels":                strings.Repeat("[", 10_000),
		"10,000 levels, closed":        strings.Repeat(`{"a":`, 10_000) + "1" + strings.Repeat("}", 10_000),
		"a byte order mark":            "\uFEFF" + good,
		"UTF-16":                       utf16(good, false),
		"UTF-16 with a mark":           utf16(good, true),
		"a form":                       "order_id=1&amount=1999",
	} {
		a := w.Do("POST", "/v1/payments", "k", body)
		require.Equal(t, "400 request-malformed", fmt.Sprint(a.Status, " ", a.Slug()), name)
		require.Empty(t, a.Pointers(), name)
	}
	w.Do("POST", "/v1/payments", "k", "", "Content-Type: application/json").Is(400, "request-malformed") // nothing
	refusedWithoutATrace(t, w, "k")
	w.Do("POST", "/v1/payments", "k", good).Is(201).Fresh()
	// The other routes read with the same eyes.
	id := w.NewPayment("pm_ok")
	for _, path := range []string{"/v1/orders", "/v1/orders/" + w.NewOrder() + "/cancel", "/v1/payments/" + id + "/refunds"} {
		for _, body := range []string{`{"a":1}`, `[]`, `{"reason":"a","reason":"a"}`, ` `} {
			w.Do("POST", path, "other", body).Is(400, "request-malformed")
		}
	}
	require.False(t, w.HasKey("other"))
}

func utf16(s string, mark bool) string {
	var b strings.Builder
	if mark {
		b.WriteString("\xff\xfe")
	}
	for _, c := range []byte(s) {
		b.WriteByte(c)
		b.WriteByte(0)
	}
	return b.String()
}

func faultsAllAtOnce(t *testing.T) {
	w := setup(t, options{})
	many := map[string]string{}
	for i := range 51 {
		many[fmt.Sprint(i)] = ""
	}
	good := servicetest.PayBody(w.NewOrder(), "pm_ok")
	refunds := "/v1/payments/" + w.NewPayment("pm_ok") + "/refunds"
	key := w.NewKey()
	for _, test := range []struct {
		path, body string
		want       []string
	}{
		{"/v1/payments", `{}`, []string{"/order_id required", "/amount required", "/currency required", "/payment_method required"}},
		{"/v1/payments", `{"order_id":null,"amount":null,"currency":null,"payment_method":null,"metadata":null}`,
			[]string{"/order_id invalid_type", "/amount invalid_type", "/currency invalid_type", "/payment_method invalid_type", "/metadata invalid_type"}},
		{"/v1/payments", `{"order_id":7,"amount":"1999","currency":[],"payment_method":{},"metadata":"x"}`,
			[]string{"/order_id invalid_type", "/amount invalid_type", "/currency invalid_type", "/payment_method invalid_type", "/metadata invalid_type"}},
		{"/v1/payments", `{"order_id":"7","amount":0,"currency":"eur","payment_method":"card","metadata":{"a":1,"b/c~d":"` + strings.Repeat("x", 501) + `","":"e","` + strings.Repeat("n", 41) + `":""}}`,
			[]string{"/order_id invalid", "/amount too_small", "/currency invalid", "/payment_method invalid", "/metadata/a invalid_type", "/metadata/b~1c~0d too_long", "/metadata/ invalid", "/metadata/" + strings.Repeat("n", 41) + " too_long"}},
		{"/v1/payments", with(good, map[string]any{"amount": -1, "currency": "XTS", "payment_method": "pm_" + strings.Repeat("a", 65)}), []string{"/amount too_small", "/currency unknown_value", "/payment_method invalid"}},
		{"/v1/payments", with(good, map[string]any{"amount": 1_000_000_000_000, "currency": "BOV", "payment_method": "pm_OK"}), []string{"/amount too_large", "/currency unknown_value", "/payment_method invalid"}},
		{"/v1/payments", strings.Replace(good, "1999", "99999999999999999999999", 1), []string{"/amount too_large"}},
		{"/v1/payments", with(good, map[string]any{"metadata": many}), []string{"/metadata too_large"}},
		{"/v1/orders", `{"amount":0,"reference":""}`, []string{"/amount too_small", "/currency required", "/reference invalid"}},
		{"/v1/orders", `{"amount":1,"currency":"EUR","reference":"` + strings.Repeat("ü", 256) + `"}`, []string{"/reference too_long"}},
		{"/v1/orders", `{"amount":true,"currency":"DEM","reference":7,"metadata":[]}`, []string{"/amount invalid_type", "/currency unknown_value", "/reference invalid_type", "/metadata invalid_type"}},
		{refunds, `{"amount":0,"reason":""}`, []string{"/amount too_small", "/reason invalid"}},
		{refunds, `{"amount":null,"reason":null}`, []string{"/amount invalid_type", "/reason invalid_type"}},
		{refunds, `{"reason":"` + strings.Repeat("x", 256) + `"}`, []string{"/reason too_long"}},
	} {
		require.Equal(t, test.want, w.Do("POST", test.path, key, test.body).Is(400, "validation-failed").Pointers(), test.body)
	}
	require.False(t, w.HasKey(key))
	// And as long as it may be.
	longest := with(good, map[string]any{"payment_method": "pm_" + strings.Repeat("a", 64), "metadata": map[string]string{strings.Repeat("ü", 40): strings.Repeat("ü", 500)}})
	w.Do("POST", "/v1/payments", key, longest).Is(201)
	w.Do("POST", "/v1/orders", w.NewKey(), `{"amount":1,"currency":"EUR","reference":"`+strings.Repeat("ü", 255)+`"}`).Is(201)
}

func noCardNumbers(t *testing.T) {
	w := setup(t, options{})
	const card, grouped = "4242424242424242", "4242-4242 4242\u00a04242"
	good := servicetest.PayBody(w.NewOrder(), "pm_ok")
	id := w.NewPayment("pm_ok")
	for _, test := range []struct{ path, body, pointer string }{
		{"/v1/payments", with(good, map[string]any{"payment_method": card}), "/payment_method"},
		{"/v1/payments", with(good, map[string]any{"payment_method": "pm_" + card}), "/payment_method"},
		{"/v1/payments", with(good, map[string]any{"metadata": map[string]string{"note": grouped}}), "/metadata/note"},
		{"/v1/orders", `{"amount":1,"currency":"EUR","reference":"` + grouped + `"}`, "/reference"},
		{"/v1/orders", `{"amount":1,"currency":"EUR","metadata":{"a":"` + card + `"}}`, "/metadata/a"},
		{"/v1/payments/" + id + "/refunds", `{"reason":"` + grouped + `"}`, "/reason"},
	} {
		a := w.Do("POST", test.path, "secret-handle", test.body).Is(400, "validation-failed")
		require.Equal(t, []string{test.pointer + " invalid"}, a.Pointers(), test.body)
		require.NotContains(t, a.String(), "4242")
	}
	// One digit off, or not the whole value, it is no card number.
	w.Do("POST", "/v1/payments", "k", with(good, map[string]any{"metadata": map[string]string{"a": "4242424242424241", "b": "order " + card}})).Is(201)

	log := w.Replica.Log.String()
	require.Contains(t, log, "status=400")
	for _, secret := range []string{"4242", "secret-handle", w.Merchant.APIKey, strings.TrimPrefix(w.Merchant.APIKey, "sk_live_"), "pm_ok"} {
		require.NotContains(t, log, secret)
	}
}

func bodyIsLabelled(t *testing.T) {
	w := setup(t, options{})
	good := servicetest.PayBody(w.NewOrder(), "pm_ok")
	for _, label := range []string{
		"", "text/plain", "application/x-www-form-urlencoded", "application/problem+json", "application/json; charset=utf-16", "application/json; charset=iso-8859-1",
		"application/json; version=1", "application", "*/*", "application/json, application/json",
	} {
		w.Do("POST", "/v1/payments", "k", good, "Content-Type: "+label).Is(415, "unsupported-media-type").Has("Accept", "application/json")
	}
	w.Do("POST", "/v1/payments", "k", good, "Content-Type: application/json", "Content-Type: application/json").Is(415)
	for _, coding := range []string{"gzip", "br", "deflate, gzip", "identity, gzip", "aes128gcm"} {
		w.Do("POST", "/v1/payments", "k", good, "Content-Encoding: "+coding).Is(415, "unsupported-media-type").Has("Accept-Encoding", "identity").Has("Accept", "")
	}
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	_, _ = io.WriteString(z, good)
	require.NoError(t, z.Close())
	w.Do("POST", "/v1/payments", "k", zipped.String(), "Content-Encoding: gzip").Is(415, "unsupported-media-type")
	w.Do("POST", "/v1/payments", "k", zipped.String()).Is(400, "request-malformed")
	refusedWithoutATrace(t, w, "k")
	first := w.Do("POST", "/v1/payments", "k", good, "Content-Type: Application/JSON ; charset=\"UTF-8\"", "Content-Encoding: identity").Is(201).Fresh()
	w.Do("POST", "/v1/payments", "k", good, "Content-Type: application/json").Same(first).Replayed()
}

func bodyIsBounded(t *testing.T) {
	w := setup(t, options{})
	good := servicetest.PayBody(w.NewOrder(), "pm_ok")
	padded := good + strings.Repeat(" ", 64<<10-len(good))
	w.Do("POST", "/v1/payments", "k", padded+" ").Is(413, "content-too-large")
	w.Do("POST", "/v1/payments", "k", padded+strings.Repeat(" ", 1<<20)).Is(413, "content-too-large")
	// Without a length it is too large once it has become so, and the rest is not waited for.
	endless, stop := io.Pipe()
	defer endless.Close()
	go func() {
		for {
			if _, err := stop.Write(bytes.Repeat([]byte(" "), 8<<10)); err != nil {
				return
			}
		}
	}()
	a, err := w.Send(post(t, w, "k", endless))
	require.NoError(t, err)
	a.Is(413, "content-too-large")
	refusedWithoutATrace(t, w, "k")
	w.Do("POST", "/v1/payments", "k", padded).Is(201).Fresh()
}

// post is the request of a payment whose body comes from r, without a length.
func post(t *testing.T, w *world, key string, r io.Reader) *http.Request {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.Client.URL+"/v1/payments", r)
	require.NoError(t, err)
	request.ContentLength = -1
	request.Header.Set("Authorization", "Bearer "+w.Merchant.APIKey)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", key)
	return request
}

func bodyArrives(t *testing.T) {
	w := setup(t, options{})
	good := servicetest.PayBody(w.NewOrder(), "pm_ok")
	first := w.Do("POST", "/v1/payments", "k", good).Is(201)

	// In chunks, a byte at a time.
	slow, feed := io.Pipe()
	go func() {
		for i := range len(good) {
			_, _ = io.WriteString(feed, good[i:i+1])
		}
		feed.Close()
	}()
	a, err := w.Send(post(t, w, "k", slow))
	require.NoError(t, err)
	a.Same(first).Replayed()

	// A byte at a time on the wire, header and all.
	conn := dial(t, w)
	for i, text := 0, wire(w, "k", good); i < len(text); i++ {
		_, err := io.WriteString(conn, text[i:i+1])
		require.NoError(t, err)
	}
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, string(first.Body), string(body))

	// Only when it is asked for.
	asked := false
	request := post(t, w, "k", strings.NewReader(good))
	request = request.WithContext(httptrace.WithClientTrace(request.Context(), &httptrace.ClientTrace{Got100Continue: func() { asked = true }}))
	request.Header.Set("Expect", "100-continue")
	patient := &http.Transport{ExpectContinueTimeout: time.Minute}
	defer patient.CloseIdleConnections()
	response, err = patient.RoundTrip(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, 201, response.StatusCode)
	require.True(t, asked)

	// And who is not let in is not asked for it.
	request = post(t, w, "k", strings.NewReader(good))
	request = request.WithContext(httptrace.WithClientTrace(request.Context(), &httptrace.ClientTrace{Got100Continue: func() { t.Error("the body is asked for") }}))
	request.Header.Set("Expect", "100-continue")
	request.Header.Set("Authorization", "Bearer sk_live_nobodys")
	response, err = patient.RoundTrip(request)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	require.Equal(t, 401, response.StatusCode)
}

// wire is the request of a payment as it goes over the network.
func wire(w *world, key, body string) string {
	return fmt.Sprintf("POST /v1/payments HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nIdempotency-Key: %s\r\nContent-Length: %d\r\n\r\n%s",
		w.Merchant.APIKey, key, len(body), body)
}

func dial(t *testing.T, w *world) net.Conn {
	t.Helper()
	u, err := url.Parse(w.Client.URL)
	require.NoError(t, err)
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", u.Host)
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

func bodyIsCutShort(t *testing.T) {
	w := setup(t, options{})
	text := wire(w, "k", servicetest.PayBody(w.NewOrder(), "pm_ok"))
	conn := dial(t, w)
	_, err := io.WriteString(conn, text[:len(text)-1])
	require.NoError(t, err)
	require.NoError(t, conn.(*net.TCPConn).CloseWrite())
	answer, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.NotContains(t, string(answer), "HTTP/1.1 201")
	require.NotContains(t, string(answer), "HTTP/1.1 500")
	// A chunked body that stops without its last chunk.
	half, feed := io.Pipe()
	go func() {
		_, _ = io.WriteString(feed, `{"order_id":`)
		_ = feed.CloseWithError(errors.New("the client breaks off"))
	}()
	_, err = w.Send(post(t, w, "k", half))
	require.Error(t, err)
	w.Eventually("both are over", func() bool { return strings.Count(w.Replica.Log.String(), "route=/v1/payments status=400") == 2 })
	refusedWithoutATrace(t, w, "k")
}

func bodyIsAbsent(t *testing.T) {
	w := setup(t, options{})
	order, id := w.NewOrder(), w.NewPayment("pm_ok")
	for _, path := range []string{"/v1/orders/" + order + "/cancel", "/v1/payments/" + id + "/refunds"} {
		key := w.NewKey()
		first := w.Do("POST", path, key, "").Fresh()
		for _, label := range []string{"", "application/json", "text/plain"} {
			w.Do("POST", path, key, "", "Content-Type: "+label).Same(first).Replayed()
		}
		w.Do("POST", path, key, "{}").Same(first).Replayed()
		w.Do("POST", path, key, "{}", "Content-Type:").Is(415)
	}
	// Elsewhere nothing is not enough.
	w.Do("POST", "/v1/orders", "k", "").Is(415)
	w.Do("POST", "/v1/payments", "k", "", "Content-Type: application/json").Is(400, "request-malformed")
}
