# make demo   set up, then train the digits model and print its accuracy and MFU (minutes)
# make check  set up, then lint, types and the fastest tests (two minutes, three the first time)
# make test   set up, then the tests, those marked slow left out; .ci/run runs the same tests
# make test-long  set up, with transformers 4 beside it in .transformers4, then every test, laws over all their cases, and ten times as many examples of properties (hours)
# make test-oldest  set up .venv-oldest, then the core of the suite with the oldest supported versions (five minutes)
# make test-browser  set up, then the tests that open pages in headless Chromium (two minutes)
# make docs   set up .venv-docs, then build the documentation in site/; a broken link or an undocumented name fails (a minute)
# make sweep  trace every language architecture of the installed transformers, write benchmarks/results/architectures_202611.md (ten minutes)
# make gpu-report  set up, then show the records of benchmarks/results and of FROM=FOLDER, if given, in build/gpu-report.html
# make format rewrite the sources as ruff formats them
#
# The set-up makes .venv once and again when pyproject.toml or constraints.txt change. PYTHON=... picks the interpreter.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
BIN := .venv/bin
SETUP := .venv/.headway-set-up
TRANSFORMERS4 := .transformers4
PLUGIN := plugins/headway-bagel
SOURCES := src plugins tests tools benchmarks examples conftest.py
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(3 * os.cpu_count() // 2)') # processes of tests wait for each other

.PHONY: demo check test test-long test-oldest test-browser docs sweep gpu-report format lint types fast-tests

demo: $(SETUP)
	rm -rf runs/digits # a run folder is never written over, and this is the demo's own
	$(BIN)/headway demo

check: lint types fast-tests

test: $(SETUP)
	HEADWAY_TEST_PROFILE=quick $(BIN)/python -m pytest -q --numprocesses=$(WORKERS) -m "not slow and not long"

test-long: $(SETUP) $(TRANSFORMERS4)/.set-up
	HEADWAY_TEST_PROFILE=long $(BIN)/python -m pytest -q --timeout=3600 --numprocesses=$(WORKERS) -m "slow or dist or long"
	HEADWAY_TEST_PROFILE=long $(BIN)/python -m pytest -q --timeout=3600 --numprocesses=$(WORKERS) -m "not slow and not gpu and not dist"

# Beside .venv, whose other packages it uses: tests ask it in processes of its own whether it opens an export.
$(TRANSFORMERS4)/.set-up: $(SETUP) constraints-transformers4.txt
	$(BIN)/pip install --quiet --no-deps --upgrade --target $(TRANSFORMERS4) --requirement constraints-transformers4.txt
	touch $@

lint: $(SETUP)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(SETUP)
	$(BIN)/mypy

# Rooms whose tests take milliseconds each, as most of them need no torch, and the shape of the house.
FASTEST := tests/test_house.py tests/test_readme.py tests/test_cache.py \
	$(addprefix tests/count/test_,cost_model.py drivers.py masks.py workload.py) \
	$(addprefix tests/,audit cli conventions data/sources devices importing log packing plan report)

fast-tests: $(SETUP)
	$(BIN)/python -m pytest -q --numprocesses=auto -m "not slow and not long and not gpu and not dist" $(FASTEST)

# What the versions of torch, transformers, peft and numpy are likeliest to break: counting, the meter, models, training,
# commands. Left out for time: a hundred more families of models, data formats, plans, and packages that the engine does not
# need (trackers, torchao, other people's trainers). Of what takes several processes, two tests by name.
OLDEST := .venv-oldest
OLDEST_WORKERS ?= auto
OLDEST_CORE := \
	$(addprefix tests/count/test_,adapters.py cost_model.py drivers.py masks.py recompute.py workload.py) \
	$(addprefix tests/tracing/test_,activations.py blocks.py compiled.py experts.py modules.py setups.py stand_ins.py trace.py) \
	$(addprefix tests/meter/test_,batches.py goodput.py memory_traffic.py meter.py) tests/log/test_jsonl.py \
	$(addprefix tests/models/test_,blocks.py compiling.py experts.py head.py kernels.py load.py lora.py \
		products.py recompute.py router.py) tests/models/attention/test_backend.py \
	$(addprefix tests/models/attention/test_,segments.py splits.py varlen.py) tests/models/parallel/test_experts.py \
	$(addprefix $(PLUGIN)/tests/test_,model.py checkpoint.py drawing.py) \
	tests/config/test_read.py tests/checkpoint/test_checkpoint.py tests/models/test_precision.py tests/predict/test_speed.py \
	$(addprefix tests/train/test_,loop.py recompute.py record.py) \
	tests/explain/findings $(addprefix tests/explain/test_,attribution.py comparison.py events.py explanation.py logs.py \
		measurement.py owners.py products.py ranks.py records.py stated_work.py text.py trace.py waterfall.py) tests/packing \
	$(addprefix tests/predict/test_,blocks.py collectives.py communication.py exchanges.py failures.py memory.py moments.py \
		recompute.py slices.py solve.py speeds.py step_time.py) \
	$(addprefix tests/cli/test_,app.py config.py devices.py explain.py explain_sources.py flops.py index.py refusals.py \
		mfu.py pack.py parse.py resolve.py train.py verify.py) tests/fake_cuda
OLDEST_SLOW := tests/train/test_ranks.py::test_two_ranks_have_the_losses_of_one_with_twice_the_accumulation \
	tests/meter/test_meter.py::test_two_ranks_add_up_to_the_flop

test-oldest: $(OLDEST)/.set-up
	$(OLDEST)/bin/python -m pytest -q --numprocesses=$(OLDEST_WORKERS) -m "not slow and not gpu and not dist" $(OLDEST_CORE)
	$(OLDEST)/bin/python -m pytest -q $(OLDEST_SLOW)

$(OLDEST)/.set-up: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/pip install --quiet --no-deps --requirement constraints-oldest.txt
	$(OLDEST)/bin/pip install --quiet --no-deps --editable . --editable $(PLUGIN)
	touch $@

# Neither torch nor transformers: the reference is read from the source.
DOCS := .venv-docs
docs: $(DOCS)/.set-up
	$(DOCS)/bin/python -m tools.site

$(DOCS)/.set-up: pyproject.toml constraints.txt
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet -c constraints.txt --editable '.[docs]' && $(DOCS)/bin/pip install --quiet --no-deps --editable $(PLUGIN) || \
		{ echo "The site's generator could not be installed in $(DOCS); pip says why above. It needs a network, or pip's cache." >&2; exit 1; }
	touch $@

test-browser: $(SETUP) $(DOCS)/.set-up
	@command -v chromium >/dev/null || { echo "These tests need Chromium: apt-get install chromium" >&2; exit 1; }
	$(BIN)/python -m pytest -q -m browser

sweep: $(SETUP)
	$(BIN)/python -m tools.sweep benchmarks/results/architectures_202611.md

gpu-report: $(SETUP)
	$(BIN)/python benchmarks/gpu_report.py $(FROM) benchmarks/results -o build/gpu-report.html

format: $(SETUP)
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# torch first and by its pinned version: pip then takes the build that this machine's own settings prefer (CPU or CUDA).
$(SETUP): pyproject.toml $(PLUGIN)/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Headway needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --quiet -c constraints.txt --editable '.[train,demo,dev]' --editable $(PLUGIN)
	touch $@
