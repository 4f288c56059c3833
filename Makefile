PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made

.PHONY: demo test test-all lint types bench integrations

demo: $(STAMP)
	$(BIN)/python -m benchmarks.demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Each client has an environment of its own, under .integrations; CLIENTS="torchtune lightning" runs those alone.
integrations:
	$(PYTHON) -m tests.integrations.run $(CLIENTS)

bench: $(STAMP)
	$(BIN)/python -m benchmarks.step_latency

# torch goes first: a later install then finds it in place and does not fetch a CUDA build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)
