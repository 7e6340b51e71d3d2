# The project's commands. `make` alone lists them. PYTHON picks the interpreter (3.11 or 3.12); everything is installed into .venv only.

PYTHON  ?= python3
VENV    ?= .venv
PLAN    ?=
CATALOG ?= farm-catalog
PIP     := $(VENV)/bin/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt

.PHONY: help sweep test soak lint clean
help:
	@echo "make sweep   install, then write, judge and time kernels for the default plan on this machine (PLAN=file CATALOG=folder)"
	@echo "make test    install, then run the whole test suite"
	@echo "make soak    the long trials: hundreds of kills, many seeds"
	@echo "make lint    ruff and mypy"
	@echo "make clean   remove .venv and build leftovers; the catalog stays"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] <= (3, 12) else "Python 3.11 or 3.12 is needed, found %d.%d: make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)

# A stamp is newer than what it was installed from; a second `make` installs nothing.
$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[sql]'
	@touch $@

$(VENV)/.installed-test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(INSTALL) --editable '.[test]'
	@touch $@ $(VENV)/.installed

sweep: $(VENV)/.installed
	$(VENV)/bin/farm sweep $(PLAN) --catalog $(CATALOG)

# Two workers, whatever the machine: more would disturb what is timed. Files stay whole, so that one session of Ray serves each,
# and slow ones come first.
JOBS    ?= 2

test: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

soak: $(VENV)/.installed-test
	$(VENV)/bin/python -m pytest -m soak

lint: $(VENV)/.installed-test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
