-- name: PaymentClaim :one
-- Claims the key and writes the pending payment, together or not at all. No row: the key is taken, or the order refuses; see
-- which in a fresh snapshot. 23505 on one_live_payment_per_order: another key is paying the order.
--
-- The order is locked FOR KEY SHARE, which waits for a cancel and not for a record. Anything stronger deadlocks with the record.
-- NOT EXISTS keeps a late twin from locking and writing anything.
WITH o AS (
    SELECT orders.id
    FROM orders
    WHERE orders.merchant_id = @merchant_id
        AND orders.id = @order_id
        AND orders.status = 'open'
        AND orders.amount = @amount
        AND orders.currency = @currency
        AND NOT EXISTS (
            SELECT
            FROM idempotency_keys
            WHERE idempotency_keys.merchant_id = @merchant_id
                AND idempotency_keys.key = @key
        )
    FOR KEY SHARE
), k AS (
    INSERT INTO idempotency_keys (
        merchant_id, key, route, resource_id, resource_path, recipe, fingerprint, mode,
        state, attempt, holder, request_id, traceparent, lease_id, lease_expires_at, next_look_at, outcome_uncertain, created_at
    )
    SELECT
        @merchant_id, @key, @route, @id, @resource_path, @recipe, @fingerprint, @mode,
        'in_progress', 1, @holder, @request_id, sqlc.narg(traceparent), @lease_id::uuid,
        clock_timestamp() + @lease_ttl::interval, clock_timestamp() + @lease_ttl::interval, true, @created_at
    FROM o
    ON CONFLICT (merchant_id, key) DO NOTHING
    RETURNING key
)
INSERT INTO payments (
    merchant_id, id, order_id, status, amount, currency, payment_method, gateway_key, metadata, created_at
)
SELECT
    @merchant_id, @id, o.id, 'processing', @amount, @currency, @payment_method, @gateway_key, @metadata, @created_at
FROM k, o
RETURNING id;

-- name: PaymentRecord :one
-- The outcome, the answer that every repeat will get, the order and the event, together. Fenced: no row means that the lease is no
-- longer ours, or that an earlier try of this statement went through although its call failed.
WITH k AS (
    UPDATE idempotency_keys
    SET state = @state,
        answer_status = @answer_status::smallint,
        answer_headers = @answer_headers,
        answer_body = @answer_body,
        outcome_uncertain = false,
        final_at = clock_timestamp(),
        expires_at = clock_timestamp() + @retention::interval
    WHERE idempotency_keys.merchant_id = @merchant_id
        AND idempotency_keys.key = @key
        AND idempotency_keys.lease_id = @lease_id::uuid
        AND idempotency_keys.state = 'in_progress'
    RETURNING expires_at
), p AS (
    UPDATE payments
    SET status = @status,
        gateway_reference = sqlc.narg(gateway_reference),
        decline_code = sqlc.narg(decline_code),
        failure_code = sqlc.narg(failure_code),
        event_count = event_count + 1
    WHERE payments.merchant_id = @merchant_id
        AND payments.id = @id
        AND EXISTS (SELECT FROM k)
    RETURNING event_count
), o AS (
    UPDATE orders
    SET status = 'paid'
    WHERE orders.merchant_id = @merchant_id
        AND orders.id = @order_id
        AND @status = 'succeeded'
        AND EXISTS (SELECT FROM p)
), e AS (
    INSERT INTO events (merchant_id, subject_id, number, type, resource_id, payload)
    SELECT @merchant_id, @id, p.event_count, @event_type, @id, @event_payload
    FROM p
)
SELECT k.expires_at::timestamptz AS expires_at
FROM k;

-- name: PaymentGet :one
SELECT *
FROM payments
WHERE merchant_id = @merchant_id
    AND id = @id;

-- name: PaymentLiveOfOrder :one
-- The payment that is in the way of a second key on the same order.
SELECT id
FROM payments
WHERE merchant_id = @merchant_id
    AND order_id = @order_id
    AND status IN ('processing', 'succeeded');

-- name: PaymentList :many
-- Newest first. UUIDv7 ids grow with time, so the primary key is the order of the list and the cursor is an id.
SELECT *
FROM payments
WHERE merchant_id = @merchant_id
    AND id < @before
    AND (sqlc.narg(status)::text IS NULL OR status = sqlc.narg(status))
ORDER BY id DESC
LIMIT @max;

-- name: PaymentListOfOrder :many
SELECT *
FROM payments
WHERE merchant_id = @merchant_id
    AND order_id = @order_id
    AND id < @before
    AND (sqlc.narg(status)::text IS NULL OR status = sqlc.narg(status))
ORDER BY id DESC
LIMIT @max;
