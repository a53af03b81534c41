package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"example.com/payments/internal/idempotency"
	"example.com/payments/internal/idempotency/strategies"
	"example.com/payments/internal/idempotency/strategies/labgateway"
	"example.com/payments/internal/payments"
)

// victimCommand is the process that is killed. Where it would find the database there is somebody who takes its connection and never says a word.
type victimCommand struct {
	Strategy   string    `required:""`
	Database   string    `required:""`
	Redis      string    `required:""`
	MerchantID uuid.UUID `required:"" name:"merchant-id"`
	OrderID    uuid.UUID `required:"" name:"order-id"`
	Key        string    `required:""`
}

func (c *victimCommand) Run(ctx context.Context) error {
	kind, err := strategies.KindOf(c.Strategy)
	if err != nil {
		return err
	}
	// The lab of another process, of which only the connections are needed.
	l := &lab{redisOptions: &redis.Options{Addr: c.Redis}}
	parts, closeParts, err := l.parts(ctx, c.Database, 2, &labgateway.Gateway{Ledger: labgateway.NewLedger()}, nil)
	if err != nil {
		return err
	}
	defer closeParts()
	strategy, err := kind.New(parts)
	if err != nil {
		return err
	}
	for { // Until it is killed: it would try again, too.
		_, _ = strategy.Pay(ctx, strategies.NewRequest(c.MerchantID, c.OrderID, idempotency.Key(c.Key)))
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
}

// killVictim starts a process that pays, and kills it when it waits for the database.
func (b *bench) killVictim(ctx context.Context, strategy string, req payments.NewPayment) error {
	silence, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer silence.Close()
	arrived := make(chan struct{}, 100)
	go func() {
		for {
			conn, err := silence.Accept()
			if err != nil {
				return
			}
			defer conn.Close()
			arrived <- struct{}{}
		}
	}()
	program, err := os.Executable()
	if err != nil {
		return err
	}
	client := b.lab.redis()
	defer client.Close()
	victim := exec.CommandContext(ctx, program, "victim", "--strategy", strategy, "--key", string(req.Claim.Key),
		"--database", fmt.Sprintf("postgres://victim@%s/none?sslmode=disable", silence.Addr()), "--redis", client.Options().Addr,
		"--merchant-id", req.Claim.MerchantID.String(), "--order-id", req.OrderID.String())
	victim.Env = append(os.Environ(), victimEnv+"=1")
	if err := victim.Start(); err != nil {
		return err
	}
	select {
	case <-arrived:
	case <-time.After(20 * time.Second):
		err = errors.New("the process that was to be killed has not come to its database")
	}
	err = errors.Join(err, victim.Process.Kill())
	_ = victim.Wait() // It says that it was killed.
	return err
}

// victimEnv tells a test's binary that it is to be the victim, not to test.
const victimEnv = "CLAIMLAB_VICTIM"
