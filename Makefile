# Thin lines over ordinary tools; README.md lists the commands underneath.
SHELL := /bin/bash -eo pipefail
PYTHON ?= python3
BIN := .venv/bin
HTML := _build/html
export OMP_NUM_THREADS ?= 1

# What the tests of the helpers need
HELPERS := ^(hypothesis|nbformat|nbval|pytest|ruff)=

.PHONY: book test test-helpers run bench export size pdf dist serve clean

book: .venv/stamp  ## build the HTML from the committed outputs
	$(BIN)/jupyter-book build . -W -n --keep-going || { rm -rf _build/.doctrees; exit 1; }

test: .venv/stamp  ## everything that CI checks
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m tools.export --check
	$(BIN)/python -m tools.notebooks check
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadscope

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

.venv/stamp: requirements.txt pyproject.toml
	test -x $(BIN)/pip || $(PYTHON) -m venv .venv
	$(BIN)/pip install -r requirements.txt
	$(BIN)/pip install --no-build-isolation --no-deps -e . verl==0.9.1
	touch $@
