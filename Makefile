# rayrec: `make train` and `make test` set up all they need, once, in .venv. `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
# The build of fbgemm_gpu: cuda where a GPU answers, else cpu. They fill the same folder, so only ever one is installed.
EXTRA ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
OTHER_BUILD = $(if $(filter cuda,$(EXTRA)),fbgemm-gpu-cpu,fbgemm-gpu)
READY = $(VENV)/.ready-$(EXTRA)
DATA := data/movielens
# The exact versions that the tests run with and the image installs.
LOCK := deploy/requirements.lock
# Extra arguments: make train ARGS="--set trainer.num_workers=4", make test PYTEST_ARGS="-k metrics"
ARGS ?=
PYTEST_ARGS ?=
# How many test files run at a time, if not 3 (2 of the long ones, which start more processes). Those that measure time
# run alone.
TESTS_AT_ONCE ?=
# One file of each package, for `make quick`.
QUICK = $(addprefix tests/,test_architecture.py test_imports.py sparse/test_jagged_and_keyed_tensor.py optim/test_rules.py \
	modules/test_embedding.py models/test_models.py quant/test_quant.py distributed/test_embedding.py planner/test_planner.py \
	checkpoint/test_store.py data/test_mapping.py data/test_places.py metrics/test_binary.py inference/test_parity.py \
	serve/test_service.py train/test_config.py cli/test_output.py torchrec/test_check.py movielens/test_config.py \
	dynamic_ids/test_steps.py)
PYTEST = $(BIN)/python -m pytest --dist loadfile --no-loadscope-reorder -n $(or $(TESTS_AT_ONCE),3)

CHECK_PYTHON := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))

# Every process imports these thousands of modules; without their compiled form an import takes a second longer.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup data train quick test test-long cpp-packages gpu lint types unit format reference docs docs-serve lock clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/make \1\t\2/' | expand -t 14

setup: $(READY)  ## the environment in .venv: rayrec, torch, fbgemm_gpu (CPU or CUDA build), Ray, tools for tests and docs

data: $(READY)  ## MovieLens-100K as Parquet in data/movielens/parquet
	$(BIN)/python $(DATA)/prepare.py

train: data  ## train a sharded DLRM on MovieLens with a local Ray of 2 workers
	$(BIN)/rayrec train $(DATA)/train.yaml $(ARGS)

quick: lint types data  ## lint, types and the fast tests of each package: at most 3 minutes on two cores
	$(PYTEST) $(QUICK) $(PYTEST_ARGS)

# Types are checked by one process for a minute, so beside the tests.
test:  ## lint, types and all tests but the long ones
	+$(MAKE) --no-print-directory -j2 lint types unit

lint: $(READY)  ## ruff: lint rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## mypy on rayrec/
	$(BIN)/mypy rayrec

unit: data  ## all tests but the long ones
	$(PYTEST) -m "not long" $(PYTEST_ARGS)

# RAYREC_SOAK_S=60 makes four minutes of soak one.
test-long: data  ## the long tests: chaos, several hosts, four minutes of soak
	$(PYTEST) -n $(or $(TESTS_AT_ONCE),2) -m long $(PYTEST_ARGS) $$(grep -rl --include='test_*.py' mark.long tests)

cpp-packages:  ## Debian packages that deploy/cpp is built with (as root); tests that need them skip by name without
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$(cat deploy/cpp/packages.txt) >/dev/null; \
	else echo "install what deploy/cpp/packages.txt lists: apt-get needs root" >&2; exit 1; fi

# make gpu RANKS="1 2 8"
gpu: data  ## on a machine with GPUs: the tests that need one, then jobs/bench/gpu.py
	$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS)
	$(BIN)/python jobs/bench/gpu.py --ranks $(or $(RANKS),1 2) $(ARGS)

format: $(READY)  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

reference: $(READY)  ## write the config reference, rayrec/train/config/REFERENCE.md
	$(BIN)/python tests/test_readme.py

# mkdocs-material announces its successor at every start unless this is set.
docs docs-serve: export NO_MKDOCS_2_WARNING = 1

docs: $(READY)  ## the documentation site in build/site; any broken link is an error
	$(BIN)/mkdocs build --config-file docs/mkdocs.yml

docs-serve: $(READY)  ## the site on http://127.0.0.1:8000, built again when a page changes
	$(BIN)/mkdocs serve --config-file docs/mkdocs.yml

lock:  ## renew deploy/requirements.lock: the newest versions that pyproject.toml allows
	rm -rf build/lock
	"$(or $(PYTHON),python3)" -m venv build/lock
	build/lock/bin/python -m pip install --quiet ".[cpu,dev,docs]"
	@{ echo "# The versions that are tested together, for either build of fbgemm_gpu, which pyproject.toml pins (written by \`make lock\`)."; \
	    build/lock/bin/python -m pip freeze --exclude rayrec | grep -v ^fbgemm | sed 's/+cpu$$//'; } > $(LOCK).new
	mv $(LOCK).new $(LOCK)
	rm -rf build/lock

clean:  ## remove .venv and caches; runs/ and prepared data stay
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find rayrec tests jobs data -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@for python in $(or $(PYTHON),python3 python3.12 python3.11); do \
	    if "$$python" -c "$(CHECK_PYTHON)" 2>/dev/null; then found="$$python"; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	    echo "rayrec needs Python 3.11 or 3.12; $(or $(PYTHON),python3) is $$($(or $(PYTHON),python3) --version 2>&1)." >&2; \
	    echo "Install one (apt-get install python3.11, uv python install 3.12, conda create python=3.12 …)" >&2; \
	    echo "and name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	    exit 1; \
	fi; \
	echo "environment: $(VENV) with $$("$$found" --version), fbgemm_gpu for $(EXTRA)"; \
	if "$$found" -m venv $(VENV) >/dev/null 2>&1; then exit 0; fi; \
	rm -rf $(VENV); \
	if "$$found" -m venv --without-pip $(VENV) && "$$found" -m pip --python $(BIN)/python install --quiet pip; then exit 0; fi; \
	rm -rf $(VENV); \
	echo "$$found can make no virtual environment: install its venv module (apt-get install python3-venv)" >&2; \
	echo "or name another interpreter: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; \
	exit 1

$(READY): pyproject.toml $(LOCK) | $(BIN)/python
	@$(BIN)/python -c "$(CHECK_PYTHON)" || { \
	    echo "$(VENV) does not run Python 3.11 or 3.12: make clean, then make $(MAKECMDGOALS)" >&2; exit 1; }
	@rm -f $(VENV)/.ready-*
	@$(BIN)/python -m pip uninstall --quiet --yes $(OTHER_BUILD) 2>/dev/null || true
	$(BIN)/python -m pip install --quiet --constraint $(LOCK) --editable ".[$(EXTRA),dev,docs]"
	@touch $@
