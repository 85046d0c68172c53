# Two commands are all a newcomer needs: `make demo` and `make test`. Each sets up what it needs.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Files of tests at a time: more than there are cores, where many tests wait for processes to start and to end.
FAST := -n 3 --dist loadfile
SLOW := -n 2 --dist loadfile

.PHONY: demo test test-all mutants lint format clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $(READY)

demo: $(READY)  ## train a small language model on this machine, 4 ranks, ZeRO-3, in about two minutes
	$(BIN)/python examples/demo.py

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint  ## everything that gates a change: at most 9 minutes on 2 cores
	$(BIN)/python -m pytest $(FAST)

test-all: $(READY)  ## whole matrices and soaks: at most 35 minutes on 2 cores
	$(BIN)/python -m pytest $(SLOW) -m slow

mutants: $(READY)  ## plant bugs one by one and say which the tests do not see: at most 2 hours, resumable
	$(BIN)/python -m tests.mutants

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
