-- What has become final, in the statement that made it final: the audit trail, and the source of webhooks. Events of a payment
-- and its refunds are numbered within the payment; a canceled order's only event is numbered within the order.
CREATE TABLE events (
    merchant_id uuid NOT NULL,
    subject_id uuid NOT NULL,
    number integer NOT NULL,
    type text NOT NULL,
    resource_id uuid NOT NULL,
    payload jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (merchant_id, subject_id, number),
    CONSTRAINT numbers_count_from_one CHECK (number >= 1),
    CONSTRAINT type_is_known CHECK (type IN (
        'order.canceled',
        'payment.succeeded', 'payment.declined', 'payment.failed',
        'refund.succeeded', 'refund.declined', 'refund.failed'
    ))
);

CREATE FUNCTION events_are_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'events are append-only';
END
$$;

CREATE TRIGGER events_are_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON events
    FOR EACH STATEMENT EXECUTE FUNCTION events_are_append_only();
