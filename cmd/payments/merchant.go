package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"example.com/payments/internal/payments"
	"example.com/payments/internal/postgres"
)

type merchantCommand struct {
	Create merchantCreateCommand `cmd:"" help:"Create a merchant and print its id and, this once, its API key."`
}

type merchantCreateCommand struct {
	databaseSettings
	Name string `arg:"" help:"What the merchant is called."`
}

func (c *merchantCreateCommand) Run(ctx context.Context, stdout io.Writer) error {
	if length := utf8.RuneCountInString(c.Name); length < 1 || length > 255 {
		return errors.New("a merchant's name has 1 to 255 characters")
	}
	return withPool(ctx, c.databaseSettings, func(pool *postgres.Pool) error {
		id, apiKey, err := payments.NewMerchants(pool, false).Create(ctx, c.Name)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(stdout, "merchant_id  %s\napi_key      %s\n", id, apiKey)
		return err
	})
}

// apiKeyCommand replaces API keys without a gap: create the new one, bring it to the clients, revoke the old one.
type apiKeyCommand struct {
	Create apiKeyCreateCommand `cmd:"" help:"Give a merchant one more API key and print it, this once."`
	List   apiKeyListCommand   `cmd:"" help:"List a merchant's API keys, without their secrets."`
	Revoke apiKeyRevokeCommand `cmd:"" help:"End an API key. Every replica refuses it after 30 seconds at the latest."`
}

type apiKeyCreateCommand struct {
	databaseSettings
	Merchant uuid.UUID `arg:"" help:"The merchant's id."`
}

func (c *apiKeyCreateCommand) Run(ctx context.Context, stdout io.Writer) error {
	return withPool(ctx, c.databaseSettings, func(pool *postgres.Pool) error {
		id, apiKey, err := payments.NewMerchants(pool, false).CreateAPIKey(ctx, c.Merchant)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(stdout, "api_key_id  %s\napi_key     %s\n", id, apiKey)
		return err
	})
}

type apiKeyListCommand struct {
	databaseSettings
	Merchant uuid.UUID `arg:"" help:"The merchant's id."`
}

func (c *apiKeyListCommand) Run(ctx context.Context, stdout io.Writer) error {
	return withPool(ctx, c.databaseSettings, func(pool *postgres.Pool) error {
		keys, err := payments.NewMerchants(pool, false).APIKeys(ctx, c.Merchant)
		if err != nil {
			return err
		}
		for _, key := range keys {
			state := "valid"
			if key.RevokedAt != nil {
				state = "revoked " + key.RevokedAt.Format(time.RFC3339)
			}
			if _, err := fmt.Fprintf(stdout, "%s  created %s  %s\n", key.ID, key.CreatedAt.Format(time.RFC3339), state); err != nil {
				return err
			}
		}
		return nil
	})
}

type apiKeyRevokeCommand struct {
	databaseSettings
	Merchant uuid.UUID `arg:"" help:"The merchant's id."`
	APIKey   uuid.UUID `arg:"" name:"api-key-id" help:"The API key's id, as listed."`
}

func (c *apiKeyRevokeCommand) Run(ctx context.Context) error {
	return withPool(ctx, c.databaseSettings, func(pool *postgres.Pool) error {
		return payments.NewMerchants(pool, false).RevokeAPIKey(ctx, c.Merchant, c.APIKey)
	})
}
