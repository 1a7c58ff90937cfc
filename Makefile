# Each target that needs the environment depends on the stamp file. The rule of the stamp file
# creates the environment, and updates it after a change of one of its prerequisites.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
# Tests run in two processes. All tests of a file run in the same process, so that its fixtures
# start Ray once. Files run in the order given. ARGS='-n 0' runs the tests in pytest's own process,
# as a debugger needs it. If a test ends its process, xdist starts one more process. Without the
# limit, it would start processes forever.
IN_PARALLEL := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=1
# Runs each optimizer on Ray. Part of `make test`, not of `make test-integration`.
ON_RAY := tests/integration/optimizers/test_optimizers_on_ray.py
# TORCH=2.13.0 selects this version of torch instead of the oldest or the newest version.
VERSIONS = $(PYTHON) tests/versions.py $(if $(TORCH),--torch $(TORCH))

.DEFAULT_GOAL := help
.PHONY: help run test test-integration test-slow test-chaos test-oldest test-newest test-wheel check \
	lint format format-check types bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-17s %s\n", $$1, $$2 }' Makefile
	@echo "PYTHON=python3.12 selects the Python; ARGS='-k name' passes arguments to pytest or to the suite of make bench; TORCH=2.13.0 selects the torch of test-oldest and test-newest."
	@echo "Tests: tests/unit starts no process; tests/integration uses Ray and the command line; tests/chaos kills workers repeatedly."

run: $(STAMP) ## train CartPole with three policy optimizers and compare them
	@$(BIN)/python -m polopt.tuned_examples.showcase

test: $(STAMP) ## unit tests, and each optimizer once on Ray (minutes)
	$(PYTEST) $(ON_RAY) tests/unit $(IN_PARALLEL) $(ARGS)

test-integration: $(STAMP) ## all other tests with Ray and the command line
	$(PYTEST) tests/integration --ignore=$(ON_RAY) $(IN_PARALLEL) $(ARGS)

test-slow: $(STAMP) ## learning tests, and more cases of tests that start Ray
	$(PYTEST) -m slow $(ARGS)

test-chaos: $(STAMP) ## tests that kill workers over and over
	$(PYTEST) tests/chaos $(ARGS)

test-oldest: ## unit tests and each optimizer on Ray, with the oldest versions in setup.cfg (not in CI)
	$(VERSIONS) oldest $(VENV)-oldest $(ON_RAY) tests/unit $(IN_PARALLEL) $(ARGS)

test-newest: ## the same tests, with the newest versions of the registry (not in CI)
	$(VERSIONS) newest $(VENV)-newest $(ON_RAY) tests/unit $(IN_PARALLEL) $(ARGS)

test-wheel: ## builds and checks sdist and wheel; the same tests with the installed wheel (not in CI)
	$(VERSIONS) wheel $(VENV)-wheel $(ON_RAY) tests/unit $(IN_PARALLEL) $(ARGS)

check: lint format-check types test test-integration ## all that CI runs

lint: $(STAMP) ## ruff's rules
	$(BIN)/python -m ruff check .

format-check: $(STAMP) ## ruff's format, without changes
	$(BIN)/python -m ruff format --check .

format: $(STAMP) ## format the code and apply ruff's fixes
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

types: $(STAMP) ## mypy, strict on the package
	$(BIN)/python -m mypy

bench: $(STAMP) ## compare with other libraries (an hour; ARGS='--only ppo --repeats 1': minutes)
	$(BIN)/python benchmarks/suite.py $(ARGS)

clean: ## remove build and tool output, but not the environment (rm -r .venv)
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# A failed creation removes the environment, so that the next `make` does not use half of it.
$(STAMP): Makefile setup.py setup.cfg pyproject.toml constraints.txt
	@test -x $(BIN)/python || { \
	  $(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))' || { \
	    echo "polopt needs Python 3.10 to 3.14: make PYTHON=python3.12" >&2; exit 1; }; \
	  $(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; }
	@echo "Installing polopt and its dependencies into $(VENV) (takes minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  -c constraints.txt -e '.[dev,agents,atari,dashboard]'
	@touch $@
