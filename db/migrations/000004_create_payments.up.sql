-- A payment is our attempt to be paid for an order. It is born in the statement that claims its idempotency key, and its final
-- status is written in the statement that stores the key's answer.
CREATE TABLE payments (
    merchant_id uuid NOT NULL,
    id uuid NOT NULL,
    order_id uuid NOT NULL,
    status text NOT NULL,
    amount bigint NOT NULL,
    currency text NOT NULL,
    payment_method text NOT NULL,
    -- The name by which the gateway knows the charge, derived from merchant and idempotency key.
    gateway_key text NOT NULL,
    gateway_reference text,
    decline_code text,
    failure_code text,
    -- What refunds in progress and done have taken out of the amount: the guard against refunding more than was paid.
    amount_reserved bigint NOT NULL DEFAULT 0,
    amount_refunded bigint NOT NULL DEFAULT 0,
    metadata jsonb NOT NULL,
    -- How many events the payment and its refunds have written; the next event takes the next number.
    event_count integer NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (merchant_id, id),
    -- RESTRICT: an order somebody tried to pay is part of the payment's story.
    CONSTRAINT payment_is_for_an_order FOREIGN KEY (merchant_id, order_id) REFERENCES orders (merchant_id, id) ON DELETE RESTRICT,
    CONSTRAINT status_is_known CHECK (status IN ('processing', 'succeeded', 'declined', 'failed')),
    CONSTRAINT amount_is_positive_and_bounded CHECK (amount BETWEEN 1 AND 999999999999),
    CONSTRAINT currency_is_iso_4217 CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT declined_has_its_code CHECK ((status = 'declined') = (decline_code IS NOT NULL)),
    CONSTRAINT failed_has_its_code CHECK ((status = 'failed') = (failure_code IS NOT NULL)),
    CONSTRAINT succeeded_has_a_gateway_reference CHECK (status <> 'succeeded' OR gateway_reference IS NOT NULL),
    CONSTRAINT refunds_never_exceed_the_payment CHECK (
        0 <= amount_refunded AND amount_refunded <= amount_reserved AND amount_reserved <= amount
    )
);

-- Both indexes begin with the order and not with the merchant: on a table that was empty when it was planned, a look-up by id would
-- otherwise go through all of the merchant's entries.
--
-- Two clicks that carry different keys still cannot pay one order twice.
CREATE UNIQUE INDEX one_live_payment_per_order ON payments (order_id, merchant_id) WHERE status IN ('processing', 'succeeded');

-- The list of an order's payments, newest first.
CREATE INDEX payments_by_order ON payments (order_id, merchant_id, id);
