package api

import (
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.yaml.in/yaml/v3"
	"golang.org/x/net/html"

	"example.com/payments/internal/idempotency"
)

// The pages need no payments, no merchants and no database.
func newPagesServer() *Server {
	return New(Config{
		PublicURL:    "https://payments.example",
		KeyRetention: 24*time.Hour + time.Second/2,
		InFlightMax:  10*time.Second + time.Millisecond,
		Log:          slog.New(slog.DiscardHandler),
	})
}

// pageReader asks a server of its own for pages, over real HTTP.
type pageReader struct {
	url  string
	http *http.Client
}

func newPageReader(t *testing.T) *pageReader {
	t.Helper()
	server := httptest.NewServer(newPagesServer())
	t.Cleanup(server.Close)
	// What the server sends is what the test wants to see, so nothing is to be decompressed on the way.
	return &pageReader{url: server.URL, http: &http.Client{Transport: &http.Transport{DisableCompression: true, DisableKeepAlives: true}}}
}

// do sends a request with pairs of header names and values.
func (r *pageReader) do(t *testing.T, method, path string, header ...string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, r.url+path, http.NoBody)
	require.NoError(t, err)
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	res, err := r.http.Do(req)
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return res, string(body)
}

func (r *pageReader) get(t *testing.T, path string, header ...string) (*http.Response, string) {
	t.Helper()
	res, body := r.do(t, http.MethodGet, path, header...)
	require.Equal(t, http.StatusOK, res.StatusCode, body)
	return res, body
}

// allPages are the paths of every page there is.
func allPages() []string {
	paths := []string{"/docs", "/docs/idempotency"}
	for _, problemType := range problemTypes {
		paths = append(paths, "/problems/"+problemType.slug)
	}
	return paths
}

// parsedPage is what the HTML parser makes of a page.
type parsedPage struct {
	text            string // all that can be read
	links           []string
	styles, scripts []string
}

func parsePage(t *testing.T, page string) (parsed parsedPage) {
	t.Helper()
	root, err := html.Parse(strings.NewReader(page))
	require.NoError(t, err)
	var words []string
	for node := range root.Descendants() {
		switch {
		case node.Type == html.TextNode && node.Parent.Data == "style":
			parsed.styles = append(parsed.styles, node.Data)
		case node.Type == html.TextNode && node.Parent.Data == "script":
			parsed.scripts = append(parsed.scripts, node.Data)
		case node.Type == html.TextNode:
			words = append(words, strings.Fields(node.Data)...)
		}
		for _, attribute := range node.Attr {
			if attribute.Key == "href" || attribute.Key == "src" || attribute.Key == "action" {
				parsed.links = append(parsed.links, attribute.Val)
			}
		}
	}
	parsed.text = strings.Join(words, " ")
	return parsed
}

func TestProblemPages(t *testing.T) {
	t.Parallel()
	reader := newPageReader(t)

	for _, problemType := range problemTypes {
		t.Run(problemType.slug, func(t *testing.T) {
			t.Parallel()
			path := "/problems/" + problemType.slug

			res, body := reader.get(t, path)
			require.Equal(t, "text/html; charset=utf-8", res.Header.Get("Content-Type"))
			text := parsePage(t, body).text
			for _, part := range []string{problemType.title, problemType.detail, problemType.money, problemType.key, retryActions[retryOf(problemType)]} {
				require.Contains(t, text, part)
			}
			require.Contains(t, text, fmt.Sprintf("%d %s", problemType.status, problemType.slug))

			res, body = reader.get(t, path, "Accept", "application/json")
			require.Equal(t, "application/json", res.Header.Get("Content-Type"))
			var meaning answerMeaning
			require.NoError(t, json.Unmarshal([]byte(body), &meaning))
			require.Equal(t, newPagesServer().meaningOf(problemType), meaning)
			require.Equal(t, "https://payments.example"+path, *meaning.Type)
		})
	}

	t.Run("UnknownSlugIsNotFound", func(t *testing.T) {
		t.Parallel()
		res, body := reader.do(t, http.MethodGet, "/problems/no-such-problem", "Accept", "text/html")
		require.Equal(t, http.StatusNotFound, res.StatusCode)
		require.Equal(t, mediaTypeProblem, res.Header.Get("Content-Type"))
		require.Contains(t, body, "/problems/not-found")
	})
}

func TestKeyPolicy(t *testing.T) {
	t.Parallel()
	reader := newPageReader(t)

	t.Run("JSONIsTheTableOfProblems", func(t *testing.T) {
		t.Parallel()
		_, body := reader.get(t, "/docs/idempotency", "Accept", "application/json")
		var policy keyPolicy
		require.NoError(t, json.Unmarshal([]byte(body), &policy))

		require.Equal(t, idempotency.KeyPattern, policy.KeyPattern)
		require.Equal(t, idempotency.CurrentRecipe, policy.FingerprintVersion)
		require.EqualValues(t, 24*60*60, policy.ReplayTTLSeconds, "rounded down: no answer is kept shorter than this")
		require.EqualValues(t, 11, policy.InFlightMaxSeconds, "rounded up: no attempt takes longer than this")

		rows := map[string]answerMeaning{}
		for _, row := range policy.Answers {
			rows[row.Name] = row
		}
		require.Len(t, rows, len(policy.Answers), "names are unique")
		require.Len(t, rows, len(successes)+len(problemTypes))
		for _, problemType := range problemTypes {
			require.Equal(t, newPagesServer().meaningOf(problemType), rows[problemType.slug])
		}
		for _, success := range successes {
			require.Equal(t, success, rows[success.Name])
			require.Contains(t, body, `"name":"`+success.Name+`","type":null`)
		}
	})

	t.Run("PageHasARowForEveryAnswer", func(t *testing.T) {
		t.Parallel()
		_, body := reader.get(t, "/docs/idempotency")
		page := parsePage(t, body)
		for _, row := range newPagesServer().keyPolicy().Answers {
			stored := map[bool]string{true: "yes", false: "no"}[row.Stored]
			require.Contains(t, page.text, fmt.Sprintf("%d %s %s %s %s %s %s", row.Status, row.Name, row.Title, stored, row.Retry, row.Key, row.Action))
		}
		require.Contains(t, page.text, idempotency.KeyPattern)
		require.Contains(t, page.text, "for 24 hours after the answer is final")
		require.Contains(t, page.text, "for at most 11 seconds an attempt")
	})

	t.Run("RetrySaysWhatTheContractSays", func(t *testing.T) {
		t.Parallel()
		// A new problem belongs into one of these lists; the rules in retryOf may put it into the wrong one.
		want := map[string][]string{
			retrySameKey: {
				"idempotency-in-progress", "order-payment-in-progress", "rate-limited", "internal-error", "gateway-unavailable",
				"storage-unavailable", "shutting-down", "overloaded", "fingerprint-recipe-unknown", "gateway-timeout",
			},
			retryNewKey: {
				"payment-declined", "payment-failed", "refund-declined", "refund-failed", "idempotency-key-expired", "idempotency-key-reused",
			},
			retryNo: {"order-not-open", "payment-not-refundable", "refund-exceeds-payment"},
			retryCorrected: {
				"request-malformed", "validation-failed", "idempotency-key-missing", "idempotency-key-invalid", "amount-mismatch", "unauthorized",
				"not-found", "order-not-found", "method-not-allowed", "content-too-large", "unsupported-media-type",
			},
		}
		got := map[string][]string{}
		for _, problemType := range problemTypes {
			retry := retryOf(problemType)
			got[retry] = append(got[retry], problemType.slug)
		}
		for retry, slugs := range want {
			require.ElementsMatch(t, slugs, got[retry], retry)
			require.NotEmpty(t, retryActions[retry])
		}
		require.Len(t, got, len(want))
	})

	t.Run("OnlyFinalAnswersAreStored", func(t *testing.T) {
		t.Parallel()
		for _, row := range newPagesServer().keyPolicy().Answers {
			final := row.Status == http.StatusOK || row.Status == http.StatusCreated || row.Status == http.StatusPaymentRequired
			require.Equal(t, final, row.Stored, row.Name)
		}
	})
}

func TestPageNegotiation(t *testing.T) {
	t.Parallel()
	reader := newPageReader(t)

	const wantHTML, wantJSON = "text/html; charset=utf-8", "application/json"
	for accept, want := range map[string]string{
		"":                                wantHTML,
		"*/*":                             wantHTML,
		"text/html":                       wantHTML,
		"application/json":                wantJSON,
		"Application/JSON":                wantJSON,
		"application/*":                   wantJSON,
		"application/json;charset=utf-8":  wantJSON,
		"application/json, */*":           wantJSON, // names JSON, covers HTML
		"application/json, text/html":     wantHTML,
		"application/json;q=0.9, */*":     wantHTML,
		"application/json, text/*;q=0.9":  wantJSON,
		"text/html;q=0.5,application/*":   wantJSON,
		"text/html, application/json;q=1": wantHTML,
		"text/html;q=0, */*":              wantJSON,
		"application/json;q=0":            wantHTML,
		"application/json;q=0, */*":       wantHTML,
		"application/json ; Q=0.8":        wantJSON,
		"application/json;q=high":         wantHTML, // cannot be read
		"application/json;q=7":            wantHTML,
		"image/png":                       wantHTML, // better something to read than 406
		"text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8": wantHTML, // a browser
	} {
		t.Run(accept, func(t *testing.T) {
			t.Parallel()
			for _, path := range []string{"/docs/idempotency", "/problems/gateway-timeout"} {
				res, _ := reader.get(t, path, "Accept", accept)
				require.Equal(t, want, res.Header.Get("Content-Type"))
				require.Equal(t, "Accept", res.Header.Get("Vary"))
			}
		})
	}

	t.Run("SeveralFieldLinesAreOneList", func(t *testing.T) {
		t.Parallel()
		res, _ := reader.get(t, "/docs/idempotency", "Accept", "text/html;q=0.1", "Accept", "application/json")
		require.Equal(t, wantJSON, res.Header.Get("Content-Type"))
	})
	t.Run("NoAcceptIsHTML", func(t *testing.T) {
		t.Parallel()
		require.False(t, prefersJSON(nil))
	})
}

func TestPages(t *testing.T) {
	t.Parallel()
	reader := newPageReader(t)

	t.Run("LoadNothingAndRunNothingButWhatIsInThem", func(t *testing.T) {
		t.Parallel()
		for _, path := range allPages() {
			res, body := reader.get(t, path)
			page := parsePage(t, body)
			policy := map[string][]string{}
			for directive := range strings.SplitSeq(res.Header.Get("Content-Security-Policy"), "; ") {
				words := strings.Fields(directive)
				policy[words[0]] = words[1:]
			}
			require.Equal(t, []string{"'none'"}, policy["default-src"])
			require.Equal(t, []string{"'none'"}, policy["frame-ancestors"])
			require.Len(t, page.styles, 1)
			require.Equal(t, []string{digestSource(page.styles[0])}, policy["style-src"])
			require.Len(t, policy["script-src"], len(page.scripts))
			for _, script := range page.scripts {
				require.Contains(t, policy["script-src"], digestSource(script))
			}
			for _, link := range page.links {
				parsed, err := url.Parse(link)
				require.NoError(t, err)
				require.True(t, parsed.Host == "" && (parsed.Scheme == "" || link == "data:,"), link)
			}
		}
	})

	t.Run("LinksLeadSomewhere", func(t *testing.T) {
		t.Parallel()
		followed := map[string]bool{}
		for _, path := range allPages() {
			_, body := reader.get(t, path)
			for _, link := range parsePage(t, body).links {
				target, err := (&url.URL{Path: path}).Parse(link)
				require.NoError(t, err)
				if target.Scheme == "" && !followed[target.Path] {
					followed[target.Path] = true
					reader.get(t, target.Path)
				}
			}
		}
		require.Len(t, followed, len(allPages())+1, "every page, and openapi.yaml, is linked to")
	})

	t.Run("AreToldFromOtherTypesAndTellNobody", func(t *testing.T) {
		t.Parallel()
		for _, path := range append(allPages(), "/openapi.yaml") {
			res, _ := reader.get(t, path, "Accept", "application/json")
			require.Equal(t, "nosniff", res.Header.Get("X-Content-Type-Options"))
			require.Equal(t, "no-referrer", res.Header.Get("Referrer-Policy"))
			require.Contains(t, res.Header.Get("Content-Security-Policy"), "default-src 'none'")
		}
	})

	t.Run("AreNotSentTwiceToWhoHasThem", func(t *testing.T) {
		t.Parallel()
		for _, path := range []string{"/docs", "/docs/idempotency", "/problems/not-found", "/openapi.yaml"} {
			res, _ := reader.get(t, path)
			require.Equal(t, "no-cache", res.Header.Get("Cache-Control"))
			etag := res.Header.Get("ETag")
			for _, known := range []string{etag, `W/"other", W/` + etag, "*"} {
				res, body := reader.do(t, http.MethodGet, path, "If-None-Match", known)
				require.Equal(t, http.StatusNotModified, res.StatusCode)
				require.Equal(t, etag, res.Header.Get("ETag"))
				require.Empty(t, body)
			}
			reader.get(t, path, "If-None-Match", `"other"`)
		}
	})

	t.Run("HEADHasTheHeadersOfGET", func(t *testing.T) {
		t.Parallel()
		for _, path := range []string{"/docs", "/docs/idempotency", "/problems/not-found", "/openapi.yaml"} {
			got, _ := reader.get(t, path)
			head, body := reader.do(t, http.MethodHead, path)
			require.Empty(t, body)
			for _, header := range []*http.Response{got, head} {
				header.Header.Del("Date")
				header.Header.Del("X-Request-Id")
			}
			require.Equal(t, got.Header, head.Header)
		}
	})

	t.Run("DocsAreCompressedForWhoTakesIt", func(t *testing.T) {
		t.Parallel()
		plain, want := reader.get(t, "/docs")
		require.Empty(t, plain.Header.Get("Content-Encoding"))
		_, refused := reader.get(t, "/docs", "Accept-Encoding", "gzip;q=0, *")
		require.Equal(t, want, refused)

		res, body := reader.get(t, "/docs", "Accept-Encoding", "br, gzip")
		require.Equal(t, "gzip", res.Header.Get("Content-Encoding"))
		require.Equal(t, "Accept-Encoding", res.Header.Get("Vary"))
		require.NotEqual(t, plain.Header.Get("ETag"), res.Header.Get("ETag"))
		unzipped, err := gzip.NewReader(strings.NewReader(body))
		require.NoError(t, err)
		got, err := io.ReadAll(unzipped)
		require.NoError(t, err)
		require.Equal(t, want, string(got))
	})

	t.Run("OpenAPIDocumentIsTheFile", func(t *testing.T) {
		t.Parallel()
		res, body := reader.get(t, "/openapi.yaml")
		require.Equal(t, "application/yaml", res.Header.Get("Content-Type"))
		want, err := os.ReadFile("openapi.yaml")
		require.NoError(t, err)
		require.Equal(t, string(want), body)
	})

	t.Run("SwaggerUIIsAsPublished", func(t *testing.T) {
		t.Parallel()
		sums, err := os.ReadFile("pages/swagger-ui/SHA256SUMS")
		require.NoError(t, err)
		for line := range strings.Lines(string(sums)) {
			words := strings.Fields(line)
			sum := sha256.Sum256([]byte(pageFile("swagger-ui/" + words[1] + ".gz")))
			require.Equal(t, words[0], hex.EncodeToString(sum[:]), words[1])
		}
	})

	t.Run("ScriptDoesNotEndThePageItStandsIn", func(t *testing.T) {
		t.Parallel()
		require.Equal(t, `"\x3C!-- \x3Cscript>\x3C/script>"`, scriptText(`"<!-- <script></script>"`))
		bundle := strings.ToLower(scriptText(pageFile("swagger-ui/swagger-ui-bundle.js.gz")))
		for _, markup := range []string{"<!--", "<script", "</script"} {
			require.NotContains(t, bundle, markup, "in any case of letters")
		}
	})

	t.Run("DurationsAreWordsOfTheLargestUnitThatFits", func(t *testing.T) {
		t.Parallel()
		for seconds, want := range map[int64]string{1: "1 second", 90: "90 seconds", 60: "1 minute", 3600: "1 hour", 86400: "24 hours"} {
			require.Equal(t, want, inWords(seconds))
		}
	})
}

// TestPagesInABrowser needs a browser, so plain go test skips it. .ci/run, which has installed chromium, asks for it; so can you:
//
//	TEST_BROWSER=1 go test -run TestPagesInABrowser ./internal/api
//
// Asked for and without a browser it fails.
func TestPagesInABrowser(t *testing.T) {
	t.Parallel()
	if os.Getenv("TEST_BROWSER") == "" {
		t.Skip("TEST_BROWSER is not set")
	}

	t.Run("RequestOfAPageIsSeen", func(t *testing.T) {
		t.Parallel()
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, `<!DOCTYPE html><link rel="icon" href="data:,"><img src="http://elsewhere.example/pixel.png">`)
		}))
		t.Cleanup(server.Close)
		_, requests := openInBrowser(t, server.URL)
		require.Equal(t, []string{"http://elsewhere.example/pixel.png"}, requests)
	})

	t.Run("DocsListEveryOperationAndAskNobodyElse", func(t *testing.T) {
		t.Parallel()
		var document struct {
			Paths map[string]map[string]yaml.Node
		}
		require.NoError(t, yaml.Unmarshal(openapiDocument, &document))
		var want []string
		for path, item := range document.Paths {
			for member, node := range item {
				var operation struct {
					ID string `yaml:"operationId"`
				}
				if member != "parameters" {
					require.NoError(t, node.Decode(&operation))
					want = append(want, strings.ToUpper(member)+" "+path+" "+operation.ID)
				}
			}
		}

		reader := newPageReader(t)
		dom, requests := openInBrowser(t, reader.url+"/docs")
		require.ElementsMatch(t, want, operationsShown(t, dom))
		require.Equal(t, []string{reader.url + "/openapi.yaml"}, requests)
	})

	t.Run("OtherPagesAskForNothing", func(t *testing.T) {
		t.Parallel()
		reader := newPageReader(t)
		for path, heading := range map[string]string{"/docs/idempotency": "Idempotency keys", "/problems/payment-declined": "The payment was declined"} {
			dom, requests := openInBrowser(t, reader.url+path)
			require.Contains(t, dom, "<h1>"+heading+"</h1>")
			require.Empty(t, requests)
		}
	})
}

// operationsShown reads the operations off what Swagger UI has made of the document, as "POST /v1/payments createPayment".
func operationsShown(t *testing.T, dom string) (operations []string) {
	t.Helper()
	root, err := html.Parse(strings.NewReader(dom))
	require.NoError(t, err)
	for node := range root.Descendants() {
		if !hasClass(node, "opblock") {
			continue
		}
		var method, path, id string
		for part := range node.Descendants() {
			switch {
			case hasClass(part, "opblock-summary-method"):
				method = part.FirstChild.Data
			case hasClass(part, "opblock-summary-operation-id"):
				id = part.FirstChild.Data
			case hasClass(part, "opblock-summary-path"):
				path = attributeOf(part, "data-path")
			}
		}
		operations = append(operations, method+" "+path+" "+id)
	}
	return operations
}

func hasClass(node *html.Node, class string) bool {
	for name := range strings.FieldsSeq(attributeOf(node, "class")) {
		if name == class {
			return true
		}
	}
	return false
}

func attributeOf(node *html.Node, name string) string {
	for _, attribute := range node.Attr {
		if attribute.Key == name {
			return attribute.Val
		}
	}
	return ""
}

// openInBrowser returns the page as the browser has it when its scripts are done, and the requests that the page has made. A line on the
// console, such as about something that the policy refuses, fails the test. No host but this one can be reached.
func openInBrowser(t *testing.T, pageURL string) (dom string, requests []string) {
	t.Helper()
	var browser string
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"} {
		if path, err := exec.LookPath(name); err == nil {
			browser = path
			break
		}
	}
	if browser == "" {
		t.Fatal("TEST_BROWSER is set, but there is neither chromium nor google-chrome on PATH: on Debian, apt-get install -y chromium")
	}
	// Not t.TempDir: what is left of the browser may still write into it when the test ends, and must not fail it.
	profile, err := os.MkdirTemp("", "browser")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(profile) })

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var stdout, stderr strings.Builder
	command := exec.CommandContext(ctx, browser,
		"--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
		"--disable-component-update", "--disable-sync", "--user-data-dir="+profile, "--enable-logging=stderr", "--log-net-log="+profile+"/net.json",
		"--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--virtual-time-budget=20000", "--dump-dom", pageURL)
	command.Stdout, command.Stderr = &stdout, &stderr
	command.WaitDelay = 5 * time.Second
	require.NoError(t, command.Run(), stderr.String())
	for line := range strings.Lines(stderr.String()) {
		if strings.Contains(line, "CONSOLE") {
			t.Error(line)
		}
	}

	var netLog struct {
		Events []struct {
			Params struct{ URL, Initiator string }
		}
	}
	recorded, err := os.ReadFile(profile + "/net.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(recorded, &netLog))
	for _, event := range netLog.Events {
		// "not an origin" is who sits before the browser, and the browser itself, which looks for the time and an account at its maker's.
		if by := event.Params.Initiator; by != "" && by != "not an origin" {
			requests = append(requests, event.Params.URL)
		}
	}
	return stdout.String(), requests
}
