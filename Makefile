# `make run` and `make test` need Python >= 3.11, git and make, and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DONE := $(VENV)/.installed
# Tests are shared out to two processes, file by file, the long ones first: much of their time is spent waiting.
SHARED := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help run test test-fast check setup test-tools test-compose test-gpu test-search test-fuzz clean

help:            ## these lines
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ -/'

setup: $(DONE)   ## make .venv and install (done once; again only when pyproject.toml changes)

$(DONE): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, this is " + sys.version)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(DONE)

run: setup       ## train a small language model with 2 learners on this machine
	$(BIN)/diloco up

test: setup      ## every test that needs no special hardware
	$(BIN)/pytest $(SHARED)

test-fast: setup ## those of them that start no whole run
	$(BIN)/pytest $(SHARED) tests/unit tests/wire

check: setup     ## lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-tools: setup ## the tests that need a C++ compiler, redis-cli or a file system of their own; else they are skipped
	$(BIN)/pytest -m tools

test-compose: setup ## the tests that need a Docker Engine; without one they are skipped
	$(BIN)/pytest -m compose tests/compose

test-gpu: setup  ## the tests that need a CUDA device
	$(BIN)/pytest -m gpu

test-search: setup ## property tests with ten times as many examples, others each time
	$(BIN)/pytest -m hypothesis --hypothesis-profile=search --timeout=3600

test-fuzz: setup ## a minute of frames that nobody should send, at a live run
	$(BIN)/pytest -m fuzz

clean:           ## remove what make setup and the test tools made
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
