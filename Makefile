# Every target makes what it needs, on a Linux machine that has make and Python 3.11 or newer:
#
#   make demo            trains the small hybrid on real text, draws the curve, samples from it
#   make test            every test this machine can run           (make test ARGS="tests/ops -k kda")
#   make check           style, types, import order, architecture, repeated code, budgets
#   make bench OP=kda    that operator's tests, then its timings   (OP as `wyfold bench` names it)
#   make format          rewrites the files as `make check` wants them
#   make docs            the documentation as a site, in build/site, with warnings as errors
#   make compile         every kernel for every architecture, without a GPU   (make compile TRITON=3.7.1)
#   make lock            resolves the pinned tools afresh into requirements/
#
# The environment is .venv, built in steps that each leave a stamp; a step that was interrupted is done again.
# torch is a step of its own, outside the hashed file: CPU, CUDA and ROCm builds of one version have different hashes,
# and which one fits is the machine's matter. pip's own configuration is honoured throughout.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

TORCH = 2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
# Plain `=`: a caller's environment cannot leave tests out, only the command line can.
ARGS =
OP =
TRITON =

.PHONY: help demo test check lint types imports architecture repeats budgets bench docs compile format lock

help:
	@sed -n 's/^#   //p' Makefile

# --- what people run -------------------------------------------------------------------------------------------------

demo: $(VENV)/.wyfold
	$(BIN)/wyfold demo

# Workers of one thread: the suite is made of many small cases, and threads inside them only wait for each other.
# Where a test wants two threads, they wait asleep: spinning, they take their core from the other worker.
# Bytecode is written: each of the workers would compile all tests again, 4 s.
# Two runs: Triton reads at its import whether it compiles kernels or interprets them. They share two cores: a quarter of
# the time is the interpreter's, and a tenth of the other run waits for timeouts and other processes. The interpreter's
# output follows at the end. A choice of tests that has none for it is no failure (5: nothing was collected).
PYTEST = $(BIN)/python -m pytest -q --dist worksteal
INTERPRETED = $(VENV)/interpreted-tests.log
test: $(VENV)/.wyfold
	@status=0; export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive CUBLAS_WORKSPACE_CONFIG=:4096:8; \
	unset PYTHONDONTWRITEBYTECODE; set -x; \
	TRITON_INTERPRET=1 $(PYTEST) -n 0 $(ARGS) >$(INTERPRETED) 2>&1 & interpreted=$$!; \
	$(PYTEST) -n 2 $(ARGS) || status=1; \
	wait $$interpreted || test $$? = 5 || status=1; \
	cat $(INTERPRETED); exit $$status

check: lint types imports architecture repeats budgets

# The tests of what is timed come first: no number on red.
TESTS_delta_rule := tests/ops/test_delta_rule.py
TESTS_gdn := tests/ops/test_gated_delta_rule.py
TESTS_kda := tests/ops/test_kda.py
TESTS_ttt := tests/ops/test_ttt_linear.py

bench: $(VENV)/.wyfold
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 $(or $(TESTS_$(OP:recurrent_%=%)),tests/ops)
	$(BIN)/wyfold bench $(OP) --out docs/results

# Plots and tables first, then the pages. The variable silences an advertisement of the theme.
docs: $(VENV)/.wyfold $(VENV)/.docs
	$(BIN)/python tools/pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Another Triton than the environment's goes into a folder of its own, in front of it on the path.
compile: $(VENV)/.wyfold
	@test -z "$(TRITON)" || test -d .cache/triton-$(TRITON) || \
	$(PIP) install --quiet --quiet --no-deps --target .cache/triton-$(TRITON) triton==$(TRITON)
	PYTHONPATH=$(if $(TRITON),.cache/triton-$(TRITON)) OMP_NUM_THREADS=1 $(BIN)/python -m tests.compile.aot $(ARGS)
	PYTHONPATH=$(if $(TRITON),.cache/triton-$(TRITON)) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m release
	PYTHONPATH=$(if $(TRITON),.cache/triton-$(TRITON)) OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -q -n 2 -m release

# --- what `make check` is made of ------------------------------------------------------------------------------------

lint: $(VENV)/.wyfold
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.wyfold
	$(BIN)/mypy

imports: $(VENV)/.wyfold
	$(BIN)/lint-imports

architecture: $(VENV)/.wyfold
	$(BIN)/python -m pytest -q tests/test_architecture.py tests/test_docstrings.py

repeats: $(VENV)/.wyfold
	$(BIN)/pylint --disable=all --enable=duplicate-code --score=n src/wyfold

budgets: $(VENV)/.wyfold
	$(BIN)/python tools/budgets.py

format: $(VENV)/.wyfold
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# --- the environment -------------------------------------------------------------------------------------------------

# Where the interpreter no longer starts (an upgraded system, a moved folder), the stamps are worth nothing.
$(shell test ! -d $(VENV) || $(BIN)/python -c pass 2>/dev/null || rm -f $(VENV)/.made)

# An environment whose pip answers is kept; anything less is made anew.
$(VENV)/.made:
	@if $(BIN)/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && $(PIP) --version >/dev/null 2>&1; \
	then touch $@; exit 0; fi; \
	for python in $(PYTHON) python3 python3.14 python3.13 python3.12 python3.11; do \
	  if command -v $$python >/dev/null && $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    if ! $$python -c 'import ensurepip, venv' 2>/dev/null; then \
	      echo "wyfold: $$python has no venv module; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; fi; \
	    echo "wyfold: making $(VENV) with $$($$python --version)"; \
	    $$python -m venv --clear $(VENV); touch $@; exit 0; \
	  fi; \
	done; \
	echo "wyfold: Python 3.11 or newer is needed; python3 here is: $$(python3 --version 2>&1 || true)" >&2; \
	echo "        (another one can be named: make PYTHON=/path/to/python3.12 ...)" >&2; exit 1

$(VENV)/.torch-$(TORCH): $(VENV)/.made
	@echo "wyfold: installing torch $(TORCH) into $(VENV) (the largest download)"
	$(PIP) install --quiet --quiet torch==$(TORCH)
	$(BIN)/python -c 'import torch' || $(PIP) install --quiet --quiet --force-reinstall torch==$(TORCH)
	@touch $@

# --no-deps: the file is complete without torch, whose own dependencies came with it.
$(VENV)/.tools: requirements/dev.txt $(VENV)/.torch-$(TORCH)
	@echo "wyfold: installing the pinned tools into $(VENV)"
	$(PIP) install --quiet --quiet --no-deps --require-hashes -r $<
	@touch $@

# Triton belongs to torch's GPU builds, which name the one they need; beside the CPU build, which names none, it is what
# kernels are interpreted and compiled with.
NAMES_TRITON = import importlib.metadata as m, sys; sys.exit(not any("triton" in r for r in m.requires("torch")))
$(VENV)/.kernels: requirements/kernels.txt $(VENV)/.torch-$(TORCH)
	$(BIN)/python -c '$(NAMES_TRITON)' || $(PIP) install --quiet --quiet --no-deps --require-hashes -r $<
	@touch $@

$(VENV)/.docs: requirements/docs.txt $(VENV)/.tools
	$(PIP) install --quiet --quiet --no-deps --require-hashes -r $<
	@touch $@

$(VENV)/.wyfold: pyproject.toml $(VENV)/.tools $(VENV)/.kernels
	$(PIP) install --quiet --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# The override says that torch is nobody's requirement, which keeps it and what only it needs out of the file.
LOCK = $(BIN)/uv pip compile --universal --python-version 3.11 --generate-hashes --upgrade \
       --quiet --no-header --no-annotate --no-emit-index-url --no-emit-find-links
WITHOUT_TORCH = --override <(echo "torch ; python_version < '3'")

lock: $(VENV)/.tools
	$(LOCK) pyproject.toml --group dev --extra cli --extra bench --extra report $(WITHOUT_TORCH) --output-file requirements/dev.txt
	$(LOCK) --group kernels --output-file requirements/kernels.txt
	$(LOCK) --group docs --constraint requirements/dev.txt --output-file requirements/docs.txt
