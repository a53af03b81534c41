# The service as an image: one static binary, the certificates that TLS to the database and the gateway needs, and nothing else.
#
#	docker build -t payments .
#	make image                    # the same with buildah, which needs no engine
#
# It runs as a number, not a name, on a read-only root file system: `serve` writes nothing but its log. The simulated gateway keeps its
# ledger in /data, which wants a volume.

ARG GO_IMAGE=golang:1.26-bookworm

FROM ${GO_IMAGE} AS build
WORKDIR /src
# What changes seldom comes first, so that a change of the service fetches no module again.
COPY go.mod go.sum ./
RUN --mount=type=cache,target=/go/pkg/mod go mod download
COPY . .
ARG VERSION=dev
ENV CGO_ENABLED=0
RUN --mount=type=cache,target=/go/pkg/mod --mount=type=cache,target=/root/.cache/go-build \
    go build -trimpath -buildvcs=false -ldflags "-s -w -X main.release=${VERSION}" -o /out/payments ./cmd/payments \
    && mkdir /out/data

FROM scratch
ARG VERSION=dev
ARG REVISION=unknown
LABEL org.opencontainers.image.title="payments" \
      org.opencontainers.image.description="A reference payment service: an order is paid once, whatever is repeated and whatever fails." \
      org.opencontainers.image.source="https://example.com/payments" \
      org.opencontainers.image.documentation="https://example.com/payments/blob/main/docs/operations.md" \
      org.opencontainers.image.licenses="MIT" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build --chown=65532:65532 /out/data /data
COPY --from=build /out/payments /payments
ENV LOG_FORMAT=json \
    GATEWAY_LEDGER=/data/gateway-ledger.jsonl
# A number, so that an orchestrator can see that it is not root. No account of that name has to exist.
USER 65532:65532
EXPOSE 8080
# Alive, not ready: a container that is restarted because its database is away helps nobody.
HEALTHCHECK --interval=10s --timeout=3s --start-period=5s --retries=3 CMD ["/payments", "health"]
ENTRYPOINT ["/payments"]
CMD ["serve"]
