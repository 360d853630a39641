# One command each: demo, test, lint, bench, docs. Everything happens in a virtual environment of its own (.venv).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint bench docs clean

demo: $(STAMP)
	$(BIN)/asyncfed run quickstart --pictures --report

test: $(STAMP)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m benchmarks

docs: $(VENV)/.docs  # not --quiet, which would hide broken links from --strict
	$(BIN)/mkdocs build --strict

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	touch $@

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs site
