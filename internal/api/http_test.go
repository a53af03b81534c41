package api_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"example.com/payments/internal/servicetest"
)

// What is the same for all routes: rows 4, 19 and 24 of CONTRACT §4, and how the paths of §1 behave as HTTP.

func TestKeyHeader(t *testing.T) {
	t.Parallel()
	const body = `{"amount":1,"currency":"EUR"}`
	facts(t, []fact{
		{"IsRequiredOnEveryPOST", func(t *testing.T) {
			w := setup(t, options{})
			for _, path := range []string{"/v1/orders", "/v1/orders/" + w.NewOrder() + "/cancel", "/v1/payments", "/v1/payments/" + uuid.NewString() + "/refunds"} {
				w.Do("POST", path, "", "{}").Is(400, "idempotency-key-missing").
					Has("Link", `</docs/idempotency>; rel="describedby"`).Has("Idempotency-Key", "").Has("Location", "")
			}
		}},
		{"MalformedIs400", func(t *testing.T) {
			w := setup(t, options{})
			for _, key := range []string{
				`a"b`, `a\b`, "a,b", "a b", "ü", "a\tb", strings.Repeat("k", 256), `"`, `""`, `"a`, `"a"b`, `"a b"`, `"ü"`, `"` + strings.Repeat("k", 256) + `"`, `'a'"`,
			} {
				a := w.Do("POST", "/v1/orders", "", body, "Idempotency-Key: "+key).Is(400, "idempotency-key-invalid").
					Has("Link", `</docs/idempotency>; rel="describedby"`).Has("Idempotency-Key", "")
				require.NotContains(t, string(a.Body), "kkkk", "it repeats nothing of what was sent")
			}
			w.Do("POST", "/v1/orders", "a", body, "Idempotency-Key: a", "Idempotency-Key: a").Is(400, "idempotency-key-invalid")
			w.Do("POST", "/v1/orders", "a", body, "Idempotency-Key: a", "Idempotency-Key: b").Is(400, "idempotency-key-invalid")
			require.Zero(t, w.Rows("idempotency_keys"))
		}},
		{"MayBeQuotedOrBareAndIsEchoedQuoted", func(t *testing.T) {
			w := setup(t, options{})
			for sent, echo := range map[string]string{
				"abc":                                    `"abc"`,
				`"abd"`:                                  `"abd"`,
				`"abe";created=1;note="x, y"`:            `"abe"`,
				"!#$%&'()*+-./:;<=>?@[]^_`{|}~":          `"!#$%&'()*+-./:;<=>?@[]^_` + "`" + `{|}~"`,
				`"quoted\"and\\backslash,comma"`:         `"quoted\"and\\backslash,comma"`,
				strings.Repeat("k", 255):                 `"` + strings.Repeat("k", 255) + `"`,
				`"` + strings.Repeat(`\"`, 255) + `"`:    `"` + strings.Repeat(`\"`, 255) + `"`,
				"0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11":   `"0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11"`,
				`"0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c12"`: `"0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c12"`,
			} {
				first := w.Do("POST", "/v1/orders", "", body, "Idempotency-Key: "+sent).Is(201).Fresh().Has("Idempotency-Key", echo)
				w.Do("POST", "/v1/orders", "", body, "Idempotency-Key: "+echo).Same(first).Replayed()
			}
		}},
		{"CountsEveryLetterAndItsCase", func(t *testing.T) {
			w := setup(t, options{})
			for _, key := range []string{"abc", "Abc", "ABC", "abc.", "ab"} {
				w.Do("POST", "/v1/orders", key, body).Is(201).Fresh()
			}
		}},
		{"IsIgnoredOnGETAndHEAD", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			for _, method := range []string{"GET", "HEAD"} {
				for _, key := range []string{"k", `"broken`, "ü"} {
					w.Do(method, "/v1/orders/"+order, "", "", "Idempotency-Key: "+key).Is(200).Has("Idempotency-Key", "")
				}
			}
			require.False(t, w.HasKey("k"))
		}},
	})
}

func TestCredentials(t *testing.T) {
	t.Parallel()
	facts(t, []fact{
		{"MustBeABearersAPIKey", func(t *testing.T) {
			w := setup(t, options{})
			sk := w.Merchant.APIKey
			for _, credentials := range []string{"", "Bearer", "Bearer ", "Bearer sk_live_nobodys", "Bearer " + strings.ToUpper(sk), "Bearer " + sk + "x", "Bearer " + sk[3:],
				"Basic " + sk, sk, "Bearer sk_test_demo", "Bearer " + sk + " " + sk} {
				for _, path := range []string{"/v1/orders", "/v1/payments/" + uuid.NewString(), "/v1/refunds/x"} {
					a := w.Do("GET", path, "", "", "Authorization: "+credentials).Is(401, "unauthorized").Has("WWW-Authenticate", `Bearer realm="payments"`)
					require.NotContains(t, a.String(), sk)
				}
			}
			w.Do("GET", "/v1/orders", "", "", "Authorization: Bearer "+sk, "Authorization: Bearer "+sk).Is(401)
			w.Do("GET", "/v1/orders", "", "", "Authorization: bearer "+sk).Is(200)
			require.NotContains(t, w.Replica.Log.String(), sk[8:])
		}},
		{"AreStoredAsTheirSHA256Alone", func(t *testing.T) {
			w := setup(t, options{})
			w.Pay(w.NewOrder(), "k", "pm_ok").Is(201)
			require.Equal(t, 1, w.Rows("api_keys WHERE secret_sha256 = sha256($1::text::bytea)", w.Merchant.APIKey))
		}},
		{"RateIsEachMerchantsOwn", func(t *testing.T) {
			w := setup(t, options{RateLimit: 1e-3})
			other := w.Replica.As(w.NewMerchant("other"))
			w.Do("GET", "/v1/orders", "", "").Is(200)
			a := w.Do("GET", "/v1/orders", "", "").Is(429, "rate-limited")
			require.NotEmpty(t, a.Header.Get("Retry-After"))
			w.Do("POST", "/v1/orders", "k", `{"amount":1,"currency":"EUR"}`).Is(429, "rate-limited")
			require.False(t, w.HasKey("k"))
			other.Do("GET", "/v1/orders", "", "").Is(200)
			w.Do("GET", "/livez", "", "").Is(200)
		}},
	})
}

func TestRoutes(t *testing.T) {
	t.Parallel()
	routes := func(w *world) map[string]string { // path to Allow
		order, id := w.NewOrder(), w.NewPayment("pm_ok")
		refund := refundOf(w.Client, id, w.NewKey(), "").Is(201).Member("id")
		return map[string]string{
			"/v1/orders": "GET HEAD POST", "/v1/orders/" + order: "GET HEAD", "/v1/orders/" + order + "/cancel": "POST",
			"/v1/payments": "GET HEAD POST", "/v1/payments/" + id: "GET HEAD", "/v1/payments/" + id + "/refunds": "GET HEAD POST",
			"/v1/refunds/" + refund: "GET HEAD",
		}
	}
	facts(t, []fact{
		{"TakeNoOtherMethod", func(t *testing.T) {
			w := setup(t, options{})
			for path, allow := range routes(w) {
				for _, method := range []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"} {
					if strings.Contains(allow, method) {
						continue
					}
					a := w.Do(method, path, "k", "{}", "Authorization: ")
					require.Equal(t, 405, a.Status, "%s %s", method, path)
					for allowed := range strings.FieldsSeq(allow) {
						require.Contains(t, a.Header.Get("Allow"), allowed, "%s %s", method, path)
					}
					require.Len(t, strings.Split(a.Header.Get("Allow"), ","), len(strings.Fields(allow)), "%s %s: %s", method, path, a.Header.Get("Allow"))
				}
			}
		}},
		{"AnswerHEADAsGETWithoutTheBody", func(t *testing.T) {
			w := setup(t, options{})
			for path, allow := range routes(w) {
				if !strings.Contains(allow, "HEAD") {
					continue
				}
				get, head := w.Do("GET", path, "", "").Is(200), w.Do("HEAD", path, "", "").Is(200)
				require.Empty(t, head.Body)
				for _, header := range []string{"Content-Type", "Cache-Control", "Content-Length"} {
					head.Has(header, get.Header.Get(header))
				}
				w.Do("HEAD", path, "", "", "Authorization: ").Is(401)
			}
			w.Do("HEAD", "/v1/orders/"+uuid.NewString(), "", "").Is(404)
		}},
		{"AreSpelledInOneWay", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			for _, path := range []string{
				"/", "/v1", "/v1/", "/v1/orders/", "//v1/orders", "/v1//orders", "/V1/orders", "/v1/Orders", "/v2/orders", "/v1/orders/" + order + "/", "/v1/orders/" + order + "/cancel/",
				"/v1/orders/" + order + "/pay", "/v1/orders/../orders", "/v1/payment", "/v1/refunds", "/v1/orders.json", "/health",
			} {
				for _, method := range []string{"GET", "POST"} {
					a := w.Do(method, path, "k", "", "Authorization: ")
					require.Contains(t, []string{"404 not-found", "401 unauthorized"}, fmt.Sprint(a.Status, " ", a.Slug()), "%s %s", method, path)
					if a.Status == 401 { // An id may be anything, and none of these is one.
						w.Do(method, path, "k", "").Is(404, "not-found")
					}
				}
			}
			w.Do("GET", "/v1/orders/"+order+"%2Fcancel", "", "").Is(404, "not-found")
			for _, path := range []string{"//v1/payments", "/v1/payments/"} {
				w.Do("POST", path, "k", servicetest.PayBody(order, "pm_ok")).Is(404, "not-found")
			}
			require.False(t, w.HasKey("k"))
		}},
		{"AnswerWithTheirOwnRequestID", func(t *testing.T) {
			w := setup(t, options{})
			a := w.Do("GET", "/v1/orders", "", "", "X-Request-Id: mine\x20or\x20yours").Is(200)
			require.NotContains(t, a.Header.Get("X-Request-Id"), "mine")
			require.NotEqual(t, a.Header.Get("X-Request-Id"), w.Do("GET", "/v1/orders", "", "").Header.Get("X-Request-Id"))
			require.Contains(t, w.Replica.Log.String(), a.Header.Get("X-Request-Id"))
		}},
		{"NeverBuildATypeFromTheHostHeader", func(t *testing.T) {
			w := setup(t, options{})
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.Client.URL+"/nowhere", nil)
			require.NoError(t, err)
			request.Host = "evil.example"
			request.Header.Set("X-Forwarded-Host", "evil.example")
			a, err := w.Send(request)
			require.NoError(t, err)
			a.Is(404, "not-found").Says("type", servicetest.PublicURL+"/problems/not-found")
			require.NotContains(t, a.String(), "evil")
		}},
	})
}

func TestMerchantsAreStrangers(t *testing.T) {
	t.Parallel()
	facts(t, []fact{
		{"SameKeyAndBodyMakeTwoPayments", func(t *testing.T) {
			w := setup(t, options{})
			other := w.Replica.As(w.NewMerchant("other"))
			body := `{"amount":1999,"currency":"EUR"}`
			mine, theirs := w.Do("POST", "/v1/orders", "k", body).Is(201).Fresh(), other.Do("POST", "/v1/orders", "k", body).Is(201).Fresh()
			a := w.Pay(mine.Member("id"), "p", "pm_ok").Is(201).Fresh()
			b := other.Pay(theirs.Member("id"), "p", "pm_ok").Is(201).Fresh()
			for _, member := range []string{"id", "order_id", "gateway_reference"} {
				require.NotEqual(t, a.Member(member), b.Member(member), member)
			}
			charges := w.Gateway.Charges()
			require.Len(t, charges, 2)
			require.NotEqual(t, charges[0].Key, charges[1].Key)
			w.Pay(mine.Member("id"), "p", "pm_ok").Same(a).Replayed()
			other.Pay(theirs.Member("id"), "p", "pm_ok").Same(b).Replayed()
			require.Equal(t, []string{a.Member("id")}, w.Do("GET", "/v1/payments?idempotency_key=p", "", "").Data("id"))
			require.Equal(t, []string{b.Member("id")}, other.Do("GET", "/v1/payments", "", "").Data("id"))
			require.Equal(t, []string{theirs.Member("id")}, other.Do("GET", "/v1/orders", "", "").Data("id"))
			require.Empty(t, other.Do("GET", "/v1/payments?order_id="+mine.Member("id"), "", "").Data("id"))
		}},
		{"WhatIsAnothersIsNotThere", func(t *testing.T) {
			w := setup(t, options{})
			other := w.Replica.As(w.NewMerchant("other"))
			order, id := w.NewOrder(), w.NewPayment("pm_ok")
			refund := refundOf(w.Client, id, "r", `{"amount":1}`).Is(201).Member("id")
			// The same bytes but for the request's name, and the same headers.
			same := func(method, path, key, body string) {
				t.Helper()
				var seen []string
				for _, id := range []string{order, id, refund, uuid.NewString(), "no-uuid", strings.ReplaceAll(order, "-", ""), "{" + order + "}"} {
					a := other.Do(method, strings.Replace(path, "*", id, 1), key, strings.Replace(body, "*", id, 1))
					a.Is(404)
					requestID := a.Header.Get("X-Request-Id")
					a.Header.Del("Date")
					seen = append(seen, strings.ReplaceAll(a.String(), requestID, "…"))
					if body != "" && id == refund {
						break // In a body, what is no UUID is a fault of the form.
					}
				}
				for _, answer := range seen[1:] {
					require.Equal(t, seen[0], answer, "%s %s", method, path)
				}
			}
			for _, path := range []string{"/v1/orders/*", "/v1/payments/*", "/v1/refunds/*", "/v1/payments/*/refunds"} {
				same("GET", path, "", "")
			}
			same("POST", "/v1/orders/*/cancel", "k", "")
			same("POST", "/v1/payments/*/refunds", "k", "")
			same("POST", "/v1/payments", "k", servicetest.PayBody("*", "pm_ok"))
			require.Zero(t, w.Rows("idempotency_keys WHERE merchant_id <> $1", w.Merchant.ID))
			w.Do("GET", "/v1/orders/"+order, "", "").Is(200).Says("status", "open")
		}},
		{"KeyOfOneIsNoKeyOfTheOther", func(t *testing.T) {
			w := setup(t, options{})
			other := w.Replica.As(w.NewMerchant("other"))
			req, first, release := payment.inFlight(w)
			// In flight there, free here; and another request there is no other request here.
			other.Do("POST", "/v1/orders", req.key, `{"amount":5,"currency":"JPY"}`).Is(201).Fresh()
			release()
			first().Is(201)
			w.MoveBack(req.key, 25*60*60*1e9)
			other.Do("POST", "/v1/orders", req.key, `{"amount":5,"currency":"JPY"}`).Is(201).Replayed()
			req.from(w.Client).Is(410)
		}},
	})
}
