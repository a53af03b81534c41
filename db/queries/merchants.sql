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
