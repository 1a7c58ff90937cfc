# `make run` and `make test` are each enough on a machine with Python 3.10 to 3.12 and nothing else:
# whatever needs the environment depends on the stamp, which makes it, or remakes it when what it
# was made from has changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest $(ARGS)

.DEFAULT_GOAL := help
.PHONY: help run test test-slow test-chaos check lint format format-check types bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile
	@echo "PYTHON=python3.12 picks the Python; ARGS='-k name' goes to pytest, and to the suite of make bench."

run: $(STAMP) ## train CartPole with each policy optimizer and compare them
	@$(BIN)/python -m polopt.tuned_examples.showcase

test: $(STAMP) ## the quick tests
	$(PYTEST)

test-slow: $(STAMP) ## the learning tests, which take long
	$(PYTEST) -m slow

test-chaos: $(STAMP) ## the tests that kill workers over and over
	$(PYTEST) -m chaos

check: lint format-check types test ## all that CI checks

lint: $(STAMP) ## ruff's rules
	$(BIN)/python -m ruff check .

format-check: $(STAMP)
	$(BIN)/python -m ruff format --check .

format: $(STAMP) ## format the code, mend what ruff can mend
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

types: $(STAMP) ## mypy, strict on the package
	$(BIN)/python -m mypy

bench: $(STAMP) ## measure speed beside peers (an hour; ARGS='--only ppo --repeats 1': minutes)
	$(BIN)/python benchmarks/suite.py $(ARGS)

clean: ## remove what builds and tools left; the environment stays (rm -r .venv)
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# A half-made environment is removed, or the next `make` would take it for a whole one.
$(STAMP): setup.py setup.cfg pyproject.toml constraints.txt
	@test -x $(BIN)/python || { \
	  $(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || { \
	    echo "polopt needs Python 3.10 to 3.12: make PYTHON=python3.12" >&2; exit 1; }; \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; }
	@echo "Installing polopt and what it needs into $(VENV) (minutes, the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[dev,atari]'
	@touch $@
