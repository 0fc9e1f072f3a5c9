# SPDX-FileCopyrightText: The stormguard authors
# SPDX-License-Identifier: Apache-2.0

# Short names for the scripts, which do the work and run without make.

.DEFAULT_GOAL := help
TOOL := go tool -modfile=tools/go.mod
GROUP ?= noise
ARGS ?=

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: test
test: ## Everything that a commit must keep true
	scripts/test

.PHONY: full
full: ## As test, with long soaks and 30 s of fuzzing per target
	scripts/test --full

.PHONY: lint
lint: ## gofmt, licence lines, and golangci-lint on each module
	scripts/lint

.PHONY: fmt
fmt: ## gofmt, in place
	gofmt -w .

.PHONY: bench
bench: ## One group of comparisons: make bench GROUP=noise ARGS=--json
	scripts/bench $(GROUP) $(ARGS)

.PHONY: demo
demo: ## A storm, held and drained, on this machine: make demo ARGS=--json
	go run ./cmd/stormguard demo $(ARGS)

.PHONY: vuln
vuln: ## Known vulnerabilities in what the library links (needs the network)
	$(TOOL) govulncheck ./...
