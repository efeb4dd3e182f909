# Everything runs from .venv, which the first target that needs it creates. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DOCKERFILES = $(wildcard docker/*Dockerfile*)

# make demo PEERS=4 MINUTES=5 RUN=run.toml, and whatever else in DEMO_ARGS
DEMO_FLAGS = $(if $(PEERS),--peers $(PEERS)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(RUN),--run $(RUN)) $(DEMO_ARGS)

# Swarms of real processes mostly wait, so that two at a time fit on a machine with two cores.
ALL_TESTS = $(BIN)/python -m pytest -m "not swarm" --numprocesses auto --maxprocesses 4 --dist worksteal \
    && $(BIN)/python -m pytest -m swarm --numprocesses 2 --dist loadfile

.PHONY: help venv demo test neon lint clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

venv: $(READY) ## the virtual environment, with the pinned versions of constraints.txt and the C kernels built

demo: $(READY) ## a swarm that trains on this machine (PEERS=3 MINUTES=3 RUN=run.toml)
	$(BIN)/diloco-peer demo $(DEMO_FLAGS)

test: $(READY) ## all tests: C, then Python (or, with TEST_ARGS, what pytest makes of these)
	$(MAKE) --no-print-directory -C native check
	$(if $(TEST_ARGS),$(BIN)/python -m pytest $(TEST_ARGS),$(ALL_TESTS))

neon: ## the C tests for 64-bit ARM, emulated (needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user)
	$(MAKE) --no-print-directory -C native check-neon

lint: $(READY) ## ruff, mypy, hadolint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(DOCKERFILES),$(BIN)/hadolint $(DOCKERFILES))

clean: ## remove what was built, the virtual environment and the caches
	$(MAKE) --no-print-directory -C native clean
	rm -rf $(VENV) build dist *.egg-info opendiloco/_kernels*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find opendiloco peers native tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

$(READY): setup.cfg setup.py pyproject.toml constraints.txt native/build_kernels.py $(wildcard native/*.c native/*.h)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,benchmarks]'
	@touch $@
