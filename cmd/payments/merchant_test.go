package main

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAPIKey(t *testing.T) {
	t.Parallel()

	t.Run("IsReplacedWithoutAGapAndStopsWithinThirtySecondsOfItsEnd", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		replicas := []*service{b.ready(t), b.ready(t)}
		i := b.intend(t, replicas[0])
		merchantID, old := b.merchantID(t), b.apiKey

		status, p := b.execute(t, "apikey", "create", merchantID)
		require.Zero(t, status, p.stderr.String())
		fields := strings.Fields(p.stdout.String())
		require.Len(t, fields, 4, "api_key_id ID api_key SECRET")
		list := func() []string {
			_, p := b.execute(t, "apikey", "list", merchantID)
			require.NotContains(t, p.stdout.String(), "sk_")
			return strings.Split(strings.TrimSpace(p.stdout.String()), "\n")
		}
		keys := list()
		require.Len(t, keys, 2)
		require.True(t, strings.HasPrefix(keys[1], fields[1]), "oldest first")

		// Both are valid, at both replicas, for the same merchant: what the one has paid the other is answered with.
		require.Equal(t, http.StatusCreated, b.pay(t, replicas[0], i).status)
		b.apiKey = fields[3]
		require.Equal(t, "true", b.pay(t, replicas[1], i).replayed())
		b.apiKey = old
		require.Equal(t, "true", b.pay(t, replicas[1], i).replayed())

		oldID, _, _ := strings.Cut(keys[0], " ")
		status, p = b.execute(t, "apikey", "revoke", merchantID, oldID)
		require.Zero(t, status, p.stderr.String())
		revoked := time.Now()
		require.Regexp(t, oldID+` .* revoked `, list()[0])
		for _, replica := range replicas {
			eventually(t, "the key is refused", func() bool {
				refused := b.pay(t, replica, i)
				return refused.status == http.StatusUnauthorized && refused.slug() == "unauthorized"
			})
		}
		require.Less(t, time.Since(revoked), 30*time.Second)
		b.apiKey = fields[3]
		require.Equal(t, "true", b.pay(t, replicas[0], i).replayed(), "the other one stays")
	})

	t.Run("OfAnotherMerchantIsNotRevoked", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		newMerchant(t, b.databaseURL)
		rows, err := b.pool.Query(t.Context(), "SELECT merchant_id::text, id::text FROM api_keys ORDER BY id")
		require.NoError(t, err)
		var merchants, keys []string
		for rows.Next() {
			var merchantID, id string
			require.NoError(t, rows.Scan(&merchantID, &id))
			merchants, keys = append(merchants, merchantID), append(keys, id)
		}
		require.Len(t, keys, 2)
		status, p := b.execute(t, "apikey", "revoke", merchants[0], keys[1])
		require.Equal(t, 1, status)
		require.Len(t, p.complaints(), 1)
		_, p = b.execute(t, "apikey", "list", merchants[1])
		require.Contains(t, p.stdout.String(), "valid")
	})
}
