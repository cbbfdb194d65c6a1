# Everything runs from a fresh clone with Python 3.11+ and make: each target first makes .venv,
# with the versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JOBS ?= 2
RACE := $(VENV)/.race

.DEFAULT_GOAL := help
.PHONY: help venv demo test docs fuzz long bench lint kernels format dist clean

help: ## Say what the targets do
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 16

venv: $(STAMP) ## Create or update .venv

demo: $(RACE) ## Race: eight strategies over slow links, a verdict, report.html (2 minutes)
	$(BIN)/laconic race

# The cap keeps oneDNN off instructions that some virtual machines announce and do not have.
test: $(STAMP) ## Lint, then run all tests
	$(MAKE) --no-print-directory -j2 lint kernels
	ONEDNN_MAX_CPU_ISA=AVX512_CORE $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile

docs: $(STAMP) ## Build the documents' site in build/site; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

fuzz: $(STAMP) ## A million hostile streams for every coder (about 6 minutes)
	$(BIN)/python tests/fuzz.py

long: $(STAMP) ## The same bits on all ranks, for 200 steps of every codec on every exchange
	LACONIC_TEST_STEPS=200 $(BIN)/python -m pytest -q -o timeout=1200 tests/exchanges/test_exchanges.py

bench: $(STAMP) ## Measure codecs and CPU kernels; GRADIENTS=file.npz adds models
	$(BIN)/python -m benchmarks.cpu --save
	$(BIN)/python -m benchmarks.codecs --save $(if $(GRADIENTS),--gradients $(GRADIENTS))
	$(BIN)/python -m benchmarks.tables

lint: $(STAMP) ## Check style, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

kernels: $(STAMP) # compiled once, not by all tests that are first at the same time
	$(BIN)/python tests/warm.py

format: $(STAMP) ## Rewrite the code in house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dist: $(STAMP) ## Build what is published, in dist: the sources, and from them the wheel
	rm -rf dist
	$(BIN)/python -m build --no-isolation

clean: ## Remove caches and builds, but not .venv
	rm -rf .pytest_cache .ruff_cache .hypothesis build dist
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# -c always: the versions are part of what the tests check, and an unpinned torch can bring
# gigabytes that nothing here uses.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "laconic needs Python 3.11 or newer, and $(PYTHON) is not: try make PYTHON=python3.11" >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	touch $@ $(RACE)

# what the demo needs, without the tools of developers
$(RACE): pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[race]'
	touch $@
