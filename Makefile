# Targets: demo test lint bench torture gpu-bundle gpu-check clean.  `make demo` on a fresh machine sets everything up.

PYTHON ?= $(shell scripts/find-python)
VENV ?= .venv
# Only the demo and the tests use torch. `make TORCH=` leaves it out.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
BIN := $(VENV)/bin

.PHONY: demo test lint bench torture gpu-bundle gpu-check clean

demo: $(VENV)/ready
	$(BIN)/jupyter gpu-ckpt demo

test: lint $(VENV)/ready
	$(BIN)/python -m pytest -m "not torture" $(PYTEST_ARGS)

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/ready
	$(BIN)/python scripts/bench

torture: $(VENV)/ready
	$(BIN)/python -m pytest -m torture $(PYTEST_ARGS)

gpu-bundle: $(VENV)/ready
	PYTHON=$(abspath $(BIN)/python) scripts/gpu-bundle

gpu-check:
	scripts/gpu-check

$(VENV)/ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test,lint]' $(TORCH)
	$(BIN)/jupyter gpu-ckpt install-criu
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info gpu-bundle .pytest_cache .mypy_cache .ruff_cache
