# make demo   set up, then train the digits model and print its accuracy and MFU (minutes)
# make check  set up, then lint, types and fast tests (a few minutes)
# make test   set up, then the whole test suite (minutes)
# make sweep  trace every language architecture of the installed transformers, write docs/architectures.md (five minutes)
# make format rewrite the sources as ruff formats them
#
# The set-up makes .venv once and again when pyproject.toml or constraints.txt change. PYTHON=... picks the interpreter.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
SETUP := .venv/.headway-set-up
SOURCES := src tests benchmarks examples

.PHONY: demo check test sweep format lint types fast-tests

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
