# make run      the demo: stack, data, two runs, preemption, evaluation, promotion
# make check    lint, types, the tests that need no server: for every edit
# make test     every test, the cheapest lane first; ARGS="--lane servers -k lease" for some of them
# make lint     ruff, mypy --strict, import-linter
# make up       the stack           make fuzz   new random examples, ROUNDS times
# make site     the documentation with a search, into build/site
# All of it works in .venv, which is made from requirements.lock with plain pip.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
# Each stamp says that .venv was made from the files it depends on: what users need, and what the tests need besides.
INSTALLED := .venv/.installed
TESTABLE := .venv/.testable
INFERENCE := .venv/.inference
VISION := .venv/.vision
SITE := .venv/.site
TEST_LOCKS := requirements.lock requirements-deepspeed.lock requirements-integrations.lock requirements-browser.lock

.PHONY: run check test fuzz lint install testable inference vision site deepspeed integrations browser lock up clean help
.DEFAULT_GOAL := help

help:
	@sed -n '1,/^$$/s/^# //p' Makefile

run: $(INSTALLED)
	@$(BIN)/trainbus demo

up: $(INSTALLED)
	@$(BIN)/trainbus up

# WITH="chromium postgres": also the tests that need these programs of the system (tests/conftest.py lists them).
test: $(TESTABLE)
	@$(BIN)/python -m tests.suite $(WITH:%=--with %) $(ARGS)

check: $(TESTABLE) lint
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

# SITE_REPOSITORY=URL: where the site's links to files of the repository lead; without it they are paths.
site: $(INSTALLED) $(SITE)
	rm -rf build/site
	@$(BIN)/python -m docs.site.assemble build/site-source --repository "$(SITE_REPOSITORY)"
	.venv/site/bin/zensical build --strict --clean -f build/zensical.toml

install: $(INSTALLED)
testable: $(TESTABLE)
inference: $(INFERENCE)
vision: $(VISION)
# One environment has every extra.
deepspeed integrations browser: testable

define require-python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "trainbus needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
endef

$(INSTALLED): requirements.lock pyproject.toml
	$(require-python)
	$(PYTHON) .ci/environment.py requirements.lock
	@touch $@

# With Chromium for the page: `apt-get install chromium`, or `.venv/bin/playwright install chromium`.
$(TESTABLE): $(TEST_LOCKS) pyproject.toml
	$(require-python)
	$(PYTHON) .ci/environment.py $(TEST_LOCKS)
	@touch $@ $(INSTALLED)

# Its client needs another version of a package that trainbus has.
$(INFERENCE): $(TESTABLE) requirements-inference.lock
	$(PYTHON) -m venv .venv/inference
	.venv/inference/bin/python -m pip --disable-pip-version-check install --quiet -r requirements-inference.lock
	@touch $@

# The generator of the site shares no package with what it describes.
$(SITE): $(INSTALLED) requirements-site.lock
	$(PYTHON) -m venv --clear .venv/site
	.venv/site/bin/python -m pip --disable-pip-version-check install --quiet -r requirements-site.lock
	@touch $@

# In a folder of its own: other libraries import torchvision where they find it, and its wheel needs torch for GPUs.
$(VISION): $(TESTABLE) requirements-vision.lock
	rm -rf .venv/vision
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target .venv/vision \
		-r requirements-vision.lock
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
	build/lock/bin/python -m pip install --quiet -e .[vision]
	build/lock/bin/python .ci/lock.py
	$(PYTHON) -m venv build/lock/inference
	build/lock/inference/bin/python -m pip install --quiet kserve "tritonclient[http]"
	{ head -n 2 requirements-inference.lock; build/lock/inference/bin/python -m pip freeze; } > build/inference.lock
	mv build/inference.lock requirements-inference.lock
	$(PYTHON) -m venv build/lock/site
	build/lock/site/bin/python -m pip install --quiet zensical
	{ head -n 2 requirements-site.lock; build/lock/site/bin/python -m pip freeze; } > build/site.lock
	mv build/site.lock requirements-site.lock
	rm -rf build/lock

# The environment and the data in .trainbus stay; `rm -rf .venv` makes the next step install anew.
clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
