package payments

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/hashicorp/golang-lru/v2/expirable"
	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/singleflight"

	"example.com/payments/internal/dbsqlc"
	"example.com/payments/internal/postgres"
)

const (
	// APIKeyPrefix is what every API key begins with, so that a scanner of source code can find one that has leaked.
	APIKeyPrefix = "sk_"
	// TestAPIKeyPrefix marks the keys that everybody knows. Only `payments dev` lets them in.
	TestAPIKeyPrefix = "sk_test_"
	// A key that was revoked is let in for this long at most.
	apiKeyCacheTTL = 30 * time.Second
	// As many API keys as may be in use within half a minute before look-ups begin to repeat.
	apiKeyCacheSize = 10_000
)

// ErrUnauthorized: the API key is nobody's.
var ErrUnauthorized = errors.New("API key is unknown or revoked")

// Merchants knows whose an API key is.
type Merchants struct {
	db        *postgres.Pool
	allowTest bool
	known     *expirable.LRU[[sha256.Size]byte, uuid.UUID]
	lookUps   singleflight.Group
}

// NewMerchants returns the register in db. Keys with [TestAPIKeyPrefix] are let in only when allowTest is set.
func NewMerchants(db *postgres.Pool, allowTest bool) *Merchants {
	return &Merchants{
		db: db, allowTest: allowTest,
		known: expirable.NewLRU[[sha256.Size]byte, uuid.UUID](apiKeyCacheSize, nil, apiKeyCacheTTL),
	}
}

// Authenticate returns the merchant of an API key, [ErrUnauthorized], or [ErrStorageUnavailable]. It looks the key's SHA-256 up, so how
// long it takes tells nothing about how much of a guess was right. Unknown keys are not remembered: a new key works at once.
func (m *Merchants) Authenticate(ctx context.Context, apiKey string) (uuid.UUID, error) {
	if !strings.HasPrefix(apiKey, APIKeyPrefix) || !m.allowTest && strings.HasPrefix(apiKey, TestAPIKeyPrefix) {
		return uuid.Nil, ErrUnauthorized
	}
	hash := sha256.Sum256([]byte(apiKey))
	if merchantID, ok := m.known.Get(hash); ok {
		return merchantID, nil
	}
	// When a merchant's entry expires, a thousand requests may find out together; one of them asks.
	merchantID, err, _ := m.lookUps.Do(string(hash[:]), func() (any, error) {
		merchantID, err := dbsqlc.New().MerchantByAPIKey(context.WithoutCancel(ctx), m.db, hash[:])
		if err == nil {
			m.known.Add(hash, merchantID)
		}
		return merchantID, err
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return uuid.Nil, ErrUnauthorized
	case err != nil:
		return uuid.Nil, storageError(fmt.Errorf("look up API key: %w", err))
	}
	return merchantID.(uuid.UUID), nil
}

// Create registers a merchant and returns its first API key, which is not kept anywhere and cannot be shown again.
func (m *Merchants) Create(ctx context.Context, name string) (merchantID uuid.UUID, apiKey string, err error) {
	// 192 bits: not to be guessed, and short enough to paste.
	secret := make([]byte, 24)
	_, _ = rand.Read(secret)
	apiKey = APIKeyPrefix + "live_" + base64.RawURLEncoding.EncodeToString(secret)
	merchantID = uuid.Must(uuid.NewV7())
	return merchantID, apiKey, m.Register(ctx, merchantID, name, apiKey)
}

// Register adds a merchant with a given API key, of which only the SHA-256 is stored.
func (m *Merchants) Register(ctx context.Context, merchantID uuid.UUID, name, apiKey string) error {
	hash := sha256.Sum256([]byte(apiKey))
	return m.db.BeginFunc(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if err := dbsqlc.New().MerchantInsert(ctx, tx, dbsqlc.MerchantInsertParams{ID: merchantID, Name: name}); err != nil {
			return fmt.Errorf("insert merchant: %w", err)
		}
		err := dbsqlc.New().APIKeyInsert(ctx, tx, dbsqlc.APIKeyInsertParams{
			MerchantID: merchantID, ID: uuid.Must(uuid.NewV7()), SecretSha256: hash[:],
		})
		if err != nil {
			return fmt.Errorf("insert API key: %w", err)
		}
		return nil
	})
}
