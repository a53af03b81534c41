-- name: IdempotencyKeyGet :one
-- The row on which a loser of the claim is judged, in a snapshot that begins after the claim has lost. An answer that was stripped stays
-- expired, even if the clock is set back.
SELECT
    route,
    resource_id,
    resource_path,
    recipe,
    fingerprint,
    mode,
    state,
    attempt,
    holder,
    request_id,
    traceparent,
    lease_id,
    outcome_uncertain,
    answer_status,
    answer_headers,
    answer_body,
    created_at,
    expires_at,
    (state <> 'in_progress' AND (answer_status IS NULL OR expires_at <= clock_timestamp()))::boolean AS expired,
    coalesce(lease_expires_at - clock_timestamp(), '0')::interval AS lease_left
FROM idempotency_keys
WHERE merchant_id = @merchant_id
    AND key = @key;

-- name: IdempotencyKeyTakeOver :one
-- The next attempt at a stale key: one whose lease has expired or was released, whatever the clock says about that moment. No row:
-- somebody else was quicker, or the holder has come back to life.
-- abandoned_at is what a client's return resets and the reaper's visit keeps: how long a payment has waited for its client counts
-- from the end of a client's lease, never from the reaper's.
UPDATE idempotency_keys
SET attempt = attempt + 1,
    holder = @holder,
    request_id = coalesce(sqlc.narg(request_id), request_id),
    traceparent = CASE WHEN sqlc.narg(request_id) IS NULL THEN traceparent ELSE sqlc.narg(traceparent) END,
    lease_id = @lease_id::uuid,
    lease_expires_at = clock_timestamp() + @lease_ttl::interval,
    abandoned_at = CASE WHEN sqlc.narg(request_id) IS NULL THEN coalesce(abandoned_at, lease_expires_at) END,
    next_look_at = clock_timestamp() + @lease_ttl::interval,
    outcome_uncertain = true
WHERE merchant_id = @merchant_id
    AND key = @key
    AND attempt = @attempt
    AND state = 'in_progress'
    AND (lease_id IS NULL OR lease_expires_at <= clock_timestamp())
RETURNING attempt;

-- name: IdempotencyKeyRelease :execrows
-- An attempt that ends without an end lets go, so that a repeat may resume at once. Without the lease id a renewal that is already
-- under way cannot bring the lease back.
UPDATE idempotency_keys
SET lease_id = NULL,
    lease_expires_at = clock_timestamp(),
    abandoned_at = clock_timestamp(),
    next_look_at = clock_timestamp(),
    outcome_uncertain = @outcome_uncertain
WHERE merchant_id = @merchant_id
    AND key = @key
    AND lease_id = @lease_id::uuid
    AND state = 'in_progress';

-- name: IdempotencyKeyRenew :many
-- All leases that this process is working on and that have used up a third of their time.
WITH held AS (
    SELECT
        merchant_id,
        key AS held_key
    FROM idempotency_keys
    WHERE lease_id = ANY(@lease_ids::uuid[])
        AND final_at IS NULL
        AND lease_expires_at < clock_timestamp() + @two_thirds::interval
    ORDER BY merchant_id, key
    FOR UPDATE SKIP LOCKED
)
UPDATE idempotency_keys AS i
SET lease_expires_at = clock_timestamp() + @lease_ttl::interval
FROM held
WHERE i.merchant_id = held.merchant_id
    AND i.key = held.held_key
RETURNING i.lease_id::uuid AS lease_id;

-- name: IdempotencyKeyLook :many
-- The stale keys that the reaper looks at now. Moving their next look into the future keeps the other replicas off them. The
-- longest overdue come first, or a gateway that is away would let the same few keep their turn for ever; skipping locked rows
-- makes the order harmless. due_by keeps a round that takes several batches from beginning again with those it has put off.
WITH due AS (
    SELECT
        merchant_id,
        key AS due_key
    FROM idempotency_keys
    WHERE final_at IS NULL
        AND (lease_id IS NULL OR lease_expires_at <= now())
        AND next_look_at <= coalesce(sqlc.narg(due_by)::timestamptz, now())
    ORDER BY next_look_at
    LIMIT @max
    FOR UPDATE SKIP LOCKED
)
UPDATE idempotency_keys AS i
SET next_look_at = clock_timestamp() + @look_timeout::interval
FROM due
WHERE i.merchant_id = due.merchant_id
    AND i.key = due.due_key
RETURNING
    i.merchant_id,
    i.key,
    i.route,
    i.resource_id,
    i.attempt,
    i.request_id,
    (clock_timestamp() - coalesce(i.abandoned_at, i.lease_expires_at))::interval AS abandoned_for;

-- name: IdempotencyKeyLookAgain :exec
-- The reaper has found nothing that it may record. A client that has come back meanwhile is not disturbed.
UPDATE idempotency_keys
SET next_look_at = clock_timestamp() + @delay::interval
WHERE merchant_id = @merchant_id
    AND key = @key
    AND attempt = @attempt
    AND state = 'in_progress'
    AND (lease_id IS NULL OR lease_expires_at <= clock_timestamp());

-- name: IdempotencyKeyMakeDue :one
-- Forgets the back-off of all stale keys, and returns the time by which they are due. A key that somebody has locked is being looked at.
WITH stale AS (
    SELECT
        merchant_id,
        key AS stale_key
    FROM idempotency_keys
    WHERE final_at IS NULL
        AND (lease_id IS NULL OR lease_expires_at <= now())
    ORDER BY merchant_id, key
    FOR UPDATE SKIP LOCKED
), due AS (
    UPDATE idempotency_keys AS i
    SET next_look_at = now()
    FROM stale
    WHERE i.merchant_id = stale.merchant_id
        AND i.key = stale.stale_key
)
SELECT now()::timestamptz AS due_by;

-- name: IdempotencyKeyAbandoned :one
-- How long a stale key has waited for its client, asked again right before it is closed: a client may have come and gone since the look.
-- No row: somebody is at work on it, or has been.
SELECT (clock_timestamp() - coalesce(abandoned_at, lease_expires_at))::interval AS abandoned_for
FROM idempotency_keys
WHERE merchant_id = @merchant_id
    AND key = @key
    AND attempt = @attempt
    AND state = 'in_progress'
    AND (lease_id IS NULL OR lease_expires_at <= clock_timestamp());

-- name: IdempotencyKeyPoll :many
-- Those of the waited-for keys whose wait is over: final, or stale and to be taken over. The two lists are not pairs: the caller
-- drops what it did not ask for.
SELECT
    merchant_id,
    key
FROM idempotency_keys
WHERE merchant_id = ANY(@merchant_ids::uuid[])
    AND key = ANY(@keys::text[])
    AND (state <> 'in_progress' OR lease_id IS NULL OR lease_expires_at <= now());

-- name: IdempotencyKeyPurge :execrows
-- Strips the answers whose retention has passed. The rows stay as tombstones: a spent key is spent for ever. now() and not
-- clock_timestamp(), which is volatile and would have the whole index read when nothing is due. Skipping locked rows makes the order of
-- the index harmless.
WITH expired AS (
    SELECT
        merchant_id,
        key AS expired_key
    FROM idempotency_keys
    WHERE answer_status IS NOT NULL
        AND expires_at <= now()
    ORDER BY expires_at
    LIMIT @max
    FOR UPDATE SKIP LOCKED
)
UPDATE idempotency_keys AS i
SET answer_status = NULL,
    answer_headers = NULL,
    answer_body = NULL
FROM expired
WHERE i.merchant_id = expired.merchant_id
    AND i.key = expired.expired_key;

-- name: IdempotencyKeyBacklog :one
-- What waits to be ended or stripped, for the metrics. It reads the partial index of the keys in progress, and one entry of the other.
SELECT
    count(*) AS in_progress,
    greatest(
        max(now() - coalesce(abandoned_at, lease_expires_at)) FILTER (WHERE lease_id IS NULL OR lease_expires_at <= now()),
        '0'
    )::interval AS stale_for,
    greatest(
        now() - (SELECT min(i.expires_at) FROM idempotency_keys AS i WHERE i.answer_status IS NOT NULL),
        '0'
    )::interval AS unpurged_for
FROM idempotency_keys
WHERE final_at IS NULL;

-- name: IdempotencyKeyLookOne :one
-- One stale key, for the reaper's step on demand. No row: it is not there, is final, or somebody is at work on it.
SELECT
    merchant_id,
    key,
    route,
    resource_id,
    attempt,
    request_id,
    (clock_timestamp() - coalesce(abandoned_at, lease_expires_at))::interval AS abandoned_for
FROM idempotency_keys
WHERE merchant_id = @merchant_id
    AND key = @key
    AND state = 'in_progress'
    AND (lease_id IS NULL OR lease_expires_at <= clock_timestamp());
