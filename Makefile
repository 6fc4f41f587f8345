# make setup | test | test-newcomer | check | demo | bench | site | wheel; everything runs in .venv, which each target brings up to date first.
# `make bench WHAT=grammar` runs one group of benchmarks; `make test ARGS="tests/core -x"` runs some tests,
# `make test WORKERS=8` all of them in eight processes.

VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
FOR_DEMO := $(VENV)/.installed-for-demo
WHAT ?= workloads --quick --against bench/workloads/baseline.json
WORKERS ?= 3
ARGS ?=

.PHONY: setup test test-clients test-newcomer check demo bench site wheel

setup: $(INSTALLED)

# Interpreters are tried by running them: a version manager's shim may exist without its Python.
$(VENV)/bin/python:
	@for python in python3.11 python3.12 python3; do \
	  if $$python -c 'import ensurepip, sys; sys.exit(sys.version_info[:2] not in {(3, 11), (3, 12)})' 2>/dev/null; \
	  then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo 'GraftLM needs Python 3.11 or 3.12 with its venv module; none was found.' >&2; exit 1; fi; \
	echo "Creating $(VENV) with $$($$found --version)"; \
	$$found -m venv --clear $(VENV)

# -qq: warnings stay out (pip repeats one for each unused package location), errors stay in.
# pip would byte-compile on one core; what cannot be compiled (files for other Pythons) is no error there either.
PIP := GRAFTLM_OBJECT_CODE=none $(PYTHON) -m pip install -qq --disable-pip-version-check --no-compile
# The object code that a wheel built here has; then what else a first process would compute for this machine.
WARM := $(PYTHON) -m graftlm.kernels.cpu.compiled.ahead_of_time native --package graftlm.core.grammar.automata.jit \
  >/dev/null && { $(PYTHON) -m graftlm warm sprout >/dev/null 2>&1 || true; \
  $(PYTHON) -m compileall -qq -j 0 -x '/tests/' $(VENV)/lib || true; }

$(INSTALLED): pyproject.toml constraints-dev.txt tests/newest-langchain.txt
	@$(PYTHON) -c '' 2>/dev/null || { rm -rf $(VENV); $(MAKE) --no-print-directory $(PYTHON); }
	@echo 'Installing GraftLM and its development packages into $(VENV) (a few minutes the first time)'
	@$(PIP) -c constraints-dev.txt -e '.[dev]'
	@$(PIP) --upgrade --no-deps --target $(VENV)/newest -r tests/newest-langchain.txt
	@$(WARM)
	@$(PYTHON) -m compileall -qq -j 0 -x '/tests/' $(VENV)/newest || true
	@touch $@ $(FOR_DEMO)

# The demo needs a third of the development packages.
$(FOR_DEMO): pyproject.toml constraints-dev.txt
	@$(PYTHON) -c '' 2>/dev/null || { rm -rf $(VENV); $(MAKE) --no-print-directory $(PYTHON); }
	@echo 'Installing GraftLM and four frameworks into $(VENV) (two minutes the first time)'
	@$(PIP) -c constraints-dev.txt -e '.[demo]'
	@$(WARM)
	@touch $@

# A file stays in one process, which sets up its models once; in the order of their names, long ones do not come last.
# Tests start hundreds of processes: where the environment forbids it, Python would compile all sources in each of them.
test: setup
	@PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# The wheel in a fresh environment; `make test-newcomer ARGS=--reuse` takes the dependencies from .venv.
test-newcomer: setup
	@$(PYTHON) tests/newcomer.py $(ARGS)

# Clients of others in pinned versions, installed into .scratch/clients; ARGS=NAME runs one, ARGS=--newest takes the newest versions.
test-clients: setup
	@$(PYTHON) -m tests.clients.run $(ARGS)

check: setup
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m mypy
	@$(PYTHON) -m pytest tests/test_layers.py tests/test_packaging.py

demo: $(FOR_DEMO)
	@$(PYTHON) -m graftlm demo $(ARGS)

bench: setup
	@$(PYTHON) -m bench $(WHAT) $(ARGS)

# The pages of docs/ as a site in build/site; a broken link fails.
site: setup
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet

# A wheel to publish, in dist/: object code for all kinds of processors takes minutes.
wheel: setup
	@GRAFTLM_OBJECT_CODE=all $(PYTHON) -m build --no-isolation --outdir dist .
