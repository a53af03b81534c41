package main

import (
	"context"
	"fmt"
	"net"
	"time"

	"example.com/payments/internal/gateway/simulator"
)

type simulatorSettings struct {
	GatewayLatency time.Duration `env:"GATEWAY_LATENCY" default:"800ms" help:"How long the simulated gateway works on a charge."`
}

func (s simulatorSettings) check(f *faults) {
	f.check(s.GatewayLatency >= 0, "GATEWAY_LATENCY (%s) must not be negative", s.GatewayLatency)
}

type gatewayCommand struct {
	simulatorSettings
	logSettings
	ListenAddr string `env:"LISTEN_ADDR" default:":8081" help:"Address to listen on."`
	Ledger     string `env:"GATEWAY_LEDGER" default:"gateway-ledger.jsonl" help:"File that the ledger is kept in."`
}

// Run serves the simulated gateway until ctx ends.
func (c *gatewayCommand) Run(ctx context.Context) error {
	var f faults
	if c.check(&f); f.err() != nil {
		return f.err()
	}
	sim, err := simulator.Open(c.Ledger, simulator.Options{Latency: c.GatewayLatency})
	if err != nil {
		return err
	}
	listener, err := net.Listen("tcp", c.ListenAddr)
	if err != nil {
		return fmt.Errorf("LISTEN_ADDR: %w", err)
	}
	c.logger().InfoContext(ctx, "simulated gateway is listening", "address", listener.Addr().String(), "ledger", c.Ledger, "latency", c.GatewayLatency)
	return serveHTTP(ctx, listener, sim, c.logger(), sim)
}
