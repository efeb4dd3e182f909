# Everything runs from .venv, which the first target that needs it creates. `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/ready
DOCKERFILES = $(wildcard docker/*Dockerfile*)

# make demo PEERS=4 MINUTES=5 RUN=run.toml, and whatever else in DEMO_ARGS
DEMO_FLAGS = $(if $(PEERS),--peers $(PEERS)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(RUN),--run $(RUN)) $(DEMO_ARGS)

# Several targets at once, all to their end. What each prints comes in one piece, when it has ended.
TOGETHER = $(MAKE) --keep-going --output-sync=target --no-print-directory

# Random lives of plain simulated swarms; of those of fragments and of those with liars there are a tenth as many.
LIVES ?= 2000

.PHONY: help venv demo test kernels unit swarm thorough marked lives neon lint docs wheels images clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

venv: $(READY) ## the virtual environment, with the pinned versions of constraints.txt and the C kernels built

demo: $(READY) ## a swarm that trains on this machine (PEERS=3 MINUTES=3 RUN=run.toml)
	$(BIN)/diloco-peer demo $(DEMO_FLAGS)

ifdef TEST_ARGS
test: $(READY)
	$(BIN)/python -m pytest $(TEST_ARGS)
else
test: $(READY) ## the tests for every change: C, unit and real processes (or, with TEST_ARGS, what pytest makes of them)
	@echo "The tests of real processes and, beside them, all others: what each prints comes when it has ended."
	$(TOGETHER) --jobs 3 swarm kernels unit
endif

kernels: ## the C tests
	$(MAKE) --no-print-directory -C native check

# Real processes mostly wait: these tests use what they leave of the cores.
unit: $(READY) ## the Python tests without real processes
	nice -n 10 $(BIN)/python -m pytest -m "not swarm and not thorough" --numprocesses auto --maxprocesses 4 --dist worksteal

# They mostly wait, so that twice as many as a small machine's cores fit on it.
SWARM = --numprocesses 4 --dist loadfile --no-loadscope-reorder

# Only their own modules are read: each of the four processes would need seconds for the others.
swarm: $(READY) ## the tests of real processes: one for each promise
	$(BIN)/python -m pytest -m "swarm and not thorough" $(SWARM) $$(grep -rl --include="test_*.py" mark.swarm tests | sort)

# Lives, the emulated tests and wheels wait for no clock: they may have what time the tests of real processes leave.
thorough: $(READY) ## all that `make test` leaves out: the tests so marked, lives, neon and wheels; prints its time
	@began=$$(date +%s); neon=neon; \
	{ command -v aarch64-linux-gnu-gcc && command -v qemu-aarch64; } > /dev/null || \
		{ neon=; echo "The C tests for ARM are not run: not all is here that they need (make help)."; }; \
	$(TOGETHER) --jobs 2 marked lives $$neon wheels; ended=$$?; \
	echo "make thorough took $$(( ($$(date +%s) - began) / 60 )) minutes."; exit $$ended

marked: $(READY) ## the tests marked thorough
	$(BIN)/python -m pytest -m thorough $(SWARM)

lives: $(READY) ## random lives of simulated swarms (LIVES=2000); a few others are among the tests, too
	nice -n 19 $(BIN)/python -m tests.simulator.schedules --first 10000 --seeds $(LIVES)
	nice -n 19 $(BIN)/python -m tests.simulator.schedules --first 20000 --seeds $$(($(LIVES) / 10)) --fragments 3
	nice -n 19 $(BIN)/python -m tests.simulator.schedules --seeds $$(($(LIVES) / 10)) --liars

neon: ## the C tests for 64-bit ARM, emulated (needs gcc-aarch64-linux-gnu, libc6-dev-arm64-cross and qemu-user)
	nice -n 19 $(MAKE) --no-print-directory -C native check-neon

lint: $(READY) ## ruff, mypy, hadolint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(DOCKERFILES),$(BIN)/hadolint $(DOCKERFILES))

docs: $(READY) ## the site made of docs/, in build/site
	$(BIN)/python -m mkdocs build --strict

wheels: $(READY) ## the source distribution and the wheels, into dist/, each of them tried
	$(BIN)/python -m pip install --quiet -c constraints.txt auditwheel ziglang
	nice -n 19 $(BIN)/python -m native.wheels dist --try

images: ## build both images and train between containers (needs root, buildah, podman, runc and debootstrap)
	docker/try

clean: ## remove what was built, the virtual environment and the caches
	$(MAKE) --no-print-directory -C native clean
	rm -rf $(VENV) build dist *.egg-info opendiloco/_kernels*.so .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find opendiloco peers native tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

$(READY): setup.cfg setup.py pyproject.toml constraints.txt native/build_kernels.py $(wildcard native/*.c native/*.h)
	@echo "installing torch, transformers and others into $(VENV): some minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e '.[dev,benchmarks]'
	@touch $@
