-- A merchant owns every row that was made under its API keys. Of an API key only the SHA-256 is kept: whoever reads this table
-- can not act as a merchant.
CREATE TABLE merchants (
    id uuid PRIMARY KEY,
    name text NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT name_is_short CHECK (char_length(name) BETWEEN 1 AND 255)
);

CREATE TABLE api_keys (
    merchant_id uuid NOT NULL REFERENCES merchants (id) ON DELETE RESTRICT,
    id uuid NOT NULL,
    secret_sha256 bytea NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    revoked_at timestamptz,
    PRIMARY KEY (merchant_id, id),
    CONSTRAINT secret_names_one_merchant UNIQUE (secret_sha256),
    CONSTRAINT secret_is_sha256 CHECK (octet_length(secret_sha256) = 32)
);
