PYTHON ?= $(shell test -x .venv/bin/python && echo .venv/bin/python || echo python3)
PACKAGES = core plugins tests benchmarks

.PHONY: check lint types imports test slow docs format

check: lint types imports test  ## everything CI runs

lint:
	$(PYTHON) -m ruff format --check $(PACKAGES)
	$(PYTHON) -m ruff check $(PACKAGES)

types:
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

imports:
	$(PYTHON) -c "from importlinter.cli import lint_imports_command as main; main()"

test:
	$(PYTHON) -m pytest

slow:
	$(PYTHON) -m pytest -m slow

docs:
	$(PYTHON) -m fwk arguments > docs/arguments.md

format:
	$(PYTHON) -m ruff check --fix-only $(PACKAGES)
	$(PYTHON) -m ruff format $(PACKAGES)
