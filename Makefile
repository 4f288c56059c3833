PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.made

# Another torch: `make test-torch TORCH=2.6.0`.
TORCH ?= 2.6.0
TORCH_VENV ?= .venv-torch-$(TORCH)
TORCH_BIN := $(TORCH_VENV)/bin
TORCH_TESTS ?= -m "not slow and not gpu"

.PHONY: demo docs test test-all test-torch lint types bench memory-vs-loss integrations

demo: $(STAMP)
	$(BIN)/python -m benchmarks.demo

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow and not gpu"

test-all: $(STAMP)
	$(BIN)/python -m pytest

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The peers' releases are made for one torch or another: tests of one that does not fit are skipped.
test-torch:
	test -x $(TORCH_BIN)/python || $(PYTHON) -m venv $(TORCH_VENV)
	grep -vE '^(torch|torchao|bitsandbytes|triton)==' constraints.txt > $(TORCH_VENV)/constraints.txt
	echo torch==$(TORCH) >> $(TORCH_VENV)/constraints.txt
	$(TORCH_BIN)/pip install --quiet --constraint $(TORCH_VENV)/constraints.txt torch
	$(TORCH_BIN)/pip install --quiet --constraint $(TORCH_VENV)/constraints.txt --editable '.[tools,bench]'
	-$(TORCH_BIN)/pip install --quiet --constraint $(TORCH_VENV)/constraints.txt torchao bitsandbytes
	$(TORCH_BIN)/python -m pytest $(TORCH_TESTS)

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

# About 12 core-hours; stopped, it goes on where it was.
memory-vs-loss: $(STAMP)
	$(BIN)/python -m benchmarks.memory_vs_loss
	$(BIN)/python -m benchmarks.report

# torch goes first: a later install then finds it in place and does not fetch a CUDA build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)
