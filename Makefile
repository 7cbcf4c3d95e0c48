PYTHON ?= $(shell test -x .venv/bin/python && echo .venv/bin/python || echo python3)
PACKAGES = core files http jinja jobs kit offline peers plugins stops tiles tokenizer tests benchmarks examples docs hatch_build.py

# The first that runs: pyenv's python3.12 on the PATH only names the versions that there are, where none of them is the current one.
PYTHON312 ?= $(firstword $(foreach python,python3.12 $(wildcard $(HOME)/.pyenv/versions/3.12*/bin/python3.12),$(shell $(python) -c 'import venv' 2>/dev/null && echo $(python))))
GPU_SUITES = tests/core/test_devices.py tests/core/test_gpu_script.py $(wildcard tests/core/test_pretended*.py) \
	tests/plugins/attention/test_flashinfer.py tests/plugins/quant/test_fp8_scaled.py
COMPILE_AHEAD = $(shell grep -l machine_code -r tests/plugins --include='test_*.py')

.PHONY: check lint types imports test sweep mutations matrix faults soak attack clients flashinfer gpu-environment gpu-modules gpu-bundle examples audit docs site format

check:  ## everything CI runs, but for most of the sweep; ends with what failed in at most 40 lines
	@$(PYTHON) -m tests.helpers.steps --quiet lint types imports test examples

lint:
	$(PYTHON) -m ruff format --check $(PACKAGES)
	$(PYTHON) -m ruff check $(PACKAGES)

types:
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

imports:
	$(PYTHON) -c "from importlinter.cli import lint_imports_command as main; main()"

test:
	$(PYTHON) -m pytest

sweep:  ## what repeats the gate over more parameters; CHANGED=REV: what the change touches, and today's share; SWEEP: words
	$(PYTHON) -m tests.helpers.sweep $(if $(CHANGED),--changed $(CHANGED)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SLOWER),--slower $(SLOWER)) $(if $(SEED),--seed $(SEED)) -- $(SWEEP)

mutations:  ## changes of the sources that the tests must notice (tests/mutations.toml); MUTATIONS holds further words
	$(PYTHON) -m tests.helpers.mutations $(MUTATIONS)

matrix:  ## every combination served on the pretended device, of which the sweep has those where each three meet
	WHOLE_MATRIX=1 $(PYTHON) -m pytest -m sweep tests/core/test_pretended_matrix.py --dist load

faults:  ## every check of a running server, those too that only the sweep has
	$(PYTHON) -m pytest -m "not clients" tests/faults tests/e2e/test_server.py

soak:  ## half an hour of mixed load with a fault each minute, and half an hour with a death of another process each minute
	$(PYTHON) -m tests.faults.soak --minutes 30 --report soak.md
	$(PYTHON) -m tests.faults.soak.deaths --seconds 1800 --every 60

attack:  ## 8,000 random combinations of valid values at every route: no 5xx, and most are served
	$(PYTHON) -m tests.helpers.attack --requests 8000

clients:  ## real client libraries, each in an environment of its own; needs the network
	$(PYTHON) -m pytest -m clients -n 0 tests/clients

build/flashinfer: tests/helpers/cudart/requirements.txt
	$(PYTHON) -m pip install --quiet --upgrade --no-deps --target build/flashinfer -r tests/helpers/cudart/requirements.txt
	touch build/flashinfer

flashinfer: build/flashinfer  ## the package's own planner on a CUDA runtime without a device; needs nvcc and the network, 20 minutes at first
	PYTHONPATH=build/flashinfer $(PYTHON) -m pytest -m flashinfer -n 0 tests/plugins/attention/test_flashinfer_planner.py

gpu-environment:  ## the suites of the pretended device in the versions of a GPU machine; needs python3.12 and the network, 5 GB
	@"$(PYTHON312)" -c 'import sys, venv; sys.exit(sys.version_info[:2] != (3, 12))' || { echo "no Python 3.12 runs here: install it, or name it: make gpu-environment PYTHON312=/path/to/python3.12" >&2; exit 1; }
	test -x build/gpu-environment/bin/python || "$(PYTHON312)" -m venv build/gpu-environment
	build/gpu-environment/bin/python -m pip install --quiet -r benchmarks/gpu/requirements.txt -e .
	build/gpu-environment/bin/python -m pytest -n 0 $(GPU_SUITES)
	build/gpu-environment/bin/python -m pytest -n 0 -m "sweep or not sweep" -k machine_code $(COMPILE_AHEAD)

gpu-modules: build/flashinfer  ## FlashInfer's modules that the checks of benchmarks.gpu use; needs nvcc, an hour on two cores at first
	PYTHONPATH=build/flashinfer $(PYTHON) -m benchmarks.gpu.modules

gpu-bundle: gpu-modules  ## what travels to a machine with a GPU: .whl, .fi and .ref, and how large it is; needs the network
	$(PYTHON) -m benchmarks.gpu.bundle

examples:  ## a newcomer's first hour and the packages of examples/plugins, installed beside fwk; needs pip
	$(PYTHON) -m pytest -n 0 -m sweep tests/e2e/test_examples.py -k "not every_family"

audit:  ## known holes in what is installed, slow patterns in our own sources; needs the extra [audit] and the network
	$(PYTHON) -m pip_audit --skip-editable
	$(PYTHON) -m tests.helpers.slow_patterns $$(find core files http jinja jobs offline peers plugins stops tiles tokenizer -name '*.py')

docs:
	$(PYTHON) -m fwk arguments > docs/arguments.md
	$(PYTHON) -m fwk_kit.cli.family_pages docs/plugins
	$(PYTHON) -m fwk arguments --peers > docs/migrating.md
	$(PYTHON) -m fwk limits > docs/limits.md
	$(PYTHON) -m benchmarks.performance

site:  ## the documentation as a site in build/site; needs the extra [docs], and no network
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet
	$(PYTHON) -m docs.site_requests build/site

format:
	$(PYTHON) -m ruff check --fix-only $(PACKAGES)
	$(PYTHON) -m ruff format $(PACKAGES)
