-- name: MerchantInsert :exec
INSERT INTO merchants (id, name)
VALUES (@id, @name);

-- name: MerchantByAPIKey :one
SELECT merchant_id
FROM api_keys
WHERE secret_sha256 = @secret_sha256
    AND revoked_at IS NULL;

-- name: APIKeyInsert :exec
INSERT INTO api_keys (merchant_id, id, secret_sha256)
VALUES (@merchant_id, @id, @secret_sha256);

-- name: APIKeyList :many
SELECT
    id,
    created_at,
    revoked_at
FROM api_keys
WHERE merchant_id = @merchant_id
ORDER BY id;

-- name: APIKeyRevoke :execrows
-- The first revocation counts.
UPDATE api_keys
SET revoked_at = coalesce(revoked_at, now())
WHERE merchant_id = @merchant_id
    AND id = @id;
