# Every target works on a bare machine with make and python3 >= 3.11 (with venv and pip).

SHELL := /bin/sh
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
LOCKED := $(VENV)/.locked
STAMP := $(VENV)/.installed
PROTOS_VENV := .venv-protos
PROTOS_STAMP := $(PROTOS_VENV)/.installed
LOCK_VENV := .venv-lock
LOCK_STAMP := $(LOCK_VENV)/.installed

# Extras that the development environment holds; `codegen` has one of its own (`make protos`).
EXTRAS := coordinator postgres mysql asyncio idempotency redis uvloop dev
UV_VERSION := 0.13.9

# The first Python that is new enough and has venv and pip. Choose another one with `make PYTHON=...`.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; \
	done)

STORE ?= all
STORM_S ?= 420
DATABASE ?= all
ARGS ?=

TYPED = $(wildcard coordinator participant_sdk tests examples benchmarks tools)

# Where Debian puts mariadbd, which is not on everybody's PATH.
SBIN := /usr/sbin:/usr/local/sbin

.PHONY: help servers setup demo test lint format protos bench bench-compare soak chaos shop-chaos races model simulate points crashes planted mutants lock clean need-python

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile

# The packages with the programs alone: they hold no service, so nothing is started and nobody's data is touched.
MARIADB := mariadb-server-core mariadb-client-core
# `make model` writes a program with spin and compiles it.
SPIN := spin gcc libc6-dev
# Without the service of redis-server, whose program this package holds: redis-check-rdb, called by the server's name.
REDIS := redis-tools
# Shells in which completion is tested.
SHELLS := zsh fish
servers: ## Install through apt-get what tests need and pip has not: MariaDB, Redis, spin, shells (skipped when they are there)
	@PATH="$$PATH:$(SBIN)"; packages=; \
	if ! { command -v mariadbd && command -v mariadb-install-db && command -v my_print_defaults; } >/dev/null; then \
		packages="$(MARIADB)"; \
	fi; \
	if ! { command -v spin && command -v gcc; } >/dev/null; then packages="$$packages $(SPIN)"; fi; \
	command -v redis-check-rdb >/dev/null || packages="$$packages $(REDIS)"; \
	for shell in $(SHELLS); do command -v $$shell >/dev/null || packages="$$packages $$shell"; done; \
	if [ -z "$$packages" ]; then exit 0; fi; \
	if ! command -v apt-get >/dev/null; then \
		echo "make: there is no apt-get to install these with, install them by hand: $$packages" >&2; exit 1; \
	fi; \
	if [ "$$(id -u)" = 0 ]; then root=; \
	elif command -v sudo >/dev/null; then root=sudo; \
	else \
		echo "make: installing packages needs root, and there is no sudo." >&2; \
		echo "Run as root: apt-get install $$packages" >&2; exit 1; \
	fi; \
	echo "Installing $$packages"; \
	get="env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120"; \
	$$root $$get update && $$root $$get install --no-install-recommends $$packages

setup: $(STAMP) ## Build .venv (skipped when it is up to date)

need-python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "make: no python3 >= 3.11 with venv and pip was found." >&2; \
		echo "Install Python 3.11 or newer (on Debian and Ubuntu: python3 and python3-venv)," >&2; \
		echo "or name one: make PYTHON=/path/to/python3.12 setup" >&2; \
		exit 1; \
	fi

$(LOCKED): requirements.lock | need-python
	@echo "Building $(VENV) with $(PYTHON) (about a minute)"
	@rm -rf $(VENV)
	@"$(PYTHON)" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	@touch $@

$(STAMP): pyproject.toml $(LOCKED)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP) ## Transfers between two banks, with crashes (DEMO_DIR= keeps the files, TRICORD_STORE= chooses the store)
	$(BIN)/python -m examples.transfer.demo $(ARGS)

test: $(STAMP) ## Run all tests (ARGS= for pytest)
	$(BIN)/python -m pytest -n 3 --dist worksteal $(ARGS)

lint: $(STAMP) ## Check format, style, types and the contract
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy $(TYPED)
	$(BIN)/buf lint

format: $(STAMP) ## Format the code and fix what can be fixed
	$(BIN)/ruff check --fix --exit-zero
	$(BIN)/ruff format

protos: $(PROTOS_STAMP) ## Generate the code beside protos/tricord/v1/*.proto
	$(PROTOS_VENV)/bin/python tools/generate_protos.py

$(PROTOS_STAMP): pyproject.toml | need-python
	@rm -f $@
	"$(PYTHON)" -m venv --clear $(PROTOS_VENV)
	$(PROTOS_VENV)/bin/python tools/extra.py codegen > $(PROTOS_VENV)/requirements.txt
	$(PROTOS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $(PROTOS_VENV)/requirements.txt 'setuptools<81'
	@touch $@

bench: $(STAMP) ## Run the benchmarks (ONLY=coordinator for one of them, ARGS=--small where the full size takes minutes)
	$(BIN)/python -m benchmarks $(if $(ONLY),--only $(ONLY)) $(ARGS)

bench-compare: $(STAMP) ## The last run beside a saved one: BASE=file or folder, NEW=benchmarks/out (exit code 1: something is worse)
	@if [ -z "$(BASE)" ]; then echo "make: say with what: make bench-compare BASE=saved.json" >&2; exit 2; fi
	$(BIN)/python -m benchmarks.compare $(BASE) $(NEW)

soak: N = 1000000
soak: $(STAMP) ## N=1000000 transactions through one coordinator: nothing may be lost, and nothing grow
	$(BIN)/python -m benchmarks.soak --transactions $(N) $(ARGS)

chaos: ROUNDS = 20
chaos: $(STAMP) ## Kill processes under load, ROUNDS=20 times per store; then a storm of faults, STORM_S=420 s at the most
	$(BIN)/python -m tests.chaos.kill --rounds $(ROUNDS) --store $(STORE) $(ARGS)
	$(BIN)/python -m tests.chaos.storm --seconds $(STORM_S) $(ARGS)

shop-chaos: CLIENTS = 200
shop-chaos: $(STAMP) ## CLIENTS=200 double-click and retry, while the example shop's processes and PostgreSQL are killed
	$(BIN)/python -m tests.chaos.shop_api --clients $(CLIENTS) $(ARGS)

races: ROUNDS = 10000
races: $(STAMP) ## Calls that meet in every order, with faults, ROUNDS=10000 per database (DATABASE=all|postgres|mariadb|sqlite)
	$(BIN)/python -m tests.races.run --database $(DATABASE) --rounds $(ROUNDS) $(ARGS)

model: $(STAMP) ## Explore the protocol exhaustively (ARGS=--full for more of it, ARGS="--only TEXT" for a part)
	$(BIN)/python -m tests.model $(ARGS)

simulate: SEEDS = 10000
simulate: $(STAMP) ## Coordinators and participants in a simulated world of faults, SEEDS=10000 (ARGS="--state FILE" to stop and resume)
	$(BIN)/python -m tests.simulator --seeds $(SEEDS) $(ARGS)

points: $(STAMP) ## Kill simulated coordinators and participants at every point of a transaction, singly and in pairs
	$(BIN)/python -m tests.points $(ARGS)

crashes: $(STAMP) ## Kill a real coordinator at every point of a transaction, one after another (ARGS=--small for some scenarios)
	$(BIN)/python -m tests.crashes $(ARGS)

planted: $(STAMP) ## Plant bugs of the field, each alone; simulator and suites must notice (ARGS="TEXT" for some)
	$(BIN)/python -m tests.planted $(ARGS)

mutants: $(STAMP) ## Put each small fault into the pure rules (machine.py, fence.py): a test must fail (ARGS="--only TEXT" for a part)
	$(BIN)/python -m tests.mutants $(ARGS)

lock: $(LOCK_STAMP) ## Write requirements.lock anew from pyproject.toml (ARGS=--upgrade for newer versions)
	@echo "# Locked versions for development and CI. Made by 'make lock'; do not edit." > $(LOCK_VENV)/requirements.lock
	@if [ -f requirements.lock ]; then cp requirements.lock $(LOCK_VENV)/resolved.txt; fi
	$(LOCK_VENV)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
		--no-header --no-emit-index-url --no-emit-find-links --no-annotate \
		$(addprefix --extra ,$(EXTRAS)) $(ARGS) pyproject.toml -o $(LOCK_VENV)/resolved.txt
	@cat $(LOCK_VENV)/resolved.txt >> $(LOCK_VENV)/requirements.lock
	@if grep -n '://' $(LOCK_VENV)/requirements.lock; then echo "make: the lock must not hold addresses" >&2; exit 1; fi
	@cmp -s $(LOCK_VENV)/requirements.lock requirements.lock || cp $(LOCK_VENV)/requirements.lock requirements.lock

$(LOCK_STAMP): | need-python
	"$(PYTHON)" -m venv --clear $(LOCK_VENV)
	$(LOCK_VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@touch $@

clean: ## Remove environments, caches and built files
	rm -rf $(VENV) $(PROTOS_VENV) $(LOCK_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
