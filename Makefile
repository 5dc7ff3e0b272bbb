# make demo   set up, then train the digits model and print its accuracy and MFU (minutes)
# make check  set up, then lint, types and fast tests (a few minutes)
# make test   set up, then the whole test suite (minutes)
# make test-oldest  set up .venv-oldest, then the core of the suite with the oldest supported versions (twenty minutes)
# make sweep  trace every language architecture of the installed transformers, write docs/architectures.md (five minutes)
# make format rewrite the sources as ruff formats them
#
# The set-up makes .venv once and again when pyproject.toml or constraints.txt change. PYTHON=... picks the interpreter.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
SETUP := .venv/.headway-set-up
SOURCES := src tests benchmarks examples

.PHONY: demo check test test-oldest sweep format lint types fast-tests

demo: $(SETUP)
	rm -rf runs/digits # a run folder is never written over, and this is the demo's own
	$(BIN)/headway demo

check: lint types fast-tests

test: $(SETUP)
	$(BIN)/python -m pytest -q --numprocesses=auto

lint: $(SETUP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(SETUP)
	$(BIN)/mypy

fast-tests: $(SETUP)
	$(BIN)/python -m pytest -q --numprocesses=auto -m "not slow and not gpu and not dist"

# What runs on the user's own torch and transformers: counting, data, models, meter, training, commands. Left out: other
# people's trainers and trackers, which are not part of what is old here, and what takes long or several processes.
OLDEST := .venv-oldest
OLDEST_CORE := tests/cli tests/count tests/data tests/meter tests/models tests/train
OLDEST_LEFT_OUT := tests/count/test_laid_over.py tests/meter/test_trackers.py tests/models/test_float8.py \
	tests/train/optim/test_moments.py tests/train/test_importing.py

test-oldest: $(OLDEST)/.set-up
	$(OLDEST)/bin/python -m pytest -q --numprocesses=auto -m "not slow and not gpu and not dist" \
		$(addprefix --ignore=,$(OLDEST_LEFT_OUT)) $(OLDEST_CORE)

$(OLDEST)/.set-up: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --no-deps --requirement constraints-oldest.txt
	$(OLDEST)/bin/pip install --quiet --no-deps --editable .
	touch $@

sweep: $(SETUP)
	$(BIN)/python -m headway.count.tracing.sweep docs/architectures.md

format: $(SETUP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# torch first and by its pinned version: pip then takes the build that this machine's own settings prefer (CPU or CUDA).
$(SETUP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Headway needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet -c constraints.txt --editable '.[train,demo,dev]'
	touch $@
