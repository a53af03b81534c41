-- A key is the client's name for one intent. Its row says what the key was first used for, who may answer it now, and, once
-- that is known, the answer. A row is never deleted: after retention only the answer is stripped, so that a spent key stays
-- spent for ever.
CREATE TABLE idempotency_keys (
    merchant_id uuid NOT NULL,
    key text COLLATE "C" NOT NULL,

    -- What the key was first used for.
    route text NOT NULL,
    resource_id uuid NOT NULL,
    resource_path text NOT NULL,
    recipe smallint NOT NULL,
    fingerprint bytea NOT NULL,
    mode text NOT NULL,

    -- Who may answer it. The attempt counts the holders, the lease id fences out all but the present one, and all times here
    -- are the database's.
    state text NOT NULL,
    attempt integer NOT NULL,
    holder text NOT NULL,
    request_id text NOT NULL,
    -- The W3C trace context of that request, if it was traced: a replay's trace links to it.
    traceparent text,
    lease_id uuid,
    lease_expires_at timestamptz,
    -- True while money may have moved without our knowing.
    outcome_uncertain boolean NOT NULL,
    -- When the last attempt of a client ended without an end; NULL while one runs, or when its process died.
    abandoned_at timestamptz,
    -- When the reaper should look at it next; shared by the replicas.
    next_look_at timestamptz,

    -- The answer.
    answer_status smallint,
    answer_headers jsonb,
    answer_body bytea,
    created_at timestamptz NOT NULL,
    final_at timestamptz,
    expires_at timestamptz,

    PRIMARY KEY (merchant_id, key),
    -- Two simple conditions: the one pattern '^[!-~]{1,255}$' takes seventy times as long, 70 µs, and every write of the row checks it.
    CONSTRAINT key_is_short_and_visible CHECK (char_length(key) BETWEEN 1 AND 255 AND key !~ '[^!-~]'),
    CONSTRAINT fingerprint_is_sha256 CHECK (octet_length(fingerprint) = 32),
    CONSTRAINT state_is_known CHECK (state IN ('in_progress', 'done', 'failed')),
    CONSTRAINT mode_is_known CHECK (mode IN ('sync', 'async')),
    CONSTRAINT attempts_count_from_one CHECK (attempt >= 1),
    CONSTRAINT in_progress_has_a_lease_and_no_answer CHECK (
        state <> 'in_progress'
        OR (lease_expires_at IS NOT NULL AND next_look_at IS NOT NULL AND answer_status IS NULL AND final_at IS NULL)
    ),
    CONSTRAINT final_has_its_times CHECK (
        state = 'in_progress'
        OR (final_at IS NOT NULL AND expires_at IS NOT NULL)
    ),
    CONSTRAINT answer_is_whole_or_stripped CHECK (
        (answer_status IS NULL) = (answer_headers IS NULL) AND (answer_status IS NULL) = (answer_body IS NULL)
    )
);

-- The two indexes of what is in progress say so by final_at, and only the statements that are meant to use them do as well. A statement
-- that names one key says state = 'in_progress', which proves nothing about these indexes: on a table that was empty when it was
-- planned, it would otherwise read all that is in progress to find its one row.
--
-- The renewal finds the leases that one process holds.
CREATE INDEX idempotency_keys_by_lease ON idempotency_keys (lease_id) WHERE final_at IS NULL;

-- The reaper finds what it should look at next.
CREATE INDEX idempotency_keys_by_next_look ON idempotency_keys (next_look_at) WHERE final_at IS NULL;

-- The purge finds the answers whose retention has passed.
CREATE INDEX idempotency_keys_by_expiry ON idempotency_keys (expires_at) WHERE answer_status IS NOT NULL;

COMMENT ON TABLE idempotency_keys IS 'one row per (merchant, idempotency key), for ever; see internal/idempotency';
