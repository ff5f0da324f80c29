# Thin lines over ordinary tools; README.md lists the commands underneath.
SHELL := /bin/bash -eo pipefail
PYTHON ?= python3
BIN := .venv/bin
HTML := _build/html
export OMP_NUM_THREADS ?= 1

# For pip, as in PIP_ARGS="--index-url URL"
PIP_ARGS ?=
# What the tests of the helpers need
HELPERS := ^(hypothesis|nbformat|nbval|pytest|ruff)=

PYTEST := -m pytest -n logical --maxprocesses 4 --dist loadscope -rs
# Rounding under these settings differs from that of the machine's own kernels
FOREIGN := MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
KERNELS := "OMP_NUM_THREADS=1" "$(FOREIGN)" \
  "MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2" \
  "MKL_ENABLE_INSTRUCTIONS=SSE4_2 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41"

.PHONY: book test test-kernels test-helpers run bench peers export size pdf dist serve clean

book: .venv/book  ## build the HTML from the committed outputs
	$(BIN)/jupyter-book build . -W -n --keep-going || { rm -rf _build/.doctrees; exit 1; }

test: .venv/stamp  ## everything that CI checks
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m tools.export --check
	$(BIN)/python -m tools.notebooks check
	$(BIN)/python $(PYTEST) --durations=10
	$(FOREIGN) $(BIN)/python $(PYTEST) chapters/07-*.ipynb chapters/11-*.ipynb

test-kernels: .venv/stamp  ## name each cell that other math kernels change: an hour
	@failed=0; for kernels in $(KERNELS); do echo "$$kernels"; \
	  env $$kernels $(BIN)/python $(PYTEST) -q chapters | sed -n 's/^\(FAILED\|ERROR\)/  &/p'; \
	  [ $${PIPESTATUS[0]} = 0 ] || failed=1; done; exit $$failed

# make run CHAPTER=04 SEEDS=0,1 runs one chapter with a parameter of its own
run: .venv/stamp  ## execute the chapters and refresh the committed outputs
	$(BIN)/python -m tools.notebooks run --chapter "$(CHAPTER)" \
	  $(foreach name,DEVICE SEEDS STEPS,$(if $($(name)),-p $(name) "$($(name))"))

# make bench TOPIC=packing measures one topic, DEVICE=cuda the larger set of a GPU host
bench: .venv/stamp  ## measure the helpers beside their peers, for the page of results
	$(BIN)/python -m benchmarks $(TOPIC) $(if $(DEVICE),--device $(DEVICE))

export: .venv/stamp  ## write agentrl/ from the chapters
	$(BIN)/python -m tools.export

size: .venv/stamp  ## count lines, public names and long cells beside their targets
	$(BIN)/python -m tools.size

pdf: book  ## print the book to _build/agentrl.pdf
	$(BIN)/python -m tools.pdf

dist: .venv/stamp  ## build sdist and wheel
	rm -rf dist build *.egg-info
	$(BIN)/python -c 'import setuptools.build_meta as b; b.build_sdist("dist"); b.build_wheel("dist")'
	rm -rf build *.egg-info

# make test-helpers PYTHON=python3.12 VERSIONS="torch==2.14.1" leaves .venv alone
test-helpers: ENV := $(shell mktemp -du /tmp/agentrl-XXXX)
test-helpers:  ## test the package with other versions than the pinned ones
	$(PYTHON) -m venv $(ENV)
	$(ENV)/bin/pip install $(VERSIONS) . transformers $$(grep -E '$(HELPERS)' requirements.txt)
	$(ENV)/bin/python -m pytest -o addopts= tests/package
	rm -r $(ENV)

serve: book  ## show the book at http://localhost:8000
	$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory $(HTML)

clean:  ## remove what was built, the environment too
	rm -rf _build .venv build dist *.egg-info

peers: .venv/peers  ## install the trainers that chapter 11 audits

NO_PIP := pip did not finish. Is there a network? What was installed is kept: start make again.

.venv/book: requirements-book.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or later is needed, by its name: make book PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { [ ! -e .venv ] || echo ".venv is half-made, broken or too old: it is made again"; \
	  $(PYTHON) -m venv --clear .venv; } || \
	  { echo "$(PYTHON) makes no environment: install its venv module (python3-venv)"; exit 1; }
	$(BIN)/pip install -r requirements-book.txt || { echo "$(NO_PIP)"; exit 1; }
	touch $@

# A torch that is there and in the range of pyproject.toml is kept.
.venv/stamp: .venv/book requirements.txt pyproject.toml
	@$(BIN)/python -c 'import tomllib; from importlib.metadata import version; \
	  from packaging.requirements import Requirement as R; \
	  torch = R(tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"][0]); \
	  assert version("torch") in torch.specifier' 2>/dev/null || { \
	  echo "PyTorch comes next. On Linux pip takes the CUDA build: 2.7 GB to download, 5 GB on disk."; \
	  echo "The CPU build takes 0.2 and 0.7 GB. To have it, stop here (Ctrl-C) and start make with"; \
	  echo 'PIP_ARGS="--index-url URL", the URL that pytorch.org/get-started/locally shows for CPU.'; \
	  $(BIN)/pip install $(PIP_ARGS) $$(grep '^torch==' requirements.txt) || \
	  { echo "$(NO_PIP)"; exit 1; }; }
	$(BIN)/pip install -r requirements-book.txt \
	  $$(sed -n '/^torch==/d; s/^\([a-z][^ ]*==[^ ]*\).*/\1/p' requirements.txt) || \
	  { echo "$(NO_PIP)"; exit 1; }
	$(BIN)/pip install --no-build-isolation --no-deps -e .
	touch $@

.venv/peers: .venv/stamp requirements-peers.txt
	$(BIN)/pip install --no-deps -r requirements-peers.txt || { echo "$(NO_PIP)"; exit 1; }
	touch $@
