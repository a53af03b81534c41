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
	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"

	"example.com/payments/internal/dbsqlc"
	"example.com/payments/internal/postgres"
)

const (
	// APIKeyPrefix is what every API key begins with, so that a scanner of source code can find one that has leaked.
	APIKeyPrefix = "sk_"
	// TestAPIKeyPrefix marks the keys that everybody knows. Only `payments dev` lets them in.
	TestAPIKeyPrefix = "sk_test_"
	// A key that was revoked is let in for thirty seconds at most: this long, and before that for as long as a look-up may take that had
	// begun when it was revoked.
	apiKeyCacheTTL = 30*time.Second - postgres.StatementTimeout
	// Our keys have 40 characters, the demo's fewer.
	apiKeyMaxLength = 100
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
	asking    *semaphore.Weighted
}

// NewMerchants returns the register in db. Keys with [TestAPIKeyPrefix] are let in only when allowTest is set.
func NewMerchants(db *postgres.Pool, allowTest bool) *Merchants {
	return &Merchants{
		db: db, allowTest: allowTest,
		// Who makes keys up costs a look-up each. They share a quarter of the pool, and leave the rest to the payments.
		asking: semaphore.NewWeighted(int64(max(1, db.Stat().MaxConns()/4))),
		known:  expirable.NewLRU[[sha256.Size]byte, uuid.UUID](apiKeyCacheSize, nil, apiKeyCacheTTL),
	}
}

// Authenticate returns the merchant of an API key, [ErrUnauthorized], or [ErrStorageUnavailable]. It looks the key's SHA-256 up, so how
// long it takes tells nothing about how much of a guess was right. Unknown keys are not remembered: a new key works at once.
func (m *Merchants) Authenticate(ctx context.Context, apiKey string) (uuid.UUID, error) {
	if !strings.HasPrefix(apiKey, APIKeyPrefix) || len(apiKey) > apiKeyMaxLength || !m.allowTest && strings.HasPrefix(apiKey, TestAPIKeyPrefix) {
		return uuid.Nil, ErrUnauthorized
	}
	hash := sha256.Sum256([]byte(apiKey))
	if merchantID, ok := m.known.Get(hash); ok {
		return merchantID, nil
	}
	// When a merchant's entry expires, a thousand requests may find out together; one of them asks.
	merchantID, err, _ := m.lookUps.Do(string(hash[:]), func() (any, error) {
		ctx := context.WithoutCancel(ctx) // It is asked for all that wait.
		turn, cancel := context.WithTimeout(ctx, m.db.AcquireTimeout())
		defer cancel()
		if err := m.asking.Acquire(turn, 1); err != nil {
			return nil, fmt.Errorf("%w: %w", postgres.ErrNoConnection, err)
		}
		defer m.asking.Release(1)
		merchantID, err := dbsqlc.New().MerchantByAPIKey(ctx, m.db, hash[:])
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
	apiKey = newAPIKey()
	merchantID = uuid.Must(uuid.NewV7())
	return merchantID, apiKey, m.Register(ctx, merchantID, name, apiKey)
}

// newAPIKey has 192 random bits: not to be guessed, and short enough to paste.
func newAPIKey() string {
	secret := make([]byte, 24)
	_, _ = rand.Read(secret)
	return APIKeyPrefix + "live_" + base64.RawURLEncoding.EncodeToString(secret)
}

// CreateAPIKey gives a merchant one more API key. Those it has stay valid, so that a key can be replaced without a gap: create the new
// one, bring it to the clients, revoke the old one. It returns [ErrNotFound] when there is no such merchant.
func (m *Merchants) CreateAPIKey(ctx context.Context, merchantID uuid.UUID) (id uuid.UUID, apiKey string, err error) {
	apiKey, id = newAPIKey(), uuid.Must(uuid.NewV7())
	return id, apiKey, insertAPIKey(ctx, m.db, merchantID, id, apiKey)
}

// APIKeys lists a merchant's API keys, oldest first. Their secrets are not kept.
func (m *Merchants) APIKeys(ctx context.Context, merchantID uuid.UUID) ([]APIKey, error) {
	rows, err := dbsqlc.New().APIKeyList(ctx, m.db, merchantID)
	if err != nil {
		return nil, fmt.Errorf("list API keys: %w", err)
	}
	keys := make([]APIKey, len(rows))
	for i, row := range rows {
		keys[i] = APIKey{ID: row.ID, CreatedAt: row.CreatedAt, RevokedAt: row.RevokedAt}
	}
	return keys, nil
}

// APIKey is what is known of an API key.
type APIKey struct {
	ID        uuid.UUID
	CreatedAt time.Time
	RevokedAt *time.Time // nil while it is valid
}

// RevokeAPIKey ends an API key for good. A replica that has used it within the last half minute may let it in until that has passed. It
// returns [ErrNotFound] when the merchant has no such key.
func (m *Merchants) RevokeAPIKey(ctx context.Context, merchantID, id uuid.UUID) error {
	rows, err := dbsqlc.New().APIKeyRevoke(ctx, m.db, dbsqlc.APIKeyRevokeParams{MerchantID: merchantID, ID: id})
	if err != nil {
		return fmt.Errorf("revoke API key: %w", err)
	}
	if rows == 0 {
		return ErrNotFound
	}
	return nil
}

// Register adds a merchant with a given API key, of which only the SHA-256 is stored.
func (m *Merchants) Register(ctx context.Context, merchantID uuid.UUID, name, apiKey string) error {
	return m.db.BeginFunc(ctx, func(ctx context.Context, tx pgx.Tx) error {
		if err := dbsqlc.New().MerchantInsert(ctx, tx, dbsqlc.MerchantInsertParams{ID: merchantID, Name: name}); err != nil {
			return fmt.Errorf("insert merchant: %w", err)
		}
		return insertAPIKey(ctx, tx, merchantID, uuid.Must(uuid.NewV7()), apiKey)
	})
}

func insertAPIKey(ctx context.Context, db dbsqlc.DBTX, merchantID, id uuid.UUID, apiKey string) error {
	hash := sha256.Sum256([]byte(apiKey))
	err := dbsqlc.New().APIKeyInsert(ctx, db, dbsqlc.APIKeyInsertParams{MerchantID: merchantID, ID: id, SecretSha256: hash[:]})
	switch {
	case postgres.IsForeignKeyViolation(err):
		return ErrNotFound
	case err != nil:
		return fmt.Errorf("insert API key: %w", err)
	}
	return nil
}
