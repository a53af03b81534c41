package strategies

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"example.com/payments/db"
	"example.com/payments/internal/devdb"
	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/idempotency/strategies/devredis"
	"example.com/payments/internal/payments"
)

func kindOf(t testing.TB, name string) Kind {
	t.Helper()
	kind, err := KindOf(name)
	require.NoError(t, err)
	return kind
}

// TestRestart is the one promise that needs servers of its own: all of them are killed or stopped, and started again.
func TestRestart(t *testing.T) {
	t.Parallel()
	dir, err := os.MkdirTemp("", "strategies-restart-") // not t.TempDir: the account that runs the server could not enter it
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	server, err := devdb.Start(t.Context(), devdb.Options{DataDir: dir})
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Stop() })
	redisServer, err := devredis.Start(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() { _ = redisServer.Stop() })

	type before struct {
		world   *world
		request payments.NewPayment
		answer  idempotency.Answer
	}
	paidBefore := map[string]before{}
	for _, kind := range Kinds() {
		if kind.MeasuredOnly {
			continue
		}
		require.NoError(t, server.CreateDatabase(t.Context(), kind.Name))
		require.NoError(t, db.Up(t.Context(), server.URL(kind.Name)))
		w := newGroundAt(t, kind, server.URL(kind.Name), redisServer).world(t)
		p := w.process()
		req := w.request("restart")
		answer, err := p.Pay(t.Context(), req)
		require.NoError(t, err)
		p.close()
		w.admin.Close()
		paidBefore[kind.Name] = before{w, req, answer}
	}

	require.NoError(t, server.Stop())
	require.NoError(t, redisServer.Restart(t.Context()))
	server, err = devdb.Start(t.Context(), devdb.Options{DataDir: dir})
	require.NoError(t, err)
	t.Cleanup(func() { _ = server.Stop() })

	for _, kind := range Kinds() {
		if kind.MeasuredOnly {
			continue
		}
		t.Run(kind.Name+"/"+PromiseDurable, func(t *testing.T) {
			was := paidBefore[kind.Name]
			was.world.databaseURL = server.URL(kind.Name)
			answer, err := was.world.process().Pay(t.Context(), repeat(was.request))
			require.NoError(t, err)
			require.True(t, answer.Replayed)
			require.Equal(t, 1, was.world.charges(was.request))
			require.Equal(t, string(was.answer.Body), string(answer.Body))
			hold(t, kind, PromiseDurable, expect(answer.RequestID, was.answer.RequestID, "the request that the answer was made for"))
		})
	}
}

func TestLeasesAreRenewedWhileTheGatewayWorks(t *testing.T) {
	t.Parallel()
	for _, name := range []string{NameOnConflict, NameUniqueViolation, NameRowLock, NameAdvisoryLock} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newGround(t, kindOf(t, name)).world(t)
			short := settings("short")
			short.LeaseTTL = 600 * time.Millisecond
			p, gate := w.processWith(short), newGate(t)
			p.gateway.Arrived = gate.stop
			ctx, cancel := context.WithCancel(t.Context())
			var run sync.WaitGroup
			run.Go(func() { _ = p.Run(ctx) })
			defer run.Wait()
			defer cancel()

			ended := p.start(w.request("renewed"))
			gate.await(t)
			lease := func() (expires time.Time) {
				require.NoError(t, w.admin.QueryRow(t.Context(), "SELECT lease_expires_at FROM idempotency_keys WHERE merchant_id = $1", w.merchantID).Scan(&expires))
				return expires
			}
			first := lease()
			require.Eventually(t, func() bool { return lease().After(first) }, 20*time.Second, 10*time.Millisecond)
			gate.pass()
			require.NoError(t, wait(t, ended).err)
		})
	}
}

func TestAdvisoryLock(t *testing.T) {
	t.Parallel()
	ground := newGround(t, kindOf(t, NameAdvisoryLock))

	t.Run("TwoKeysWithOneHashAreTwoPayments", func(t *testing.T) {
		t.Parallel()
		w := ground.world(t)
		p := w.process()
		p.Strategy.(*advisoryLock).hash = func(uuid.UUID, idempotency.Key) int64 { return 7 }
		one, two := w.request("one"), w.request("two")
		var group sync.WaitGroup
		for _, req := range []payments.NewPayment{one, two, one, two, one, two} {
			group.Go(func() {
				_, err := p.Pay(context.Background(), repeat(req))
				if err != nil && !isInFlight(err) {
					t.Errorf("a collision was answered with %v", err)
				}
			})
		}
		group.Wait()
		require.Equal(t, []int{1, 1}, []int{w.charges(one), w.charges(two)})
	})

	t.Run("AStrangerWithTheSameHashDoesNotWaitForTheGateway", func(t *testing.T) {
		t.Parallel()
		w := ground.world(t)
		p, gate := w.process(), newGate(t)
		p.Strategy.(*advisoryLock).hash = func(uuid.UUID, idempotency.Key) int64 { return 8 }
		blocked := w.request("blocked")
		p.gateway.Arrived = func(ctx context.Context, intent payments.Intent) {
			if intent.Key == newAttempt(blocked).gatewayKey {
				gate.stop(ctx, intent)
			}
		}
		ended := p.start(blocked)
		gate.await(t)
		_, err := p.Pay(t.Context(), w.request("stranger"))
		require.NoError(t, err)
		gate.pass()
		require.NoError(t, wait(t, ended).err)
	})

	t.Run("TheHashIsOfMerchantAndKeyAndHasSixtyFourBits", func(t *testing.T) {
		t.Parallel()
		merchant := uuid.MustParse("0198c2f0-7f3e-7c1a-9a53-5f0f5f2b1c11")
		require.EqualValues(t, 7216706391207574421, hash64(merchant, "order-1"))
		require.NotEqual(t, hash64(merchant, "order-1"), hash64(uuid.Nil, "order-1"))
		var bits int64
		for i := range 64 {
			bits |= hash64(merchant, idempotency.Key(fmt.Sprint(i)))
		}
		require.EqualValues(t, -1, bits)
	})
}

func TestUniqueViolation(t *testing.T) {
	t.Parallel()
	ground := newGround(t, kindOf(t, NameUniqueViolation))

	// Why the loser reads in a second transaction.
	t.Run("NothingCanBeReadInTheTransactionThatHasLost", func(t *testing.T) {
		t.Parallel()
		w := ground.world(t)
		p := w.process()
		req := w.request("25P02")
		must(p.Pay(t.Context(), req))
		s := p.Strategy.(*uniqueViolation)
		err := p.db.BeginFunc(t.Context(), func(ctx context.Context, tx pgx.Tx) error {
			lost := s.insert(ctx, tx, uniqueViolationInsert, w.requestFor(w.order("open"), "25P02"), newAttempt(req))
			require.ErrorContains(t, lost, keysPrimaryKey)
			_, err := idempotency.Get(ctx, tx, w.merchantID, req.Claim.Key)
			return err
		})
		require.ErrorContains(t, err, "25P02")
	})
}

func TestRedisSetNX(t *testing.T) {
	t.Parallel()
	ground := newGround(t, kindOf(t, NameRedisSetNX))

	t.Run("ATTLThatTheWorkCouldOutlastIsRefused", func(t *testing.T) {
		t.Parallel()
		short := settings("short")
		short.LeaseTTL = short.GatewayTimeout
		_, err := newRedisSetNX(Parts{Settings: short})
		require.ErrorContains(t, err, "LEASE_TTL (30s) must exceed GATEWAY_TIMEOUT (30s)")
	})

	t.Run("ALateReleaseLeavesTheNextHoldersClaim", func(t *testing.T) {
		t.Parallel()
		w := ground.world(t)
		p := w.process()
		s := p.Strategy.(*redisSetNX)
		req := w.request("late-release")
		_, first, err := s.claim(t.Context(), req)
		require.NoError(t, err)
		w.endLease(req)
		_, second, err := s.claim(t.Context(), req)
		require.NoError(t, err)
		require.NoError(t, s.release(t.Context(), first))
		kept, err := w.redis.Get(t.Context(), second.name).Bytes()
		require.NoError(t, err)
		require.Equal(t, second.value, kept)
		require.NoError(t, s.release(t.Context(), second))
		require.Zero(t, w.redis.Exists(t.Context(), second.name).Val())
	})

	t.Run("ALateHolderDoesNotRenewTheNextOnesClaim", func(t *testing.T) {
		t.Parallel()
		w := ground.world(t)
		s := w.process().Strategy.(*redisSetNX)
		req := w.request("late-renewal")
		_, first, err := s.claim(t.Context(), req)
		require.NoError(t, err)
		w.endLease(req)
		_, _, err = s.claim(t.Context(), req)
		require.NoError(t, err)
		still, err := extendIfMine.Run(t.Context(), w.redis, []string{first.name}, first.value, 1000).Int()
		require.NoError(t, err)
		require.Zero(t, still)
	})

	t.Run("AClaimHasATTLFromTheCommandThatMakesIt", func(t *testing.T) {
		t.Parallel()
		w := ground.world(t)
		s := w.process().Strategy.(*redisSetNX)
		req := w.request("ttl")
		_, mine, err := s.claim(t.Context(), req)
		require.NoError(t, err)
		left := w.redis.PTTL(t.Context(), mine.name).Val()
		require.Greater(t, left, 50*time.Second)
		require.LessOrEqual(t, left, 60*time.Second)
	})

	// What the unique index is for, and what it is not enough for: there are two holders, and only the gateway's memory stands between them.
	t.Run("AForgottenClaimMakesASecondHolderOfTheSamePayment", func(t *testing.T) {
		t.Parallel()
		w := ground.world(t)
		p, other, gate := w.process(), w.process(), newGate(t)
		p.gateway.Arrived = gate.stop
		req := w.request("forgotten")
		ended := p.start(req)
		gate.await(t)
		require.NoError(t, w.redis.Del(t.Context(), redisName(w.merchantID, req.Claim.Key)).Err())
		_, err := other.Pay(t.Context(), repeat(req))
		require.NoError(t, err)
		gate.pass()
		require.NoError(t, wait(t, ended).err)
		require.Equal(t, 1, w.payments("succeeded"))
		require.Equal(t, 2, w.charges(req), "a gateway that knows no keys has charged twice")
	})

	t.Run("WithoutRedisNothingIsBegun", func(t *testing.T) {
		t.Parallel()
		w := ground.world(t)
		p := w.process()
		require.NoError(t, p.redis.Close())
		req := w.request("no-redis")
		_, err := p.Pay(t.Context(), req)
		require.ErrorIs(t, err, payments.ErrStorageUnavailable)
		require.Zero(t, w.charges(req))
	})

	t.Run("AnAnswerThatRedisDidNotHearOfIsMadeAgainFromThePayment", func(t *testing.T) {
		t.Parallel()
		w := ground.world(t)
		p := w.process()
		req := w.request("not-stored")
		first := must(p.Pay(t.Context(), req))
		w.endLease(req)
		again, err := p.Pay(t.Context(), repeat(req))
		require.NoError(t, err)
		require.True(t, again.Replayed)
		require.Equal(t, string(first.Body), string(again.Body))
		other := w.request("not-stored")
		w.endLease(req)
		_, err = p.Pay(t.Context(), other)
		require.ErrorIs(t, err, idempotency.ErrKeyReused)
	})
}

// TestMeasuredOnly shows what is wrong with the forms that nobody should use.
func TestMeasuredOnly(t *testing.T) {
	t.Parallel()

	t.Run("check_then_act/TwoClicksAreTwoCharges", func(t *testing.T) {
		t.Parallel()
		w := newGround(t, kindOf(t, NameCheckThenAct)).world(t)
		p := w.process()
		// Both have looked before either writes: the test keeps the order locked against the INSERT.
		req := w.request("double-click")
		tx, err := w.admin.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), "SELECT FROM orders WHERE id = $1 FOR UPDATE", req.OrderID)
		require.NoError(t, err)
		one, two := p.start(req), p.start(repeat(req))
		require.Eventually(t, func() bool {
			var waiting int
			err := w.admin.QueryRow(t.Context(), "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND wait_event_type = 'Lock'", p.name).Scan(&waiting)
			return err == nil && waiting == 2
		}, 20*time.Second, 2*time.Millisecond)
		require.NoError(t, tx.Rollback(t.Context()))
		require.NoError(t, errors.Join(wait(t, one).err, wait(t, two).err))
		require.Equal(t, 2, w.charges(req))
		require.Equal(t, 2, w.payments("succeeded"))
	})

	for _, name := range []string{NameRowLockHeld, NameAdvisoryLockHeld} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ground := newGround(t, kindOf(t, name))

			t.Run("HoldsAConnectionWhileTheGatewayIsSlow", func(t *testing.T) {
				t.Parallel()
				w := ground.world(t)
				p, gate := w.process(), newGate(t)
				p.gateway.Arrived = gate.stop
				ended := p.start(w.request("held"))
				gate.await(t)
				require.EqualValues(t, 1, p.db.Stat().AcquiredConns())
				gate.pass()
				require.NoError(t, wait(t, ended).err)
			})

			t.Run("ACrashAfterTheChargeForgetsIt", func(t *testing.T) {
				t.Parallel()
				w := ground.world(t)
				dead, alive, gate := w.process(), w.process(), newGate(t)
				dead.gateway.Charged = gate.stop
				req := w.request("forgets")
				dead.start(req)
				gate.await(t)
				dead.kill()
				_, err := alive.Pay(t.Context(), repeat(req))
				require.NoError(t, err)
				require.Equal(t, 2, w.charges(req), "the rollback took the payment's row along, and the repeat ran as new")
			})

			t.Run("OneOfTwentyWins", func(t *testing.T) {
				t.Parallel()
				w := ground.world(t)
				p := w.process()
				req := w.request("held-twins")
				var group sync.WaitGroup
				for range 20 {
					group.Go(func() {
						_, err := p.Pay(context.Background(), repeat(req))
						if err != nil {
							t.Errorf("a twin met %v", err)
						}
					})
				}
				group.Wait()
				require.Equal(t, 1, w.charges(req))
			})
		})
	}
}
