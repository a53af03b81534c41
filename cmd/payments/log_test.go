package main

import (
	"net/http"
	"strings"
	"syscall"
	"testing"

	"github.com/go-json-experiment/json"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestLog(t *testing.T) {
	t.Parallel()

	t.Run("HasOneLineForEachRequest", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t, "LOG_FORMAT=json")
		i := b.intend(t, s)
		paid := b.pay(t, s, i)
		replayed := b.pay(t, s, i)
		refused := s.get(t, "/v1/payments/"+paid.field("id"))
		require.Equal(t, http.StatusUnauthorized, refused.status)
		s.signal(t, syscall.SIGTERM)
		require.Zero(t, s.wait(t))

		lines := map[any]map[string]any{}
		for line := range strings.Lines(s.stderr.String()) {
			var members map[string]any
			require.NoError(t, json.Unmarshal([]byte(line), &members), "every line is JSON")
			if members["msg"] == "request" {
				require.NotContains(t, lines, members["request_id"], "one line")
				lines[members["request_id"]] = members
			}
		}
		line := func(a answer) map[string]any {
			t.Helper()
			l := lines[a.header.Get("X-Request-Id")]
			require.Positive(t, l["duration_ms"])
			delete(l, "duration_ms")
			delete(l, "time")
			return l
		}
		path := "/v1/payments/" + paid.field("id")
		first, second := line(paid), line(replayed)
		require.Len(t, first["key"], 12)
		require.Equal(t, map[string]any{
			"level": "INFO", "msg": "request", "request_id": paid.header.Get("X-Request-Id"), "method": "POST", "route": "/v1/payments",
			"merchant": b.merchantID(t), "status": 201.0, "key": first["key"], "claim": "won", "resource": path,
		}, first)
		require.Equal(t, "replayed", second["claim"])
		require.Equal(t, path, second["resource"])
		require.Equal(t, first["key"], second["key"], "the lines of one key are found by its hash")
		require.Equal(t, "/v1/payments/{id}", line(refused)["route"])
	})

	t.Run("OfAWholeRunHasNoTokenNoCardNumberNoAPIKeyNoKeyAndNoBody", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		const card, spaced = "4242424242424242", "4242 4242-4242 4242"
		config, err := pgx.ParseConfig(b.databaseURL)
		require.NoError(t, err)
		secrets := []string{b.apiKey, "sk_", "Bearer", card, spaced, "pm_", "a-reference", "a-reason", "a-value", "a-name", "secret-key", "nosy"}
		if config.Password != "" {
			secrets = append(secrets, config.Password)
		}
		var ran []*program
		for _, format := range []string{"text", "json"} {
			s := b.ready(t, "LOG_FORMAT="+format, "LOG_LEVEL=DEBUG", "GATEWAY_TIMEOUT=1s", "SHUTDOWN_TIMEOUT=6s")
			ran = append(ran, s.program)
			post := func(path, key, body string, change ...func(*http.Request)) answer {
				request := b.request(t.Context(), t, s, path, "secret-key-"+format+key, body)
				for _, c := range change {
					c(request)
				}
				return send(request)
			}
			order := func(key string) string {
				created := post("/v1/orders", "-order"+key, `{"amount":1999,"currency":"EUR","reference":"a-reference","metadata":{"a-name":"a-value"}}`)
				require.Equal(t, http.StatusCreated, created.status, created)
				return created.field("id")
			}
			body := func(orderID, token string) string {
				return `{"order_id":"` + orderID + `","amount":1999,"currency":"EUR","payment_method":"` + token + `","metadata":{"a-name":"a-value"}}`
			}

			// What is well, what is repeated, and what is refused.
			first := order("-1")
			paid := post("/v1/payments", "-1", body(first, "pm_nosy_ok"))
			require.Equal(t, http.StatusCreated, paid.status, paid)
			require.Equal(t, "true", post("/v1/payments", "-1", body(first, "pm_nosy_ok")).replayed())
			require.Equal(t, http.StatusUnprocessableEntity, post("/v1/payments", "-1", body(first, "pm_nosy_other")).status)
			require.Equal(t, "order-not-open", post("/v1/payments", "-2", body(first, "pm_nosy_ok")).slug())
			require.Equal(t, http.StatusCreated, post("/v1/payments/"+paid.field("id")+"/refunds", "-3", `{"amount":1,"reason":"a-reason"}`).status)
			require.Equal(t, http.StatusPaymentRequired, post("/v1/payments", "-4", body(order("-4"), "pm_declined")).status)

			// Card numbers, wherever one can be put.
			require.Equal(t, "validation-failed", post("/v1/payments", "-5", body(first, "pm_"+card)).slug())
			require.Equal(t, "validation-failed", post("/v1/payments", "-5", body(first, card)).slug())
			require.Equal(t, "validation-failed", post("/v1/orders", "-5", `{"amount":1,"currency":"EUR","reference":"`+spaced+`"}`).slug())
			require.Equal(t, "validation-failed", post("/v1/orders", "-5", `{"amount":1,"currency":"EUR","metadata":{"a-name":"`+card+`"}}`).slug())
			require.Equal(t, "request-malformed", post("/v1/orders", "-5", `{"amount":1,"currency":"EUR","`+card+`":1}`).slug())
			require.Equal(t, "request-malformed", post("/v1/orders", "-5", `{"amount":`+card+card+`e1}`).slug())
			require.Equal(t, http.StatusUnauthorized, s.get(t, "/v1/payments/"+card).status)
			require.Equal(t, http.StatusNotFound, s.get(t, "/nosy/"+card+"?key="+card).status)
			require.Equal(t, http.StatusUnauthorized, s.get(t, "/v1/payments?idempotency_key=secret-key-"+card).status)
			require.Equal(t, http.StatusMethodNotAllowed, post("/v1/orders", "-6", `{}`, func(r *http.Request) { r.Method = card }).status)
			require.Equal(t, http.StatusMethodNotAllowed, post("/v1/orders", "-6", `{}`, func(r *http.Request) { r.Method = "sk_live_nosy" }).status)
			require.Equal(t, "idempotency-key-invalid", post("/v1/orders", "-6", `{}`, func(r *http.Request) {
				r.Header.Set("Idempotency-Key", `secret-key "`+card)
			}).slug())
			require.Equal(t, http.StatusUnauthorized, post("/v1/orders", "-6", `{}`, func(r *http.Request) {
				r.Header.Set("Authorization", "Bearer sk_live_"+card)
			}).status)
			require.Equal(t, http.StatusUnsupportedMediaType, post("/v1/orders", "-6", `{}`, func(r *http.Request) {
				r.Header.Set("Content-Type", "text/"+card)
			}).status)

			// What goes wrong on the way.
			seventh, eighth := order("-7"), order("-8")
			b.gatewayWire.cut(t)
			require.Equal(t, "gateway-unavailable", post("/v1/payments", "-7", body(seventh, "pm_nosy_ok")).slug())
			b.gatewayWire.mend(t)
			require.Equal(t, http.StatusCreated, post("/v1/payments", "-8", body(eighth, "pm_hang_after")).status)
			b.databaseWire.cut(t)
			require.Equal(t, "storage-unavailable", post("/v1/payments", "-9", body(first, "pm_nosy_ok")).slug())
			b.databaseWire.mend(t)
			eventually(t, "the service is ready again", func() bool { return s.get(t, "/readyz").status == http.StatusOK })
			require.Equal(t, http.StatusCreated, post("/v1/payments", "-7", body(seventh, "pm_nosy_ok")).status)
			s.signal(t, syscall.SIGTERM)
			require.Zero(t, s.wait(t))
		}
		for _, p := range ran {
			log := p.stdout.String() + p.stderr.String()
			require.Greater(t, strings.Count(log, "/v1/payments"), 10, "it has logged")
			for _, secret := range secrets {
				require.NotContains(t, log, secret)
			}
		}
	})
}
