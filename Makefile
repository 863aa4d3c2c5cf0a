# Each target sets up .venv on first use, from python3 (3.11 or newer) and nothing else.

PYTHON ?= python3
ARGS ?=
READY := .venv/.ready

JOBS ?= 2

.PHONY: demo test test-all fuzz bench check wheel-check clean

demo: $(READY)
	@.venv/bin/python examples/demo.py $(ARGS)

PYTEST := .venv/bin/pytest --quiet --numprocesses=$(JOBS) --dist=worksteal

# The quick tests, with the same examples and so the same verdict every time.
test: $(READY)
	@$(PYTEST) -m "not gpu and not slow" $(ARGS)

# The quick tests, then those that are marked slow.
test-all: test
	@$(PYTEST) -m "slow and not gpu" $(ARGS)

# Looks for new failing examples: make fuzz ARGS="--seconds 600".
fuzz: $(READY)
	@.venv/bin/python benchmarks/fuzz.py $(ARGS)

# The quick benchmarks with their bars.
bench: $(READY)
	@.venv/bin/python benchmarks/bars.py $(ARGS)

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
