# What CI runs, line for line. Each target works alone on a fresh clone.
#   make install | check | test | serve | format
# GRAPH=hybrid          which graph `make serve` runs: colocated (the default), disaggregated or hybrid
# PYTHON=python3.12     which Python makes the environment (3.10, 3.11 or 3.12)
# TORCH_INDEX_URL=...   a package index that carries torch's CPU builds, for machines without a GPU
# ARGS="..."            more arguments for test and serve: make test ARGS="-k budget -x"

PYTHON ?= python3
VENV ?= .venv
GRAPH ?= colocated
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TORCH := $(shell sed -n 's/^ *"\(torch==[^"]*\)".*/\1/p' pyproject.toml)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

.PHONY: install check test serve format

install: $(STAMP)

$(STAMP): pyproject.toml Makefile
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 10) <= sys.version_info < (3, 13) \
	    else f"Python {sys.version.split()[0]} is not supported: make install PYTHON=python3.12 (or 3.10, 3.11)")'
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@$(torch_without_cuda)
	$(BIN)/pip install --quiet --editable '.[dev]'
	@touch $@

# Where there is no NVIDIA GPU, torch's CPU build (0.2 GB) instead of the default one (3 GB of CUDA
# libraries), if a configured index or --find-links offers it: it is the same version with the local
# label +cpu, which pyproject.toml's pin accepts. An index without it says so within a second.
define torch_without_cuda
if ls /dev/nvidia[0-9]* >/dev/null 2>&1 || nvidia-smi -L >/dev/null 2>&1; then exit 0; fi; \
if [ -n '$(TORCH_INDEX_URL)' ]; then \
    $(BIN)/pip install --quiet --retries 1 --extra-index-url '$(TORCH_INDEX_URL)' '$(TORCH)+cpu'; \
elif ! $(BIN)/pip install --quiet '$(TORCH)+cpu' >$(VENV)/torch.log 2>&1; then \
    echo 'No CPU build of $(TORCH) found ($(VENV)/torch.log): installing the default build, with its CUDA libraries.'; \
    echo 'TORCH_INDEX_URL=<an index of CPU builds> make install avoids that.'; \
fi
endef

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Two processes: one for the tests with graphs, which wait a lot and run one at a time, one for all others.
test: install
	$(BIN)/pytest --numprocesses=2 --dist=loadgroup $(ARGS)

serve: install
	$(BIN)/sangam serve $(GRAPH) $(ARGS)
