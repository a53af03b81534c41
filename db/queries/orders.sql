-- name: OrderCreate :one
-- The claim of an order's key is its record too: nothing outside the database has to happen. No row: the key is taken.
WITH k AS (
    INSERT INTO idempotency_keys (
        merchant_id, key, route, resource_id, resource_path, recipe, fingerprint, mode,
        state, attempt, holder, request_id, traceparent, outcome_uncertain,
        answer_status, answer_headers, answer_body, created_at, final_at, expires_at
    )
    SELECT
        @merchant_id, @key, @route, @id, @resource_path, @recipe, @fingerprint, 'sync',
        'done', 1, @holder, @request_id, sqlc.narg(traceparent), false,
        @answer_status::smallint, @answer_headers, @answer_body, @created_at, clock_timestamp(), clock_timestamp() + @retention::interval
    ON CONFLICT (merchant_id, key) DO NOTHING
    RETURNING expires_at
), o AS (
    INSERT INTO orders (merchant_id, id, status, amount, currency, reference, metadata, created_at)
    SELECT @merchant_id, @id, 'open', @amount, @currency, sqlc.narg(reference), @metadata, @created_at
    FROM k
    RETURNING id
)
SELECT k.expires_at::timestamptz AS expires_at
FROM k, o;

-- name: OrderGet :one
SELECT *
FROM orders
WHERE merchant_id = @merchant_id
    AND id = @id;

-- name: OrderList :many
-- Newest first. UUIDv7 ids grow with time, so the primary key is the order of the list and the cursor is an id.
SELECT *
FROM orders
WHERE merchant_id = @merchant_id
    AND id < @before
    AND (sqlc.narg(status)::text IS NULL OR status = sqlc.narg(status))
ORDER BY id DESC
LIMIT @max;

-- name: OrderLock :one
-- The first step of whatever closes an order against payment. It waits for the claims that have seen the order open; who pays it can
-- only be seen by the next statement.
SELECT *
FROM orders
WHERE merchant_id = @merchant_id
    AND id = @id
FOR UPDATE;

-- name: OrderCancel :one
-- The last step of a cancel, under OrderLock. No row: the key is taken, and nothing was written.
WITH k AS (
    INSERT INTO idempotency_keys (
        merchant_id, key, route, resource_id, resource_path, recipe, fingerprint, mode,
        state, attempt, holder, request_id, traceparent, outcome_uncertain,
        answer_status, answer_headers, answer_body, created_at, final_at, expires_at
    )
    SELECT
        @merchant_id, @key, @route, @id, @resource_path, @recipe, @fingerprint, 'sync',
        'done', 1, @holder, @request_id, sqlc.narg(traceparent), false,
        @answer_status::smallint, @answer_headers, @answer_body, @created_at, clock_timestamp(), clock_timestamp() + @retention::interval
    ON CONFLICT (merchant_id, key) DO NOTHING
    RETURNING expires_at
), o AS (
    UPDATE orders
    SET status = 'canceled'
    WHERE orders.merchant_id = @merchant_id
        AND orders.id = @id
        AND EXISTS (SELECT FROM k)
    RETURNING orders.id
), e AS (
    INSERT INTO events (merchant_id, subject_id, number, type, resource_id, payload)
    SELECT @merchant_id, @id, 1, 'order.canceled', @id, @event_payload
    FROM o
)
SELECT k.expires_at::timestamptz AS expires_at
FROM k;
