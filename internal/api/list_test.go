package api_test

import (
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// collection is something that can be listed.
type collection struct {
	path string
	add  func() string // one more, and its id
}

func collections(w *world) map[string]collection {
	big := w.NewPayment("pm_ok")
	return map[string]collection{
		"orders":   {"/v1/orders", w.NewOrder},
		"payments": {"/v1/payments", func() string { return w.NewPayment("pm_ok") }},
		"refunds": {"/v1/payments/" + big + "/refunds", func() string {
			return refundOf(w.Client, big, w.NewKey(), `{"amount":1}`).Is(201).Member("id")
		}},
	}
}

func TestList(t *testing.T) {
	t.Parallel()
	facts(t, []fact{
		{"IsNewestFirstAndStableWhileMoreIsMade", func(t *testing.T) {
			w := setup(t, options{})
			for name, list := range collections(w) {
				made := slices.Clone(w.Do("GET", list.path, "", "").Is(200).Data("id"))
				for range 5 {
					made = slices.Insert(made, 0, list.add())
				}
				var seen []string
				for cursor := ""; ; {
					page := w.Do("GET", list.path+"?limit=2"+cursor, "", "").Is(200)
					seen = append(seen, page.Data("id")...)
					if page.Member("next_cursor") == "" {
						require.Contains(t, string(page.Body), `"next_cursor":null`)
						break
					}
					require.Len(t, page.Data("id"), 2)
					cursor = "&cursor=" + url.QueryEscape(page.Member("next_cursor"))
					list.add()
				}
				require.Equal(t, made, seen, name)
			}
		}},
		{"HasAsManyAsAskedForAndTwentyOtherwise", func(t *testing.T) {
			w := setup(t, options{})
			for range 21 {
				w.NewOrder()
			}
			require.Len(t, w.Do("GET", "/v1/orders", "", "").Data("id"), 20)
			require.Len(t, w.Do("GET", "/v1/orders?limit=1", "", "").Data("id"), 1)
			all := w.Do("GET", "/v1/orders?limit=100", "", "").Is(200)
			require.Len(t, all.Data("id"), 21)
			require.Contains(t, string(all.Body), `"next_cursor":null`)
			require.Contains(t, string(w.Do("GET", "/v1/orders?limit=21", "", "").Body), `"next_cursor":null`)
		}},
		{"OfNothingIsEmptyNotNull", func(t *testing.T) {
			w := setup(t, options{})
			for _, path := range []string{"/v1/orders", "/v1/payments", "/v1/payments?idempotency_key=unused"} {
				require.Equal(t, `{"data":[],"next_cursor":null}`, string(w.Do("GET", path, "", "").Is(200).Body), path)
			}
			require.Empty(t, w.Do("GET", "/v1/payments/"+w.NewPayment("pm_ok")+"/refunds", "", "").Is(200).Data("id"))
			w.Do("GET", "/v1/payments/"+w.NewOrder()+"/refunds", "", "").Is(404, "not-found")
		}},
		{"IsFilteredByStatusAndOrder", func(t *testing.T) {
			w := setup(t, options{})
			order, open, canceled := w.NewOrder(), w.NewOrder(), w.NewOrder()
			cancel(w.Client, canceled, "cancel").Is(200)
			declined := w.Pay(order, "declined", "pm_declined").Is(402).Member("payment_id")
			succeeded := w.Pay(order, "ok", "pm_ok").Is(201).Member("id")
			other := w.NewPayment("pm_ok")
			get := func(path string) []string { return w.Do("GET", path, "", "").Is(200).Data("id") }
			require.Equal(t, []string{open}, get("/v1/orders?status=open"))
			require.Equal(t, []string{canceled}, get("/v1/orders?status=canceled"))
			require.Len(t, get("/v1/orders?status=paid"), 2)
			require.Empty(t, get("/v1/orders?status=refunded"))
			require.Equal(t, []string{other, succeeded, declined}, get("/v1/payments"))
			require.Equal(t, []string{succeeded, declined}, get("/v1/payments?order_id="+order))
			require.Equal(t, []string{declined}, get("/v1/payments?status=declined&order_id="+order))
			require.Equal(t, []string{declined}, get("/v1/payments?status=declined"))
			require.Equal(t, []string{succeeded}, get("/v1/payments?limit=1&order_id="+order))
			require.Empty(t, get("/v1/payments?order_id="+open))
		}},
		{"FindsThePaymentOfAKeyForEver", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			id := w.Pay(order, "a/b+c=ü"[:6], "pm_ok").Is(201).Member("id")
			w.NewPayment("pm_ok")
			find := func(query string) []string { return w.Do("GET", "/v1/payments?"+query, "", "").Is(200).Data("id") }
			byKey := "idempotency_key=" + url.QueryEscape("a/b+c=")
			require.Equal(t, []string{id}, find(byKey))
			require.Equal(t, []string{id}, find("idempotency_key="+url.QueryEscape(`"a/b+c="`)))
			require.Equal(t, []string{id}, find(byKey+"&status=succeeded&order_id="+order))
			require.Empty(t, find(byKey+"&status=declined"))
			require.Empty(t, find(byKey+"&order_id="+w.NewOrder()))
			// An order's key is no payment's.
			w.Do("POST", "/v1/orders", "o", `{"amount":1,"currency":"EUR"}`).Is(201)
			require.Empty(t, find("idempotency_key=o"))
			w.MoveBack("a/b+c=", 25*time.Hour)
			w.Pay(order, "a/b+c=", "pm_ok").Is(410)
			require.Equal(t, []string{id}, find(byKey))
		}},
		{"BadQueryIs400WithAllPointers", func(t *testing.T) {
			w := setup(t, options{})
			refunds := "/v1/payments/" + w.NewPayment("pm_ok") + "/refunds"
			for query, pointers := range map[string][]string{
				"/v1/orders?limit=0":                     {"/query/limit too_small"},
				"/v1/orders?limit=-1":                    {"/query/limit too_small"},
				"/v1/orders?limit=101":                   {"/query/limit too_large"},
				"/v1/orders?limit=99999999999999999999":  {"/query/limit too_large"},
				"/v1/orders?limit=ten":                   {"/query/limit invalid"},
				"/v1/orders?limit=%2B5":                  {"/query/limit invalid"},
				"/v1/orders?limit=05":                    {"/query/limit invalid"},
				"/v1/orders?limit=":                      {"/query/limit invalid"},
				"/v1/orders?limit=1&limit=2":             {"/query/limit invalid"},
				"/v1/orders?cursor=":                     {"/query/cursor invalid"},
				"/v1/orders?cursor=%00":                  {"/query/cursor invalid"},
				"/v1/orders?cursor=AAAA":                 {"/query/cursor invalid"},
				"/v1/orders?status=":                     {"/query/status unknown_value"},
				"/v1/orders?status=succeeded":            {"/query/status unknown_value"},
				"/v1/orders?status=open&status=open":     {"/query/status unknown_value"},
				"/v1/payments?status=open":               {"/query/status unknown_value"},
				"/v1/payments?order_id=7":                {"/query/order_id invalid"},
				"/v1/payments?idempotency_key=":          {"/query/idempotency_key invalid"},
				"/v1/payments?idempotency_key=a%20b":     {"/query/idempotency_key invalid"},
				"/v1/payments?limit=0&cursor=x&status=x": {"/query/cursor invalid", "/query/limit too_small", "/query/status unknown_value"},
				"/v1/orders?limit=1;status=open":         {"/query invalid"},
				"/v1/orders?%zz":                         {"/query invalid"},
				refunds + "?limit=0&cursor=x":            {"/query/cursor invalid", "/query/limit too_small"},
			} {
				a := w.Do("GET", query, "", "")
				require.Equal(t, "400 validation-failed", fmt.Sprint(a.Status, " ", a.Slug()), query)
				got := a.Pointers()
				slices.Sort(got)
				require.Equal(t, pointers, got, query)
			}
		}},
		{"UnknownQueryMembersAreIgnored", func(t *testing.T) {
			w := setup(t, options{})
			order := w.NewOrder()
			for _, query := range []string{"?foo=bar", "?Limit=0", "?limit%00=0", "?order_id=x"} {
				require.Equal(t, []string{order}, w.Do("GET", "/v1/orders"+query, "", "").Is(200).Data("id"), query)
			}
		}},
		{"EveryMemberIsThereNullOrNot", func(t *testing.T) {
			w := setup(t, options{})
			refund := refundOf(w.Client, w.NewPayment("pm_ok"), "r", "").Is(201)
			members := map[string][]string{
				"/v1/orders":   {"amount", "created_at", "currency", "id", "metadata", "reference", "status"},
				"/v1/payments": {"amount", "amount_refunded", "created_at", "currency", "decline_code", "failure_code", "gateway_reference", "id", "metadata", "order_id", "payment_method", "status"},
				"/v1/payments/" + refund.Member("payment_id") + "/refunds": {"amount", "created_at", "currency", "failure_code", "gateway_reference", "id", "payment_id", "reason", "status"},
			}
			for path, want := range members {
				var list struct{ Data []map[string]any }
				require.NoError(t, json.Unmarshal(w.Do("GET", path, "", "").Is(200).Body, &list))
				for _, resource := range list.Data {
					var got []string
					for name := range resource {
						got = append(got, name)
					}
					slices.Sort(got)
					require.Equal(t, want, got, path)
				}
			}
		}},
	})
}
