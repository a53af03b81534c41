package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	"github.com/google/uuid"

	"example.com/payments/db"
	"example.com/payments/internal/devdb"
	"example.com/payments/internal/gateway/simulator"
	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

// demoAPIKey is known to everybody. `serve` refuses it.
const demoAPIKey = payments.TestAPIKeyPrefix + "demo"

type devCommand struct {
	databaseSettings
	storySettings
	httpSettings
	adminSettings
	simulatorSettings
	logSettings
	DataDir string `placeholder:"DIR" help:"Where the database and the gateway's ledger are kept; by default below the user's cache directory, for root below /var/cache."`
}

// check leaves out only what is not known before the database runs.
func (c *devCommand) check() error {
	var f faults
	if c.DatabaseURL != "" {
		c.DatabaseURL.check(&f)
	}
	c.checkLimits(&f)
	c.storySettings.check(&f)
	c.httpSettings.check(&f, c.storySettings, c.databaseSettings)
	c.simulatorSettings.check(&f)
	return f.err()
}

// Run brings up everything that the service needs and the service itself, and takes it down in reverse when ctx ends. The data
// outlives it.
func (c *devCommand) Run(ctx context.Context, stdout io.Writer) (err error) {
	if err := c.check(); err != nil {
		return err
	}
	dir := c.DataDir
	if dir == "" {
		if dir, err = devdb.DefaultDir("dev"); err != nil {
			return err
		}
	}
	// The account that runs the database has to pass through.
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	database := "that of DATABASE_URL" // The address may hold somebody's password.
	if c.DatabaseURL == "" {
		server, err := devdb.Start(ctx, devdb.Options{DataDir: filepath.Join(dir, "postgres"), Log: os.Stderr})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, server.Stop()) }()
		if err := server.CreateDatabase(ctx, "payments"); err != nil {
			return err
		}
		c.DatabaseURL = secret(server.URL("payments"))
		database = fmt.Sprintf("%s\n           %s", string(c.DatabaseURL), server.Source())
	}
	if err := db.Up(ctx, string(c.DatabaseURL)); err != nil {
		return err
	}
	if err := c.refuseRealPayments(ctx); err != nil {
		return err
	}
	gatewayURL, stopGateway, err := c.startGateway(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stopGateway()) }()

	serve := serveCommand{
		databaseSettings: c.databaseSettings,
		storySettings:    c.storySettings,
		gatewaySettings:  gatewaySettings{GatewayURL: gatewayURL},
		httpSettings:     c.httpSettings,
		adminSettings:    c.adminSettings,
		logSettings:      c.logSettings,
		testKeys:         true,
	}
	return serve.serve(ctx, func(address net.Addr) error {
		if err := c.registerDemo(ctx); err != nil {
			return err
		}
		return c.welcome(ctx, stdout, localURL(address), gatewayURL, database)
	})
}

// refuseRealPayments keeps dev from a database whose payments were made at another gateway: the simulated one has never seen them, and on its
// word the reaper would close the paid ones as failed. Where dev has been, there is its merchant.
func (c *devCommand) refuseRealPayments(ctx context.Context) error {
	return withPool(ctx, c.databaseSettings, func(pool *postgres.Pool) error {
		_, err := payments.NewMerchants(pool, true).Authenticate(ctx, demoAPIKey)
		if !errors.Is(err, payments.ErrUnauthorized) {
			return err
		}
		var paid bool
		if err := pool.QueryRow(ctx, "SELECT EXISTS (SELECT FROM payments)").Scan(&paid); err != nil {
			return fmt.Errorf("look for payments: %w", err)
		}
		if paid {
			return errors.New("DATABASE_URL has payments that were not made by dev: its simulated gateway would deny them, and they would be closed as failed")
		}
		return nil
	})
}

// startGateway runs the simulated gateway in this process, on a free port.
func (c *devCommand) startGateway(dir string) (address string, stop func() error, err error) {
	sim, err := simulator.Open(filepath.Join(dir, "gateway-ledger.jsonl"), simulator.Options{Latency: c.GatewayLatency})
	if err != nil {
		return "", nil, err
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, errors.Join(err, sim.Close())
	}
	ctx, cancel := context.WithCancel(context.Background())
	stopped := make(chan error, 1)
	go func() { stopped <- serveHTTP(ctx, listener, sim, c.logger(), sim) }()
	return localURL(listener.Addr()), func() error {
		cancel()
		return <-stopped
	}, nil
}

// registerDemo makes the merchant demo, unless an earlier run has.
func (c *devCommand) registerDemo(ctx context.Context) error {
	return withPool(ctx, c.databaseSettings, func(pool *postgres.Pool) error {
		merchants := payments.NewMerchants(pool, true)
		_, err := merchants.Authenticate(ctx, demoAPIKey)
		if errors.Is(err, payments.ErrUnauthorized) {
			return merchants.Register(ctx, uuid.Must(uuid.NewV7()), "demo", demoAPIKey)
		}
		return err
	})
}

// welcome prints where everything is, and a request to paste: it pays an order that was made for it. Its key is new in every run and the
// same in every paste, so pasting it again is the demonstration.
func (c *devCommand) welcome(ctx context.Context, stdout io.Writer, serviceURL, gatewayURL, database string) error {
	run := strings.ToLower(rand.Text()[:8])
	orderID, err := demoOrder(ctx, serviceURL, "order-"+run)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(stdout, `
service    %[1]s   (API key %[2]s, documentation at %[1]s/docs)
gateway    %[3]s   (its ledger: %[3]s/charges)
database   %[4]s
process    %[7]d

Pay an order. Paste it twice: the second time it is answered, not charged.

curl -i %[1]s/v1/payments \
  -H 'Authorization: Bearer %[2]s' \
  -H 'Content-Type: application/json' \
  -H 'Idempotency-Key: "pay-%[5]s"' \
  -d '{"order_id":"%[6]s","amount":1999,"currency":"EUR","payment_method":"pm_ok"}'

`, serviceURL, demoAPIKey, gatewayURL, database, run, orderID, os.Getpid())
	return err
}

// demoOrder makes an order to be paid, through the front door.
func demoOrder(ctx context.Context, serviceURL, key string) (id string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, serviceURL+"/v1/orders", bytes.NewBufferString(`{"amount":1999,"currency":"EUR"}`))
	if err != nil {
		return "", err
	}
	request.Header.Set("Authorization", "Bearer "+demoAPIKey)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Idempotency-Key", key)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", err
	}
	defer response.Body.Close()
	var order struct {
		ID string `json:"id"`
	}
	if err := json.NewDecoder(response.Body).Decode(&order); err != nil || response.StatusCode != http.StatusCreated {
		return "", fmt.Errorf("make an order: status %d", response.StatusCode)
	}
	return order.ID, nil
}

// localURL is how this machine reaches a listener, also one that listens on all addresses.
func localURL(address net.Addr) string {
	tcp := address.(*net.TCPAddr)
	host := tcp.IP.String()
	if tcp.IP.IsUnspecified() {
		host = "localhost"
	}
	return "http://" + net.JoinHostPort(host, fmt.Sprint(tcp.Port))
}
