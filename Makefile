# Thin lines over ordinary tools; README.md lists the commands underneath.
SHELL := /bin/bash -eo pipefail
PYTHON ?= python3
BIN := .venv/bin
HTML := _build/html
export OMP_NUM_THREADS ?= 1

.PHONY: book test run export serve clean

book: .venv/stamp  ## build the HTML from the committed outputs
	$(BIN)/jupyter-book build . -W -n --keep-going

test: .venv/stamp  ## everything that CI checks
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/python -m tools.export --check
	$(BIN)/python -m tools.notebooks check
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadscope

# make run CHAPTER=05 SEEDS=0,1 runs one chapter with a parameter of its own
run: .venv/stamp  ## execute the chapters and refresh the committed outputs
	$(BIN)/python -m tools.notebooks run --chapter "$(CHAPTER)" \
	  $(foreach name,DEVICE SEEDS STEPS,$(if $($(name)),-p $(name) "$($(name))"))

export: .venv/stamp  ## write agentrl/ from the chapters
	$(BIN)/python -m tools.export

serve: book  ## show the book at http://localhost:8000
	$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory $(HTML)

clean:  ## remove what was built, the environment too
	rm -rf _build .venv

.venv/stamp: requirements.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -r requirements.txt
	$(BIN)/pip install --no-build-isolation --no-deps -e .
	touch $@
