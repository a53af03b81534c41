-- name: RefundClaim :one
-- Claims the key, reserves the amount on the payment and writes the pending refund, together or not at all. No row: the key is taken, or
-- the payment refuses; see which in a fresh snapshot. 23502 on refunds.payment_id: the payment refused after a wait for another refund.
--
-- That the payment has succeeded is said by what it is not: status = 'succeeded' would let a plan made on an empty table find the payment
-- among all of the merchant's live ones.
--
-- The reservation is an UPDATE, whose row PostgreSQL checks again after a wait. A sum over the refunds, even under a lock, gives more
-- back than was paid.
WITH k AS (
    INSERT INTO idempotency_keys (
        merchant_id, key, route, resource_id, resource_path, recipe, fingerprint, mode,
        state, attempt, holder, request_id, traceparent, lease_id, lease_expires_at, next_look_at, outcome_uncertain, created_at
    )
    SELECT
        @merchant_id, @key, @route, @id, @resource_path, @recipe, @fingerprint, @mode,
        'in_progress', 1, @holder, @request_id, sqlc.narg(traceparent), @lease_id::uuid,
        clock_timestamp() + @lease_ttl::interval, clock_timestamp() + @lease_ttl::interval, true, @created_at
    FROM payments
    WHERE payments.merchant_id = @merchant_id
        AND payments.id = @payment_id
        AND payments.status NOT IN ('processing', 'declined', 'failed')
        AND payments.amount_reserved + @amount::bigint <= payments.amount
        AND NOT EXISTS (
            SELECT
            FROM idempotency_keys
            WHERE idempotency_keys.merchant_id = @merchant_id
                AND idempotency_keys.key = @key
        )
    ON CONFLICT (merchant_id, key) DO NOTHING
    RETURNING key
), p AS (
    UPDATE payments
    SET amount_reserved = payments.amount_reserved + @amount::bigint
    WHERE payments.merchant_id = @merchant_id
        AND payments.id = @payment_id
        AND payments.status NOT IN ('processing', 'declined', 'failed')
        AND payments.amount_reserved + @amount::bigint <= payments.amount
        AND EXISTS (SELECT FROM k)
    RETURNING payments.id, payments.order_id, payments.currency, payments.gateway_key
), r AS (
    INSERT INTO refunds (merchant_id, id, payment_id, status, amount, currency, reason, gateway_key, created_at)
    SELECT
        @merchant_id, @id, (SELECT p.id FROM p), 'processing', @amount::bigint, (SELECT p.currency FROM p),
        sqlc.narg(reason), @gateway_key, @created_at
    FROM k
    RETURNING refunds.id
)
SELECT
    p.order_id,
    p.currency,
    p.gateway_key AS charge_key
FROM r, p;

-- name: RefundRecord :one
-- The outcome, the answer that every repeat will get, the payment, the order and the event, together. Fenced as PaymentRecord is. What was
-- not given back is free to be refunded again.
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
), r AS (
    UPDATE refunds
    SET status = @status,
        gateway_reference = sqlc.narg(gateway_reference),
        failure_code = sqlc.narg(failure_code)
    WHERE refunds.merchant_id = @merchant_id
        AND refunds.id = @id
        AND EXISTS (SELECT FROM k)
    RETURNING refunds.id
), p AS (
    UPDATE payments
    SET amount_refunded = payments.amount_refunded + CASE WHEN @status = 'succeeded' THEN @amount::bigint ELSE 0 END,
        amount_reserved = payments.amount_reserved - CASE WHEN @status = 'succeeded' THEN 0 ELSE @amount::bigint END,
        event_count = event_count + 1
    WHERE payments.merchant_id = @merchant_id
        AND payments.id = @payment_id
        AND EXISTS (SELECT FROM r)
    RETURNING event_count, payments.amount_refunded = payments.amount AS all_refunded
), o AS (
    UPDATE orders
    SET status = 'refunded'
    WHERE orders.merchant_id = @merchant_id
        AND orders.id = @order_id
        AND EXISTS (SELECT FROM p WHERE p.all_refunded)
), e AS (
    INSERT INTO events (merchant_id, subject_id, number, type, resource_id, payload)
    SELECT @merchant_id, @payment_id, p.event_count, @event_type, @id, @event_payload
    FROM p
)
SELECT k.expires_at::timestamptz AS expires_at
FROM k;

-- name: RefundGet :one
SELECT
    sqlc.embed(refunds),
    payments.order_id,
    payments.gateway_key AS charge_key
FROM refunds
JOIN payments ON payments.merchant_id = refunds.merchant_id AND payments.id = refunds.payment_id
WHERE refunds.merchant_id = @merchant_id
    AND refunds.id = @id;

-- name: RefundListOfPayment :many
-- Newest first. UUIDv7 ids grow with time, so the primary key is the order of the list and the cursor is an id.
SELECT *
FROM refunds
WHERE merchant_id = @merchant_id
    AND payment_id = @payment_id
    AND id < @before
ORDER BY id DESC
LIMIT @max;
