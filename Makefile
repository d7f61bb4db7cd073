# The whole developer interface. Every target sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: demo test lint types unit bench fuzz clean

demo: $(STAMP)  ## Play a recorded vLLM run over real sockets, with losses and a restart, and tail it live
	$(BIN)/python examples/demo.py

test: lint types unit  ## Everything that CI checks

unit: $(STAMP)
	$(BIN)/python -m pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy
	$(BIN)/pyright

bench: $(STAMP)  ## Ratios against the engines' released classes, loaded from their wheels (downloads about 365 MB once)
	$(BIN)/python -m benchmarks

fuzz: $(STAMP)  ## The property tests with many more, and new, examples
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest --timeout 3600 \
	  tests/test_decode.py tests/test_encode.py tests/test_shape.py tests/test_stream_model.py

$(STAMP): pyproject.toml tools/setup
	PYTHON=$(PYTHON) tools/setup
	touch $(STAMP)

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
