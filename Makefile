# Everything a newcomer needs, on a machine with Python 3.10+ and a C compiler.
#   make demo   the same requests with the host's kernel and with tree attention, side by side
#   make test   lint, types, unit tests and integration tests with real servers

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
REPORTS ?= reports

.PHONY: demo test lint unit integration clean

demo: $(VENV)/.demo
	$(BIN)/deft ab --quick --out $(REPORTS)

test: lint unit integration

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/.test
	$(BIN)/python -m pytest -q deft_backend tests

integration: $(VENV)/.test
	$(BIN)/python -m pytest -q integration_tests

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --progress-bar off -e '.[sglang,bench]'
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --progress-bar off -e '.[sglang,bench,test]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
