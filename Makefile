# Every target prepares what it needs in .venv first; when nothing changed since, that costs nothing.
#
#   make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
#
# takes PyTorch's small CPU build on a Linux machine without an NVIDIA GPU (the default there is the CUDA build, several GB).
# Only PyTorch comes from that index. Everything else is installed as requirements/ pins it, with hashes: what Penstock needs for
# setup, serve, run and bench, and on top of it the tools of developers for the other targets.

PYTHON       ?= python3
PROMPT       ?= What is the capital of France?
PYTEST_ARGS  ?= --forks 5
SLOW_ARGS    ?= --forks 3
SOAK_ARGS    ?=
FUZZ_MINUTES ?= 60
LOCK_ARGS    ?=
BENCH_ARGS   ?=
SERVE_ARGS   ?=
TORCH_INDEX  ?=

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TOOLS  := $(VENV)/.tools
TRITON := $(VENV)/.triton
READY  := $(VENV)/.kernels
SUPPLY := .supply
DOCS   := .docs
NATIVE := $(wildcard src/penstock/kernels/build.py $(addprefix src/penstock/kernels/native/*.,cpp h inl))
# Twice quiet: errors are shown, warnings about mirrors and the like are not.
PIP    := -m pip install --quiet --quiet --disable-pip-version-check
PINNED := $(PIP) --require-hashes --only-binary :all: --no-deps --requirement
TORCH  := $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) --requirement requirements/torch.txt
# PyTorch's CUDA packages for arm64 have tags that pip takes for another platform's; nothing is missing then.
CHECK  := $(BIN)/python -m pip check --disable-pip-version-check >$(VENV)/pip-check.txt || \
          ! grep -v 'is not supported on this platform' $(VENV)/pip-check.txt
NO_GPU := No NVIDIA GPU was found. This saves gigabytes: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
LOCK   := $(SUPPLY)/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-package torch \
          --custom-compile-command 'make lock' $(LOCK_ARGS)

# The prompt travels by environment and unexpanded, so that quotes, $ and new lines in it reach the model as they are.
unexport PROMPT
export PENSTOCK_PROMPT := $(value PROMPT)

.DEFAULT_GOAL := help
.PHONY: help setup serve run test test-slow soak fuzz lint style types quick format docs docs-serve lock audit \
        bench bench-compare bench-serving bench-network bench-workspace bench-attacks clean

help: ## Show this list
	@echo "Penstock: one language model running across the machines you already have"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo '  make serve SERVE_ARGS="--port 8080"'
	@echo '  make run PROMPT="Why is the sky blue?"'
	@echo '  make test PYTEST_ARGS="-k cli -x"'

setup: $(READY) ## Install Penstock into .venv
	@echo "Penstock is ready: $(BIN)/penstock --help"

serve: $(READY) ## Serve the default model to every OpenAI client, until Ctrl-C
	@exec $(BIN)/penstock serve $(SERVE_ARGS)

run: $(READY) ## Answer PROMPT with the default model (downloaded on first use)
	@$(BIN)/penstock run -- "$$PENSTOCK_PROMPT"

test: style $(READY) ## Check style and types, and run the quick tests (some six minutes)
	@$(MAKE) --no-print-directory --jobs 2 types quick

test-slow: $(TOOLS) $(TRITON) $(READY) ## Run the tests that are slow by nature: real servers that die, other clients' own tests
	$(BIN)/python -m pytest -m slow $(SLOW_ARGS)

soak: $(TOOLS) $(READY) ## Kill and freeze nodes and servers, cut the power of a disk, search long (almost an hour)
	$(BIN)/python -m pytest tests/soak -s $(SOAK_ARGS)
	$(BIN)/python -m pytest -m hypothesis --hypothesis-profile long --timeout 3600 $(PYTEST_ARGS)

fuzz: $(TOOLS) $(READY) ## Feed random and damaged input to everything that reads what others send, for FUZZ_MINUTES
	@nice -n 10 $(BIN)/python -m tests.fuzz --minutes $(FUZZ_MINUTES)

lint: style types ## Check style and types

style: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TOOLS)
	$(BIN)/mypy

quick: $(TOOLS) $(READY)
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

format: $(TOOLS) ## Rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DOCS)/.installed ## Make the site of the documents, in site/
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --quiet --strict
	@echo "The site is ready: site/index.html"

docs-serve: $(DOCS)/.installed ## Show the site on http://127.0.0.1:8005 and follow changes, until Ctrl-C
	@NO_MKDOCS_2_WARNING=1 exec $(DOCS)/bin/mkdocs serve --strict --dev-addr 127.0.0.1:8005

lock: $(SUPPLY)/.installed ## Pin all dependencies with hashes, and write the SBOM (newer versions: LOCK_ARGS=--upgrade)
	$(LOCK) --constraint requirements/torch.txt --extra dev --output-file requirements/dev.txt pyproject.toml
	$(LOCK) --constraint requirements/torch.txt --constraint requirements/dev.txt --output-file requirements/runtime.txt pyproject.toml
	$(LOCK) --constraint requirements/dev.txt --group build --output-file requirements/build.txt
	$(LOCK) --group installer --output-file requirements/pip.txt
	$(LOCK) --group supply --output-file requirements/supply.txt
	$(LOCK) --group docs --output-file requirements/docs.txt
	$(LOCK) --group triton --output-file requirements/triton.txt
	$(SUPPLY)/bin/python tools/sbom.py

audit: $(SUPPLY)/.installed ## Look up known holes of all pinned packages; fails where the database cannot be reached
	@$(SUPPLY)/bin/python tools/audit.py

bench: $(READY) ## Measure how fast this machine is
	@$(BIN)/penstock bench $(BENCH_ARGS)

bench-compare: $(TOOLS) $(READY) ## Compare with transformers and others, on a quiet machine (some ten minutes)
	@$(BIN)/python bench/compare.py $(BENCH_ARGS)

bench-serving: $(TOOLS) $(READY) ## Measure the server under load, on a quiet machine (some fifteen minutes)
	@$(BIN)/python bench/serving.py $(BENCH_ARGS)

bench-network: $(TOOLS) $(READY) ## Measure pipes over several nodes, on a quiet machine (some ten minutes)
	@$(BIN)/python bench/network.py $(BENCH_ARGS)

bench-workspace: $(TOOLS) $(READY) ## Measure durable jobs on this disk, on a quiet machine (some ten minutes)
	@$(BIN)/python bench/workspace.py $(BENCH_ARGS)

bench-attacks: $(TOOLS) $(READY) ## Measure what clients feel of attacks by others, on a quiet machine (some ten minutes)
	@$(BIN)/python bench/attacks.py $(BENCH_ARGS)

clean: ## Remove .venv and all caches (not the downloaded models)
	rm -rf $(VENV) $(SUPPLY) $(DOCS) site build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml requirements/pip.txt requirements/build.txt requirements/runtime.txt requirements/torch.txt
	@command -v $(PYTHON) >/dev/null || \
	  { echo "Penstock needs Python 3.11 or newer, and '$(PYTHON)' was not found. Choose one with: make setup PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Penstock needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1). Choose another with: make setup PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -c 'import pip' 2>/dev/null || \
	  { echo "Creating the environment $(VENV) with $$($(PYTHON) -V) ..."; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing what Penstock needs (this takes a minute or two) ..."
	@$(BIN)/python $(PINNED) requirements/pip.txt
	@$(BIN)/python $(PINNED) requirements/runtime.txt --requirement requirements/build.txt
	@echo "Installing PyTorch (a large download the first time) ..."
	@$(if $(TORCH_INDEX),:,[ "$$(uname)" != Linux ] || [ -e /proc/driver/nvidia/version ] || echo "$(NO_GPU)")
	@$(BIN)/python $(TORCH)
	@$(BIN)/python $(PIP) --no-deps --no-build-isolation --editable .
	@$(CHECK)
	@touch $@

# The installation has compiled the kernels; this does it again when only their sources changed. Without a compiler, PyTorch runs.
$(READY): $(STAMP) $(NATIVE)
	@$(BIN)/python src/penstock/kernels/build.py >/dev/null || echo "The native kernels are not compiled; PyTorch runs instead."
	@touch $@

$(TOOLS): $(STAMP) requirements/dev.txt
	@echo "Installing what tests and checks need ..."
	@$(BIN)/python $(PINNED) requirements/dev.txt
	@$(CHECK)
	@touch $@

$(TRITON): $(STAMP) requirements/triton.txt
	@echo "Installing Triton, whose interpreter runs the kernels of GPUs ..."
	@$(BIN)/python $(PINNED) requirements/triton.txt
	@$(CHECK)
	@touch $@

$(SUPPLY)/.installed: requirements/pip.txt requirements/supply.txt
	@$(PYTHON) -m venv --clear $(SUPPLY)
	@$(SUPPLY)/bin/python $(PINNED) requirements/pip.txt
	@$(SUPPLY)/bin/python $(PINNED) requirements/supply.txt
	@touch $@

$(DOCS)/.installed: requirements/pip.txt requirements/docs.txt
	@$(PYTHON) -m venv --clear $(DOCS)
	@$(DOCS)/bin/python $(PINNED) requirements/pip.txt
	@$(DOCS)/bin/python $(PINNED) requirements/docs.txt
	@touch $@
