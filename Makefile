# Run `make` to see what there is. Everything is installed into $(VENV), nothing outside it.

PYTHON ?= python3
VENV ?= .venv
PINS ?= constraints.txt
PYTEST_ARGS ?= --numprocesses=auto --dist=worksteal
MODEL ?= resnet50
REPORTS ?= reports
MINUTES ?= 60

BIN := $(VENV)/bin
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# One test process per core, each with one thread: OpenMP threads that wait for each other would starve. The tests that
# are about threads set their own number, and wait without spinning. Compiled tests are kept, whatever an image's environment
# says: to rewrite their asserts takes each process ten seconds.
TEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

# On a CPU with AVX-512, these run once more as on one without it and without bf16: tests of data types, of the choice of
# formats, and of our own kernels.
AVX2_TESTS := tests/ir/test_deferred.py tests/jit tests/models/test_fuzz.py tests/models/test_fuzz_quantized.py \
  tests/passes/test_dynamic_quantization.py tests/passes/test_rounded.py \
  $(filter-out %_inspection.py,$(wildcard tests/targets/test_*.py))

.PHONY: help
help: ## Show this help
	@awk 'BEGIN { FS = ":.*## " } /^[a-z][a-z-]*:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

##@ Setup: a stamp for the package and one per extra of pyproject.toml, renewed when that file or the pins change.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "fmtprop needs Python 3.10 or newer; this is $$($(PYTHON) -V). Try: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --constraint $(PINS) --editable .
	@touch $@

$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --constraint $(PINS) --editable '.[$*]'
	@touch $@

# Alone: what it declares to need would bring another build of torch.
$(VENV)/.pytorchcv: constraints.txt $(VENV)/.installed
	$(BIN)/python -m pip install --constraint $(PINS) --no-deps pytorchcv
	@touch $@

.PHONY: setup
setup: $(VENV)/.installed-dev ## Create .venv with the package and the developer tools

##@ Use

.PHONY: run
run: $(VENV)/.installed ## Compile ResNet-50, run it, check it against PyTorch, compare the policies
	@mkdir -p $(REPORTS)
	$(BIN)/fmtprop run $(MODEL) --policies plain,naive,propagate,optimal --report $(REPORTS)/$(MODEL).json

.PHONY: bench
bench: $(VENV)/.installed-bench ## Compare with torch, ONNX Runtime and OpenVINO on this machine
	@mkdir -p $(REPORTS)
	$(BIN)/fmtprop bench $(MODEL) --vs torch,onnxruntime,openvino --report $(REPORTS)/bench-$(MODEL).json

##@ Check

.PHONY: test
test: lint types contracts tests ## Everything that CI runs: lint, types, contracts, tests and doctests

.PHONY: lint
lint: $(VENV)/.installed-dev ## Style and formatting (ruff)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

.PHONY: format
format: $(VENV)/.installed-dev ## Repair what ruff can repair
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: types
types: $(VENV)/.installed-dev ## Types (mypy, strict)
	$(BIN)/mypy

.PHONY: contracts
contracts: $(VENV)/.installed-dev ## Which room may import which (import-linter)
	$(BIN)/lint-imports

.PHONY: tests
tests: $(VENV)/.installed-dev ## Tests and doctests
	$(TEST) $(PYTEST_ARGS)
	$(BIN)/python -c 'from fmtprop import dnnl; exit(dnnl.lib().isa != "avx2")' \
	  || ONEDNN_MAX_CPU_ISA=AVX2 $(TEST) $(PYTEST_ARGS) $(AVX2_TESTS)

.PHONY: slow
slow: $(VENV)/.installed-dev $(VENV)/.installed-models $(VENV)/.installed-bench ## The slow sweeps, with models and peers
	$(TEST) -m "slow or peers"

# MLServer asks for older versions of what Ray Serve needs, so it has an environment of its own.
.PHONY: servers
servers: ## Ray, Ray Serve, FastAPI, LitServe and MLServer with plans, in two environments of their own
	$(MAKE) setup VENV=$(VENV)-servers
	$(VENV)-servers/bin/python -m pip install 'ray[data,serve,train]>=2.40' fastapi uvicorn litserve
	$(MAKE) setup VENV=$(VENV)-mlserver
	$(VENV)-mlserver/bin/python -m pip install mlserver
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(VENV)-servers/bin/python -m pytest -m "peers or slow or not slow" \
	  tests/ray tests/serving tests/compiling/test_deploy.py tests/training/test_distributed.py
	OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(VENV)-mlserver/bin/python -m pytest -m peers tests/serving

.PHONY: sweep
sweep: $(VENV)/.pytorchcv $(VENV)/.installed-models ## Compile, compare and time many networks, on a quiet machine
	-$(BIN)/python -m benchmarks.sweep --minutes $(MINUTES)
	$(BIN)/python -m benchmarks.sweep --table $(REPORTS)/sweep-$$(git rev-parse --short HEAD)*.jsonl

# timm imports torchvision for functions that no network of the lists needs: both come without their dependencies.
$(VENV)/.suites: $(VENV)/.installed-models $(VENV)/.installed-bench
	$(BIN)/python -m pip install --constraint $(PINS) --no-deps timm 'torchvision<0.29'
	touch $@

.PHONY: suites
suites: $(VENV)/.suites ## PyTorch's three lists for CPUs: right or not, time over eager and Inductor; goes on where it ended
	-$(BIN)/python -m benchmarks.suites --mode inference training --dtype f32 bf16 --batch one list --threads 1 2 \
	  --results $(REPORTS)/suites.jsonl --minutes $(MINUTES)
	$(BIN)/python -m benchmarks.suites --table --results $(REPORTS)/suites.jsonl

.PHONY: onnx
onnx: $(VENV)/.pytorchcv $(VENV)/.installed-models $(VENV)/.installed-bench ## Compare ONNX files of many exporters with ONNX Runtime, in one run
	$(BIN)/python -m benchmarks.onnx_sources $(REPORTS)/onnx
	rm -f $(REPORTS)/onnx_files.jsonl
	$(BIN)/python -m benchmarks.onnx_files $(REPORTS)/onnx --results $(REPORTS)/onnx_files.jsonl
	$(BIN)/python -m benchmarks.onnx_files --table $(REPORTS)/onnx_files.jsonl

.PHONY: operators
operators: $(VENV)/.installed-dev $(VENV)/.installed-models ## All samples of PyTorch's operators; goes on where it ended
	$(BIN)/python -m tests.models.op_db --results $(REPORTS)/operators.jsonl --minutes $(MINUTES)

.PHONY: newest
newest: ## The tests with the newest versions that there are, which users install, in a second environment
	rm -f $(VENV)-newest/.installed*
	PIP_UPGRADE=1 PIP_UPGRADE_STRATEGY=eager $(MAKE) tests VENV=$(VENV)-newest PINS=/dev/null

.PHONY: docs
docs: $(VENV)/.installed-docs $(VENV)/.installed-dev ## Run the documents' examples, build the site in build/docs, check its links
	$(TEST) docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going -c docs . build/docs
	@echo build/docs/docs/index.html

##@ Clean

.PHONY: clean
clean: ## Remove the environment, caches and reports
	rm -rf $(VENV) $(VENV)-newest $(VENV)-servers $(VENV)-mlserver $(REPORTS) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
