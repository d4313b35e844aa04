# `make help` lists the targets. Set-up happens once, in .venv, and again when pyproject.toml or constraints.txt change.
# PYTHON=/path/to/python3.12 chooses the interpreter; ARGS="…" goes to penstock or pytest.

SHELL := /bin/bash
BIN := .venv/bin
ARGS ?=
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-sglang test-megatron test-megatron-0.19 chaos lint format docs clean
.DELETE_ON_ERROR:

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.ready-run ## Train a small model from nothing, here and now (about three minutes)
	@$(BIN)/penstock run scenarios/quickstart.yaml $(ARGS)

test: .venv/.ready-test ## Everything but the slow tests
	@failed=0; set -x; \
	$(PYTEST) -n 2 --dist worksteal -m "not slow and not ray and not chaos and not sglang and not megatron" $(ARGS) || failed=1; \
	$(PYTEST) -m "ray and not slow and not chaos and not sglang and not megatron" $(ARGS) || failed=1; \
	exit $$failed

chaos: .venv/.ready-test ## Kills and stops of everything, cut links, bad frames, full disks: the run survives or resumes
	$(PYTEST) -m "chaos and not slow" --timeout 600 -o faulthandler_timeout=600 \
		tests/chaos tests/integration/test_resume.py $(ARGS)

test-sglang: .venv/.ready-test ## Against stock SGLang servers on the CPU (their own environment is built the first time)
	@$(BIN)/penstock env sglang --stand-ins tests/sglang/stand_ins
	$(PYTEST) -m "sglang and not slow" --timeout 600 -o faulthandler_timeout=600 tests/sglang $(ARGS)

test-megatron: .venv/.ready-test .venv/.ready-megatron ## Against megatron-core on the CPU, and with SGLang servers
	@$(BIN)/penstock env sglang --stand-ins tests/sglang/stand_ins
	TORCHDYNAMO_DISABLE=1 $(PYTEST) -m "megatron and not slow" --timeout 600 -o faulthandler_timeout=600 \
		tests/megatron $(ARGS)

test-megatron-0.19: .venv/.ready-test .venv/.ready-megatron .venv/.ready-megatron-0.19 ## Less whole runs, against a newer one
	PYTHONPATH=$(CURDIR)/.venv/megatron-core-0.19 TORCHDYNAMO_DISABLE=1 $(PYTEST) -m "megatron and not slow and not ray" \
		--timeout 600 -o faulthandler_timeout=600 tests/megatron $(ARGS)

test-all: test chaos test-sglang test-megatron test-megatron-0.19 ## The slow tests as well (tens of minutes)
	$(PYTEST) -m slow --timeout 3600 -o faulthandler_timeout=3600 $(ARGS)

lint: .venv/.ready-test .venv/.ready-lint ## Style, spelling and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	@set -x; $(BIN)/mypy & failed=0; $(BIN)/pyright || failed=1; wait $$! || failed=1; exit $$failed

format: .venv/.ready-lint ## Rewrite the code in house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/.ready-run ## Write the generated pages of docs/ anew
	$(BIN)/python -m penstock.runtime.cli.docs

clean: ## Remove the environment and caches; the next target sets up anew
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/.ready-run: pyproject.toml constraints.txt
	@.ci/set_up run

.venv/.ready-test .venv/.ready-lint .venv/.ready-megatron .venv/.ready-megatron-0.19: .venv/.ready-%: .venv/.ready-run
	@.ci/set_up $*
