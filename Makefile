# Each target installs what it needs into .venv, once. Variables: PYTHON (3.11 or newer), WORKERS (test processes),
# PIP_FLAGS (for example an index with CPU builds of torch), ARGS (handed to the program).
PYTHON ?= python3
WORKERS ?= 2
PIP_FLAGS ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS)

.PHONY: help demo test test-fast lint bench clients clean
help:
	@echo "make demo       train a small Llama on real text and let it complete a sentence and answer over HTTP (at most 4 minutes)"
	@echo "make test       run every test (GPU tests are skipped without a GPU)"
	@echo "make test-fast  leave out the slow tests (3 minutes on two cores)"
	@echo "make lint       ruff check, ruff format --check, mypy"
	@echo "make bench      run every benchmark of benchmarks/ (compares with transformers and torch)"
	@echo "make clients    run clients that others wrote (pip and npm, each in its own environment) against a server"
	@echo "make clean      remove .venv and all caches"

demo: $(VENV)/demo
	$(BIN)/fdel demo $(ARGS)

test: $(VENV)/test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-fast: $(VENV)/test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not gpu" $(ARGS)

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/test
	set -e; for script in benchmarks/*.py; do $(BIN)/python $$script $(ARGS); done

clients: $(VENV)/test
	$(BIN)/python -m tests.clients.run $(ARGS)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The file is pip, not python: a failed venv leaves python behind, and the next run must try again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit("fdel needs Python 3.11 or newer, this is " + sys.version.split()[0] \
	  + ": run make with PYTHON=python3.11 (or newer)" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo: pyproject.toml | $(BIN)/pip
	$(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/test: pyproject.toml | $(BIN)/pip
	$(INSTALL) -e '.[test]'
	touch $(VENV)/demo $@
