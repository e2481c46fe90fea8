# Each target installs what it needs into .venv, once. Variables: PYTHON (3.11 or newer), WORKERS (test processes),
# PIP_FLAGS (for example an index with CPU builds of torch), ARGS (handed to the program).
PYTHON ?= python3
WORKERS ?= 2
PIP_FLAGS ?=
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_FLAGS)

.PHONY: help demo test matrix test-fast test-shapes lint bench docs clients aot aot-tpu aot-gpu clean
help:
	@echo "make demo       train a small Llama on real text and let it complete a sentence and answer over HTTP (at most 4 minutes)"
	@echo "make test       run every test (GPU tests are skipped without a GPU)"
	@echo "make matrix     every check of every family: those of the families that share a wiring with another one too (an hour)"
	@echo "make test-fast  leave out the slow tests (3 minutes on two cores)"
	@echo "make test-shapes  the same, with the shapes and dtypes of annotations checked at run time"
	@echo "make lint       ruff check, ruff format --check, mypy"
	@echo "make bench      run every benchmark of benchmarks/ (compares with transformers and torch)"
	@echo "make docs       write the reference of every public function to site/ (HTML)"
	@echo "make clients    run clients that others wrote (pip and npm, each in its own environment) against a server"
	@echo "make aot        compile every family for v5p, v6e and H100 without owning one (aot-tpu, aot-gpu: one half; 1.3 and 4.4 GB to install)"
	@echo "make clean      remove .venv and all caches"

demo: $(VENV)/demo
	$(BIN)/fdel demo $(ARGS)

test: $(VENV)/test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

matrix: $(VENV)/test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --matrix -m matrix $(ARGS)

test-fast: $(VENV)/test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow and not gpu" $(ARGS)

test-shapes: $(VENV)/test
	$(BIN)/python -m pytest -p tests.typecheck -n $(WORKERS) --dist worksteal -m "not slow and not gpu" $(ARGS)

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/test
	set -e; for script in benchmarks/*.py; do $(BIN)/python $$script $(ARGS); done

docs: $(VENV)/docs
	$(BIN)/python docs/reference.py site

clients: $(VENV)/test
	$(BIN)/python -m tests.clients.run $(ARGS)

# Environments of their own: the accelerators' compilers, and no torch.
aot: aot-tpu aot-gpu

# libtpu's lock file is for hosts with chips: nothing runs here.
aot-tpu: .venv-aot-tpu/ready
	ALLOW_MULTIPLE_LIBTPU_LOAD=1 .venv-aot-tpu/bin/python -m pytest tests/aot tests/test_aot.py -m aot --matrix $(ARGS)

aot-gpu: .venv-aot-gpu/ready
	.venv-aot-gpu/bin/python -m pytest tests/aot tests/test_aot.py -m aot --matrix $(ARGS)

.venv-aot-tpu/ready: EXTRA := tpu
.venv-aot-gpu/ready: EXTRA := cuda
.venv-aot-%/ready: pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --disable-pip-version-check $(PIP_FLAGS) -e '.[$(EXTRA)]' absl-py hypothesis pytest
	touch $@

clean:
	rm -rf $(VENV) .venv-aot-* site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# The file is pip, not python: a failed venv leaves python behind, and the next run must try again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit("fdel needs Python 3.11 or newer, this is " + sys.version.split()[0] \
	  + ": run make with PYTHON=python3.11 (or newer)" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo: pyproject.toml | $(BIN)/pip
	$(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/docs: pyproject.toml | $(BIN)/pip
	$(INSTALL) -e '.[docs]'
	touch $@

$(VENV)/test: pyproject.toml | $(BIN)/pip
	$(INSTALL) -e '.[test]'
	touch $(VENV)/demo $(VENV)/docs $@
