# Everything runs in .venv, which the first call of any target makes with the python3 at hand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup test test-all test-newest lint demo docs wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make setup   make $(VENV) and install the project with its development tools"
	@echo "make test    run the tests but for the slow ones, which say why they are;"
	@echo "             ARGS are given to pytest, as in ARGS='-x tests/report'"
	@echo "make test-all  run all of them"
	@echo "make test-newest  as make test, with the newest Python (to 3.13) and JAX that there are,"
	@echo "             in .venv-newest"
	@echo "make lint    check style, format and types"
	@echo "make demo    train on the embedded digits; print the results and where the report is"
	@echo "make docs    build the documents into site/; warnings are errors"
	@echo "make wheel   build and check the packages, and use the wheel from an empty folder"
	@echo "make clean   remove caches and built packages; $(VENV) and runs/ stay"
	@echo "PYTHON=python3.12 chooses the interpreter (3.11 to 3.13) that makes $(VENV)."

setup: $(STAMP)

# The stamp is what makes a second call do nothing, so that it works without a network too.
$(STAMP): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo "Python 3.11 to 3.13 is needed: make PYTHON=python3.11 setup" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@

# Compiled programs are kept in .cache/, so that a second call takes about half as long.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder -m "not slow" $(ARGS)

test-all: setup
	$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(ARGS)

test-newest: setup
	.ci/newest -n 2 --dist loadgroup --no-loadscope-reorder -m "not slow" $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy fedjax_pfl experiments

demo: setup
	$(BIN)/python -m experiments.pfedla

# The first call installs what builds them; later ones need no network.
docs: $(VENV)/.docs
	$(BIN)/sphinx-build -q -E -W --keep-going docs site
	@echo "site/index.html"

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[docs]'
	@touch $@

$(VENV)/.loggers: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[mlflow,wandb]'
	@touch $@

# The first call installs what builds and checks the packages.
wheel: $(VENV)/.release
	.ci/wheel

$(VENV)/.release: $(STAMP)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[release]'
	@touch $@

clean:
	rm -rf .venv-newest build dist site *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
