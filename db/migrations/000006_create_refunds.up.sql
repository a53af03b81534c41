-- A refund gives captured money back. It is born in the statement that claims its idempotency key and reserves its amount on
-- the payment; payments.refunds_never_exceed_the_payment is what holds under any concurrency.
CREATE TABLE refunds (
    merchant_id uuid NOT NULL,
    id uuid NOT NULL,
    payment_id uuid NOT NULL,
    status text NOT NULL,
    amount bigint NOT NULL,
    currency text NOT NULL,
    reason text,
    gateway_key text NOT NULL,
    gateway_reference text,
    failure_code text,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (merchant_id, id),
    -- RESTRICT: a refund without its payment would be money given back for nothing.
    CONSTRAINT refund_is_of_a_payment FOREIGN KEY (merchant_id, payment_id) REFERENCES payments (merchant_id, id) ON DELETE RESTRICT,
    CONSTRAINT status_is_known CHECK (status IN ('processing', 'succeeded', 'declined', 'failed')),
    CONSTRAINT amount_is_positive_and_bounded CHECK (amount BETWEEN 1 AND 999999999999),
    CONSTRAINT reason_is_short CHECK (char_length(reason) BETWEEN 1 AND 255),
    CONSTRAINT not_made_has_its_code CHECK ((status IN ('declined', 'failed')) = (failure_code IS NOT NULL)),
    CONSTRAINT succeeded_has_a_gateway_reference CHECK (status <> 'succeeded' OR gateway_reference IS NOT NULL)
);

-- The list of a payment's refunds, newest first. It begins with the payment for the reason given at the indexes of payments.
CREATE INDEX refunds_by_payment ON refunds (payment_id, merchant_id, id);
