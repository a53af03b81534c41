-- An order is what is bought. It is paid by at most one payment; the index that holds that promise is on payments.
CREATE TABLE orders (
    -- RESTRICT: a merchant with orders has a history that must outlive it.
    merchant_id uuid NOT NULL REFERENCES merchants (id) ON DELETE RESTRICT,
    id uuid NOT NULL,
    status text NOT NULL,
    amount bigint NOT NULL,
    currency text NOT NULL,
    reference text,
    metadata jsonb NOT NULL,
    created_at timestamptz NOT NULL,
    PRIMARY KEY (merchant_id, id),
    CONSTRAINT status_is_known CHECK (status IN ('open', 'paid', 'canceled', 'refunded')),
    CONSTRAINT amount_is_positive_and_bounded CHECK (amount BETWEEN 1 AND 999999999999),
    CONSTRAINT currency_is_iso_4217 CHECK (currency ~ '^[A-Z]{3}$'),
    CONSTRAINT reference_is_short CHECK (char_length(reference) BETWEEN 1 AND 255)
);
