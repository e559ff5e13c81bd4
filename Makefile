# Every target works on a machine that has only Python >= 3.10, make and a C compiler:
# the first one to run creates $(VENV) and installs what is needed into it.
#     make quickstart PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.slapo-installed
# Tests at a time; 0 runs them in one process, as a debugger needs.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest
PYTEST_ARGS ?=

# More threads than cores make the small tensors of the tests slower, not faster.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-fast test-wide test-versions lint format types docs-check docs dist golden bench gpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## create the virtual environment and install the package with its extras

# torch comes first and pinned: a CPU build is taken where one is offered, and the constraints
# keep any other package from pulling in a newer one.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[hf,deepspeed,megatron,examples,tune,dev]'
	@touch $@

quickstart: $(STAMP) ## schedule a small model and see that it still computes the same
	$(BIN)/python examples/quickstart.py

test: $(STAMP) ## the whole suite, doctests included
	$(PYTEST) --doctest-modules slapo tests -m "not wide" -n $(JOBS) $(PYTEST_ARGS)

test-wide: $(STAMP) ## the same checks for further families of models
	$(PYTEST) tests -m wide -n $(JOBS) $(PYTEST_ARGS)

test-fast: $(STAMP) ## the suite without its slow tests
	$(PYTEST) --doctest-modules slapo tests -m "not slow and not wide" -n $(JOBS) $(PYTEST_ARGS)

# Oldest and newest versions, as torch-transformers; each pair gets a virtual environment of its own.
ENDS := 2.11.0-5.17.0 2.15.0-5.24.0
FAST_ROOMS := tests/graph tests/primitives tests/sharding tests/weights tests/op tests/pipeline \
    tests/runtimes tests/check tests/verify tests/test_mesh.py

test-versions: $(ENDS:%=test-versions-%) ## the fast tests on the oldest and the newest torch and Transformers

test-versions-%: .venv-%/.slapo-installed
	.venv-$*/bin/python -m pytest $(FAST_ROOMS) -m "not slow and not wide" -n $(JOBS) $(PYTEST_ARGS)

.venv-%/.slapo-installed: pyproject.toml
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install --quiet "torch==$(word 1,$(subst -, ,$*))"
	.venv-$*/bin/python -m pip install --quiet -e '.[hf,deepspeed,dev]' \
	    "torch==$(word 1,$(subst -, ,$*))" "transformers==$(word 2,$(subst -, ,$*))"
	@touch $@

.PRECIOUS: .venv-%/.slapo-installed

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP) ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP) ## mypy
	$(BIN)/mypy

docs-check: $(STAMP) ## examples in docstrings and in the README
	$(PYTEST) --doctest-modules slapo tests/test_readme.py -n $(JOBS)

docs: $(STAMP) ## the documentation site, into build/docs
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	$(BIN)/sphinx-build -q -W --keep-going docs build/docs
	@echo "open build/docs/README.html"

dist: $(STAMP) ## the wheel and the source archive, into dist
	$(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --outdir dist

golden: $(STAMP) ## write the golden files anew; read their diff before you commit it
	$(PYTEST) tests --update-golden $(PYTEST_ARGS)

bench: $(STAMP) ## the benchmarks; results go to benchmark/results
	$(BIN)/python -m benchmark

gpu: ## all that needs a GPU, in nine minutes, with the packages that are installed; GPU=--small: anywhere
	$(PYTHON) -m benchmark gpu $(GPU)

clean: ## remove caches and the virtual environment
	rm -rf $(VENV) .venv-* build .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
