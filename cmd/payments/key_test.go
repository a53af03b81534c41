package main

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestKey(t *testing.T) {
	t.Parallel()
	// show and resolve run the commands and return what they say.
	show := func(t *testing.T, b *testBundle, i intent) string {
		t.Helper()
		status, p := b.execute(t, "key", "show", b.merchantID(t), i.key)
		require.Zero(t, status, p.stderr.String())
		return p.stdout.String()
	}
	resolve := func(t *testing.T, b *testBundle, i intent) string {
		t.Helper()
		status, p := b.execute(t, "key", "resolve", b.merchantID(t), i.key)
		require.Zero(t, status, p.stderr.String())
		return p.stdout.String()
	}

	t.Run("ShowTellsWhereItStandsHereAndAtTheGateway", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		i := b.intend(t, s)
		held := b.gateway.shut(afterCharge)
		got := b.startPaying(t.Context(), t, s, i)
		receive(t, held.reached)
		require.Regexp(t, `state +in_progress, held for .*s more\n`, show(t, b, i))
		held.open()
		paid := receive(t, got)

		said, before := show(t, b, i), b.everything(t, i)
		require.Regexp(t, `state +done\n`, said)
		require.Regexp(t, `route +POST /v1/payments\n`, said)
		require.Regexp(t, `path +/v1/payments/`+paid.field("id")+`\n`, said)
		require.Regexp(t, `attempt +1, by .+\n`, said)
		require.Regexp(t, `here +payment .*: 1999 EUR, succeeded\n`, said)
		require.Regexp(t, `gateway +approved `+paid.field("gateway_reference")+`, for [0-9a-f]{64} at http://`, said)
		b.gatewayWire.cut(t)
		require.NotContains(t, show(t, b, i), "approved", "the gateway says nothing")
		require.Equal(t, before, b.everything(t, i), "looking changes nothing")
	})

	t.Run("ShowIsAlarmedByAGatewayThatContradictsWhatIsRecorded", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		i := b.intend(t, s)
		require.Equal(t, http.StatusCreated, b.pay(t, s, i).status)
		another := newGateway(t, latency)
		status, p := execute(t, b.settings(t, "GATEWAY_URL=http://"+another.address), "key", "show", b.merchantID(t), i.key)
		require.Equal(t, 1, status)
		require.Contains(t, p.complaints()[0], "contradicts what is recorded")
		require.Regexp(t, `gateway +never_seen`, p.stdout.String())
	})

	t.Run("IsLeftAloneUnlessItIsSaidWhichGatewayToAsk", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		for _, command := range [][]string{{"key", "resolve", b.merchantID(t), "key"}, {"key", "show", b.merchantID(t), "key"}, {"reap", "--once"}, {"serve"}} {
			status, p := execute(t, b.settings(t, "GATEWAY_URL="), command...)
			require.Equal(t, 1, status)
			require.Equal(t, []string{"GATEWAY_URL must be set"}, p.complaints())
		}
	})

	t.Run("ResolveEndsAStaleOneNowAndNeverCharges", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		s := b.ready(t)
		charged := b.intend(t, s)
		killedAt(t, b, s, charged, afterCharge)
		b.keepReaperAway(t, charged)
		s = b.ready(t)
		never := b.intend(t, s)
		killedAt(t, b, s, never, beforeCharge)
		posts := b.gateway.posts.Load()

		b.move(t, "lease_expires_at", "1 hour")
		status, p := b.execute(t, "key", "resolve", b.merchantID(t), never.key)
		require.Equal(t, 1, status, "its lease has not ended")
		require.Contains(t, p.complaints()[0], "not stale")

		b.move(t, "lease_expires_at", "-1 second")
		require.Regexp(t, `state +in_progress, stale: nobody is at work on it, and money may have moved\n`, show(t, b, never))
		require.Regexp(t, `gateway +never_seen, for`, show(t, b, never))
		require.Equal(t, "recorded\n", resolve(t, b, charged))
		require.Equal(t, "left_alone\n", resolve(t, b, never), "its client may still come back")
		b.move(t, "lease_expires_at", "-1 hour")
		require.Equal(t, "canceled\n", resolve(t, b, never))

		require.Equal(t, posts, b.gateway.posts.Load())
		s = b.ready(t)
		require.Equal(t, http.StatusCreated, b.pay(t, s, charged).status)
		require.Equal(t, "payment-failed", b.pay(t, s, never).slug())
		requireEnd(t, b, charged, succeeded)
	})

	t.Run("ThatNobodyHasUsedIsToldSo", func(t *testing.T) {
		t.Parallel()
		b := setup(t)
		for _, command := range []string{"show", "resolve"} {
			status, p := b.execute(t, "key", command, b.merchantID(t), "unused")
			require.Equal(t, 1, status)
			require.Len(t, p.complaints(), 1)
		}
	})
}
