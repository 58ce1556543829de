# Everything a fresh machine needs is two commands: `make demo` and `make test`.
# Both install into .venv what is missing. PYTHON, VENV and TORCH can be set, e.g. `make test PYTHON=python3.12`.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help install demo test test-slow lint format docs clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

install: $(STAMP)  ## create .venv and install the package with all extras, editable

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -e ".[dev,demo,examples,docs,quant]"
	@touch $@

demo: $(STAMP)  ## train a tiny model with mixed strategies (under 3 minutes), report in runs/demo
	$(BIN)/trl-grpo-ext demo --output runs/demo

test: $(STAMP)  ## run the test suite (a few minutes)
	$(BIN)/python -m pytest -n 2

test-slow: $(STAMP)  ## run the longer proofs
	$(BIN)/python -m pytest -n 2 -m slow

lint: $(STAMP)  ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(STAMP)  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what the targets made
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
