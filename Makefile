# Each target does all of its own set-up, in $(VENV), on a machine with Python 3.10 or newer.
#   make demo    two rows of pictures, made without and with raymod: raymod-demo.png
#   make test    the linters, then every test
#   make lint    ruff and mypy
#   make docs    the documentation, into site/
#   make clean   remove what the targets above made, $(VENV) too
#
# Another build of torch (any pip arguments; remembered in $(VENV)), or another Python:
#   make demo TORCH="torch==2.13.0 --index-url ..." PYTHON=/usr/bin/python3.11

VENV ?= .venv
PYTHON ?= $(firstword $(foreach p,$(PYTHONS),$(if $(shell $(call usable,$(p))),$(p))))
TORCH ?= $(or $(shell cat $(VENV)/.torch-spec 2>/dev/null),-r requirements/torch.txt)
PYTEST_ARGS ?=

PYTHONS := python3.12 python3.11 python3.10 python3
# Prints a word if $(1) is a Python that can make the virtual environment.
usable = '$(1)' -c 'import sys, venv, ensurepip; sys.version_info >= (3, 10) and print("yes")' 2>/dev/null

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet

.PHONY: demo test lint docs clean FORCE
.NOTPARALLEL:
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/raymod demo

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache raymod-demo.png
	find raymod tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamps: each is newer than what it was made from, so a second run installs nothing.

$(VENV)/.venv:
	@$(if $(shell $(call usable,$(PYTHON))),,echo "raymod needs Python 3.10 or newer with its venv \
	module (Debian: apt-get install python3-venv); looked for: $(or $(PYTHON),$(PYTHONS)). Name \
	one with: make PYTHON=/path/to/python3" >&2; exit 1)
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@touch $@

# Holds the arguments that torch was installed with, and changes only when they do.
$(VENV)/.torch-spec: $(VENV)/.venv FORCE
	@echo '$(TORCH)' | cmp -s - $@ || echo '$(TORCH)' >$@

$(VENV)/.torch: $(VENV)/.torch-spec requirements/torch.txt
	$(INSTALL) $(TORCH) -c requirements/demo.txt
	@touch $@

$(VENV)/.demo: $(VENV)/.torch requirements/demo.txt setup.cfg pyproject.toml
	$(INSTALL) -r requirements/demo.txt
	PYTHONWARNINGS=ignore $(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.demo requirements/dev.txt
	$(INSTALL) -r requirements/dev.txt -c requirements/demo.txt
	@touch $@

$(VENV)/.docs: $(VENV)/.demo requirements/docs.txt
	$(INSTALL) -r requirements/docs.txt -c requirements/demo.txt
	@touch $@
