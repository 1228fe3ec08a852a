# `make run` and `make test` need only Python >= 3.11, git and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.installed
# Three test processes, also on two cores, a file at a time, the slowest files first: tests spend much of their time waiting.
SHARED := -n 3 --dist loadfile --no-loadscope-reorder
# Each of the hundreds of processes that the tests start would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run test test-fast check setup test-tools test-compose test-gpu test-search test-fuzz clean

help:            ## list these targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/'

setup: $(DONE)   ## create .venv and install (again only if pyproject.toml has changed)

$(DONE): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(DONE)

run: setup       ## train a small language model with 2 learners on this machine
	$(BIN)/diloco up

test: setup      ## run all tests that need no special hardware or tools
	$(BIN)/pytest $(SHARED)

test-fast: setup ## run the unit and wire tests; they start no whole run
	$(BIN)/pytest $(SHARED) tests/unit tests/wire

check: setup     ## check lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-tools: setup ## run the tests that need a C++ compiler, redis-cli or a private mount (skipped without)
	$(BIN)/pytest -m tools

test-compose: setup ## run the tests that need a Docker Engine (skipped without)
	$(BIN)/pytest -m compose tests/compose

test-gpu: setup  ## run the tests that need a CUDA device
	$(BIN)/pytest -m gpu

test-search: setup ## run the property tests with new random examples, ten times as many
	$(BIN)/pytest -m hypothesis --hypothesis-profile=search --timeout=3600

test-fuzz: setup ## send invalid frames to a live run for a minute
	$(BIN)/pytest -m fuzz

clean:           ## remove .venv, build files and caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
