# make run      the demo: stack, data, two runs, preemption, evaluation, promotion
# make check    lint, types, the tests that need no server: for every edit
# make test     every test, the cheapest lane first; ARGS="--lane servers -k lease" for some of them
# make lint     ruff, mypy --strict, import-linter
# make up       the stack           make fuzz   new random examples, ROUNDS times
# All of it works in .venv, which is made from requirements.lock with plain pip.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Each stamp says that a step was done with the files it depends on.
INSTALLED := .venv/.installed
DEEPSPEED := .venv/.deepspeed
INTEGRATIONS := .venv/.integrations
BROWSER := .venv/.browser

.PHONY: run check test fuzz lint install deepspeed integrations browser lock up clean help
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# //p' Makefile

run: $(INSTALLED)
	@$(BIN)/trainbus demo

up: $(INSTALLED)
	@$(BIN)/trainbus up

test: $(INSTALLED) $(DEEPSPEED) $(INTEGRATIONS) $(BROWSER)
	@$(BIN)/python -m tests.suite $(ARGS)

check: lint $(DEEPSPEED) $(INTEGRATIONS) $(BROWSER)
	@$(BIN)/python -m tests.suite --lane cores $(ARGS)

# `make test` draws the same examples each time, so that it tells of the change and not of the draw.
ROUNDS ?= 10
fuzz: $(INSTALLED)
	for round in $$(seq $(ROUNDS)); do \
		$(BIN)/python -m pytest -q -m hypothesis --hypothesis-profile=new $(ARGS) || exit 1; done

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(INSTALLED)
deepspeed: $(DEEPSPEED)
integrations: $(INTEGRATIONS)
browser: $(BROWSER)

$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "trainbus needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet -r requirements.lock
	$(PIP) install --quiet --no-deps --no-build-isolation -e .
	@touch $@

# Its build looks for torch, and must not compile anything on a machine without a GPU.
$(DEEPSPEED): $(INSTALLED) requirements-deepspeed.lock
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) install --quiet --no-build-isolation -r requirements-deepspeed.lock
	@touch $@

$(INTEGRATIONS): $(INSTALLED) requirements-integrations.lock
	$(PIP) install --quiet -r requirements-integrations.lock
	@touch $@

# It drives a Chromium of the system: `apt-get install chromium`, or `.venv/bin/playwright install chromium`.
$(BROWSER): $(INSTALLED) requirements-browser.lock
	$(PIP) install --quiet -r requirements-browser.lock
	@touch $@

# The newest versions that pyproject.toml allows, in an environment of their own; then the lock files from them.
lock:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --upgrade setuptools wheel
	build/lock/bin/python -m pip install --quiet -e .[all,dev]
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu build/lock/bin/python -m pip install --quiet --no-build-isolation -e .[deepspeed]
	build/lock/bin/python -m pip install --quiet -e .[integrations]
	build/lock/bin/python -m pip install --quiet -e .[browser]
	build/lock/bin/python .ci/lock.py
	rm -rf build/lock

# The environment and the data in .trainbus stay; `rm -rf .venv` makes the next step install anew.
clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
