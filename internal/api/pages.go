package api

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"crypto/sha256"
	"embed"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"html/template"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/labstack/echo/v4"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/payments"
)

//go:embed openapi.yaml
var openapiDocument []byte

//go:embed pages/*.html pages/*.css pages/*.js pages/swagger-ui/*.gz
var pageFiles embed.FS

var (
	pageStyle   = template.CSS(pageFile("style.css")) //nolint:gosec // ours, embedded
	problemPage = pageTemplate("problem.html")
	policyPage  = pageTemplate("idempotency.html")
)

// contentPolicy: every page is whole in itself, and what is not in it does not load, run or show, wherever it may have come from. The
// pages' own styles and scripts are let in by the digests of their texts.
const contentPolicy = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

const (
	mediaTypeHTML = "text/html; charset=utf-8"
	mediaTypeYAML = "application/yaml"
)

// OpenapiDocument implements GET /openapi.yaml.
func (s *Server) OpenapiDocument(c echo.Context) error {
	return writePage(c, mediaTypeYAML, contentPolicy, openapiDocument)
}

// Docs implements GET /docs: openapi.yaml as a page on which every operation can be tried.
func (s *Server) Docs(c echo.Context) error {
	page := docsPage()
	header := c.Response().Header()
	header.Set(echo.HeaderVary, echo.HeaderAcceptEncoding)
	if q, _ := quality(c.Request().Header.Values(echo.HeaderAcceptEncoding), "gzip", "*"); q > 0 {
		header.Set(echo.HeaderContentEncoding, "gzip")
		return writePage(c, mediaTypeHTML, page.policy, page.compressed)
	}
	return writePage(c, mediaTypeHTML, page.policy, page.plain)
}

// Problem implements GET /problems/{slug}, the page that the type of a problem points to.
func (s *Server) Problem(c echo.Context, slug Slug) error {
	for _, t := range problemTypes {
		if t.slug == slug {
			meaning := s.meaningOf(t)
			return writePageOrJSON(c, problemPage, t.title, meaning, meaning)
		}
	}
	return payments.ErrNotFound
}

// IdempotencyPolicy implements GET /docs/idempotency, which the problems about a key point to.
func (s *Server) IdempotencyPolicy(c echo.Context) error {
	policy := s.keyPolicy()
	return writePageOrJSON(c, policyPage, "Idempotency keys", policy, struct {
		keyPolicy
		Retention, InFlightMax string
	}{policy, inWords(policy.ReplayTTLSeconds), inWords(policy.InFlightMaxSeconds)})
}

// keyPolicy is what the service promises for keys: its policy, which the draft asks a server to publish.
type keyPolicy struct {
	KeyPattern         string          `json:"key_pattern"`
	ReplayTTLSeconds   int64           `json:"replay_ttl_seconds"`
	InFlightMaxSeconds int64           `json:"in_flight_max_seconds"`
	FingerprintVersion int16           `json:"fingerprint_version"`
	Answers            []answerMeaning `json:"answers"`
}

// answerMeaning is what one answer says about the key and the money: a row of the policy, and all of a problem's page.
type answerMeaning struct {
	Name   string  `json:"name"` // the problem's slug, or ours for a success
	Type   *string `json:"type"` // the problem's; nil for a success
	Status int     `json:"status"`
	Title  string  `json:"title"`
	Detail string  `json:"detail"`
	Money  string  `json:"money"`
	Key    string  `json:"key"`
	Stored bool    `json:"stored"` // every repeat gets this answer
	Retry  string  `json:"retry"`
	Action string  `json:"action"`
}

const (
	retryNo        = "no"
	retrySameKey   = "same-key"
	retryNewKey    = "new-key"
	retryCorrected = "corrected"
)

// retryActions say what each kind of retry is for the client to do.
var retryActions = map[string]string{
	retryNo:        "Do not repeat it as things stand. Look at the order or the payment first.",
	retrySameKey:   "Wait for the time in Retry-After, or a second where there is none. Then send the same request with the same key.",
	retryNewKey:    "Do not send it again with this key: the answer would be the same. A new attempt or a new intent needs a new key.",
	retryCorrected: "Correct what is wrong, then send it again. The key that it had may stay.",
}

const actionSave = "Save the answer, and stop."

// successes are the answers that are no problems. A repeat of a declined or failed request is in the problem's own row.
var successes = []answerMeaning{
	{
		Name: "canceled", Status: http.StatusOK, Title: "The order is canceled", Stored: true,
		Detail: "This request has canceled the order.", Money: moneyUntouched, Key: keyStored, Retry: retryNo, Action: actionSave,
	},
	{
		Name: "canceled-replayed", Status: http.StatusOK, Title: "The order was canceled before", Stored: true,
		Detail: "An earlier request with this key has canceled the order. Its answer is sent again, with Idempotent-Replayed: true.",
		Money:  moneyUntouched, Key: keyStored, Retry: retryNo, Action: actionSave,
	},
	{
		Name: "created", Status: http.StatusCreated, Title: "The order, payment or refund is made", Stored: true,
		Detail: "This request has made it.", Money: "A payment is charged; a refund is given back.", Key: keyStored, Retry: retryNo, Action: actionSave,
	},
	{
		Name: "created-replayed", Status: http.StatusCreated, Title: "The order, payment or refund was made before", Stored: true,
		Detail: "An earlier request with this key has made it. Its answer is sent again, with Idempotent-Replayed: true.",
		Money:  "A payment is charged, once; a refund is given back, once.", Key: keyStored, Retry: retryNo, Action: actionSave,
	},
	{
		Name: "accepted", Status: http.StatusAccepted, Title: "The payment or refund is accepted",
		Detail: "It is worked on in the background, as Prefer: respond-async has asked. Every repeat gets 202 until there is a final answer, and then that.",
		Money:  "Money may move, once.", Key: keyContinues, Retry: retrySameKey,
		Action: "Send the same request with the same key after the time in Retry-After, until the answer is final. Reading Location shows how it stands, and moves nothing.",
	},
}

func (s *Server) keyPolicy() keyPolicy {
	answers := slices.Clone(successes)
	for _, t := range problemTypes {
		answers = append(answers, s.meaningOf(t))
	}
	slices.SortStableFunc(answers, func(a, b answerMeaning) int { return cmp.Compare(a.Status, b.Status) })
	return keyPolicy{
		KeyPattern:         idempotency.KeyPattern,
		ReplayTTLSeconds:   int64(s.KeyRetention / time.Second), // Down: an answer is never kept shorter than we say,
		InFlightMaxSeconds: int64(wholeSeconds(s.InFlightMax)),  // and up: never worked on for longer.
		FingerprintVersion: idempotency.CurrentRecipe,
		Answers:            answers,
	}
}

// meaningOf reads the rest of a problem's meaning off the two tables that make the answers themselves.
func (s *Server) meaningOf(t problemType) answerMeaning {
	typeURL := s.PublicURL + "/problems/" + t.slug
	retry := retryOf(t)
	return answerMeaning{
		Name: t.slug, Type: &typeURL, Status: t.status, Title: t.title, Detail: t.detail,
		Money: t.money, Key: t.key, Stored: t.key == keyStored, Retry: retry, Action: retryActions[retry],
	}
}

// retryOf is what a client should do with the request after this problem. What has a Retry-After in the table of errors, or leaves the
// key in progress, is worth repeating as it is.
func retryOf(t problemType) string {
	for _, row := range errorTable {
		if row.slug == t.slug && row.retryAfter > 0 {
			return retrySameKey
		}
	}
	switch {
	case t.key == keyContinues:
		return retrySameKey
	case t.key == keyStored:
		return retryNewKey
	}
	switch t.status {
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		return retrySameKey
	case http.StatusGone, http.StatusUnprocessableEntity:
		return retryNewKey
	case http.StatusConflict:
		return retryNo
	default:
		return retryCorrected
	}
}

// inWords writes 86400 as "24 hours".
func inWords(seconds int64) string {
	n, unit := seconds, "second"
	switch {
	case n%3600 == 0:
		n, unit = n/3600, "hour"
	case n%60 == 0:
		n, unit = n/60, "minute"
	}
	if n != 1 {
		unit += "s"
	}
	return fmt.Sprintf("%d %s", n, unit)
}

// writePageOrJSON sends a page to people and its content to programs.
func writePageOrJSON(c echo.Context, page *template.Template, title string, forJSON, forPage any) error {
	c.Response().Header().Set(echo.HeaderVary, echo.HeaderAccept)
	if prefersJSON(c.Request().Header.Values(echo.HeaderAccept)) {
		return writePage(c, echo.MIMEApplicationJSON, contentPolicy, mustJSON(forJSON))
	}
	var body bytes.Buffer
	err := page.Execute(&body, struct {
		Title   string
		Style   template.CSS
		Content any
	}{title, pageStyle, forPage})
	if err != nil {
		return fmt.Errorf("render page: %w", err)
	}
	return writePage(c, mediaTypeHTML, contentPolicy+"; style-src "+digestSource(string(pageStyle)), body.Bytes())
}

func writePage(c echo.Context, mediaType, policy string, body []byte) error {
	sum := sha256.Sum256(body)
	etag := `"` + hex.EncodeToString(sum[:8]) + `"`
	header := c.Response().Header()
	header.Set("ETag", etag)
	header.Set(echo.HeaderCacheControl, "no-cache") // Keep it, but ask whether it still holds: a deploy may change any page.
	header.Set(echo.HeaderContentSecurityPolicy, policy)
	header.Set(echo.HeaderXContentTypeOptions, "nosniff")
	header.Set(echo.HeaderReferrerPolicy, "no-referrer")
	for candidate := range strings.SplitSeq(strings.Join(c.Request().Header.Values("If-None-Match"), ","), ",") {
		candidate = strings.TrimPrefix(strings.TrimSpace(candidate), "W/")
		if candidate == etag || candidate == "*" {
			header.Del(echo.HeaderContentEncoding)
			return c.NoContent(http.StatusNotModified)
		}
	}
	header.Set(echo.HeaderContentLength, strconv.Itoa(len(body)))
	return c.Blob(http.StatusOK, mediaType, body)
}

// prefersJSON says whether Accept rather wants JSON than HTML. Where it wants both alike, the one that it names wins over the one that
// it only covers, so a program that adds "or anything" still gets JSON; and after that HTML.
func prefersJSON(accept []string) bool {
	json, jsonRank := quality(accept, "application/json", "application/*", "*/*")
	html, htmlRank := quality(accept, "text/html", "text/*", "*/*")
	return json > html || json > 0 && json == html && jsonRank < htmlRank
}

// quality is how much a header such as Accept (RFC 9110, section 12.5) wants something: the weight, from 0 to 1, of the first of the
// ranges that the header has, and which one that was. The ranges go from the most particular to the least. Parameters other than the
// weight make no difference, and what cannot be read counts as not said.
func quality(lines []string, ranges ...string) (weight float64, rank int) {
	for rank, wanted := range ranges {
		weight, found := 0.0, false
		for element := range strings.SplitSeq(strings.Join(lines, ","), ",") {
			name, params, _ := strings.Cut(element, ";")
			if !strings.EqualFold(strings.TrimSpace(name), wanted) {
				continue
			}
			if q, ok := weightIn(params); ok {
				weight, found = max(weight, q), true
			}
		}
		if found {
			return weight, rank
		}
	}
	return 0, len(ranges)
}

func weightIn(params string) (q float64, ok bool) {
	for param := range strings.SplitSeq(params, ";") {
		name, value, _ := strings.Cut(param, "=")
		if strings.EqualFold(strings.TrimSpace(name), "q") {
			q, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
			return q, err == nil && q >= 0 && q <= 1
		}
	}
	return 1, true
}

// docs is the page at /docs, in both codings.
type docs struct {
	plain, compressed []byte
	policy            string
}

// docsPage puts Swagger UI into one page, when it is first asked for: a tenth of a second that a start should not wait for. One page
// and not a page with files beside it, because so no path exists that openapi.yaml does not name, and no script may run that is not
// this one. All it asks the host for is openapi.yaml, and what the reader tries.
var docsPage = sync.OnceValue(func() docs {
	style := pageFile("swagger-ui/swagger-ui.css.gz")
	bundle := scriptText(pageFile("swagger-ui/swagger-ui-bundle.js.gz"))
	start := pageFile("docs.js")

	var plain, compressed bytes.Buffer
	page := template.Must(template.ParseFS(pageFiles, "pages/docs.html"))
	err := page.Execute(&plain, struct {
		Style         template.CSS
		Bundle, Start template.JS
	}{template.CSS(style), template.JS(bundle), template.JS(start)}) //nolint:gosec // ours, embedded
	if err != nil {
		panic(err)
	}
	w := gzip.NewWriter(&compressed)
	_, _ = w.Write(plain.Bytes()) // A bytes.Buffer takes everything.
	_ = w.Close()
	return docs{
		plain:      plain.Bytes(),
		compressed: compressed.Bytes(),
		policy: contentPolicy + "; connect-src 'self'; style-src " + digestSource(style) +
			"; script-src " + digestSource(bundle) + " " + digestSource(start),
	}
})

// scriptText makes a script fit to stand in a page. These three would switch the HTML parser to another state, and the script would end
// in the wrong place; they can only be within strings and regular expressions, where the escape means the same.
func scriptText(script string) string {
	return strings.NewReplacer("<!--", `\x3C!--`, "<script", `\x3Cscript`, "</script", `\x3C/script`).Replace(script)
}

// digestSource lets the one style or script with this text into a page (CSP Level 3, section 2.3.1).
func digestSource(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

func pageTemplate(name string) *template.Template {
	return template.Must(template.ParseFS(pageFiles, "pages/layout.html", "pages/"+name))
}

// pageFile is an embedded file, uncompressed. It panics where there is none: the build is broken.
func pageFile(name string) string {
	content, err := pageFiles.ReadFile("pages/" + name)
	if err == nil && strings.HasSuffix(name, ".gz") {
		var r *gzip.Reader
		if r, err = gzip.NewReader(bytes.NewReader(content)); err == nil {
			content, err = io.ReadAll(r)
		}
	}
	if err != nil {
		panic(fmt.Sprintf("api: page %s: %v", name, err))
	}
	return string(content)
}
