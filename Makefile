# Each target sets up .venv on first use, from python3 (3.11 or newer) and nothing else.

PYTHON ?= python3
ARGS ?=
READY := .venv/.ready

.PHONY: demo test check wheel-check clean test-library test-programs

demo: $(READY)
	@.venv/bin/python examples/demo.py $(ARGS)

# All tests, in two halves that take as long; with ARGS those that it chooses.
PYTEST := .venv/bin/pytest -m "not gpu"
PROGRAMS := tests/benchmarks tests/cli tests/docs tests/examples tests/test_readme.py tests/testing tests/train

test: $(READY)
ifeq ($(ARGS),)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-library test-programs
else
	@$(PYTEST) $(ARGS)
endif

test-library: $(READY)
	@$(PYTEST) $(addprefix --ignore=,$(PROGRAMS))

test-programs: $(READY)
	@$(PYTEST) $(PROGRAMS)

check: $(READY)
	@.venv/bin/ruff check
	@.venv/bin/ruff format --check
	@.venv/bin/mypy
	@.venv/bin/lint-imports

# Builds the wheel, and uses it in an empty environment.
wheel-check:
	@PYTHON=$(PYTHON) .ci/wheel

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "hyperslab needs Python 3.11 or newer, which $(PYTHON) is not: make PYTHON=python3.11" >&2; exit 1; }
	@echo "Setting up .venv (once; torch is large)" >&2
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv build dist src/*.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
