# `make help` lists the targets. Set-up happens once, in .venv, and again when pyproject.toml or constraints.txt change.
# PYTHON=/path/to/python3.12 chooses the interpreter; ARGS="…" goes to penstock or pytest.

SHELL := /bin/bash
BIN := .venv/bin
ARGS ?=
# Bytecode is written whatever the environment says: compiling every test anew costs a minute each time.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(BIN)/python -m pytest
TWO := -n 2 --dist worksteal
# One more than the two cores: tests of whole runs wait most of the time, for processes that start, modelled tokens and
# deadlines that pass.
THREE := -n 3 --dist worksteal
LONG := --timeout 600 -o faulthandler_timeout=600
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help demo check test runs reasoning-gym trackers browser test-ray test-sglang test-megatron test-megatron-0.19 chaos nightly lint format docs site clean
.DELETE_ON_ERROR:

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## / { printf "  make %-19s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: .venv/.ready-run ## Set up, then train a small model from nothing, here and now (some minutes)
	@$(BIN)/penstock run scenarios/quickstart.yaml $(ARGS)

check: .venv/.ready-test ## The unit tests (about a minute)
	$(PYTEST) $(TWO) -m "not slow" tests/unit $(ARGS)

test: .venv/.ready-test ## Units, backends, simulation, whole runs on the local host, a few on Ray (about ten minutes)
	@failed=0; set -x; \
	$(PYTEST) $(THREE) -m "not slow and not long_run and not ray and not chaos and not sglang and not megatron" \
		--ignore tests/sglang --ignore tests/megatron --ignore tests/browser $(ARGS) || failed=1; \
	PENSTOCK_TEST_HOST=ray $(PYTEST) $(TWO) -m smoke tests/integration || failed=1; \
	exit $$failed

test-ray: .venv/.ready-test ## About Ray itself, and runs of `make test` once more on it
	PENSTOCK_TEST_HOST=ray $(PYTEST) $(TWO) -m "(ray or both_hosts) and not slow" tests/integration $(ARGS)

runs: .venv/.ready-test ## Whole runs that train for longer (examples, agents, hooks), learners that die or have ranks
	$(PYTEST) $(THREE) -m "long_run and not slow" tests/integration tests/examples tests/backends tests/docs tests/fuzz $(ARGS)

reasoning-gym: .venv/.ready-reasoning-gym ## Add the extra of that name, which takes a C compiler; make test then covers it

trackers: .venv/.ready-trackers ## Add the libraries of experiment trackers; make test then reads back what they were told

browser: .venv/.ready-test .venv/.ready-browser ## The page of penstock dashboard, in a Chromium that is installed here
	$(PYTEST) -m "not slow" $(LONG) tests/browser $(ARGS)

chaos: .venv/.ready-test ## Kills and stops of everything, cut links, bad frames, full disks: the run survives or resumes
	$(PYTEST) $(THREE) -m "chaos and not slow" $(LONG) tests/chaos tests/integration/test_resume.py $(ARGS)

test-sglang: .venv/.ready-test ## Against stock SGLang servers on the CPU (their own environment is built the first time)
	@$(BIN)/penstock env sglang --stand-ins tests/sglang/stand_ins
	$(PYTEST) -n 2 --dist loadscope --no-loadscope-reorder -m "sglang and not slow" $(LONG) \
		tests/sglang tests/backends/test_sglang_environment.py $(ARGS)

test-megatron: .venv/.ready-test .venv/.ready-megatron ## Against megatron-core on the CPU, and with SGLang servers
	@$(BIN)/penstock env sglang --stand-ins tests/sglang/stand_ins
	TORCHDYNAMO_DISABLE=1 $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "megatron and not slow" $(LONG) \
		tests/megatron $(ARGS)

test-megatron-0.19: .venv/.ready-test .venv/.ready-megatron .venv/.ready-megatron-0.19 ## Less whole runs, against a newer one
	PYTHONPATH=$(CURDIR)/.venv/megatron-core-0.19 TORCHDYNAMO_DISABLE=1 $(PYTEST) -m "megatron and not slow and not ray" \
		$(LONG) tests/megatron $(ARGS)

nightly: .venv/.ready-test .venv/.ready-reasoning-gym .venv/.ready-trackers .venv/.ready-megatron .venv/.ready-browser ## 100,000 random trials, random properties, mutants, learning curves, all that is slow
	@failed=0; set -x; \
	PYTHONPATH=tests/simulation $(BIN)/python -m trials.fuzz --policy all --trials 33334 --first-seed random \
		--processes 2 --keep tests/simulation/failed_trials.txt || failed=1; \
	PENSTOCK_HYPOTHESIS=nightly $(PYTEST) -m slow --timeout 3600 -o faulthandler_timeout=3600 $(ARGS) || failed=1; \
	PENSTOCK_TEST_HOST=ray $(PYTEST) -m "nightly_on_ray or slow and (ray or both_hosts)" $(LONG) tests/integration || failed=1; \
	$(MAKE) test-megatron-0.19 || failed=1; \
	exit $$failed

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

site: .venv/.ready-docs ## Build the searchable site of docs/ into site/; a link that leads nowhere stops it
	$(BIN)/zensical build --strict --clean
	@test -s site/search.json && echo "site/index.html"

clean: ## Remove the environment and caches; the next target sets up anew
	rm -rf .venv .cache site .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/.ready-run: pyproject.toml constraints.txt
	@.ci/set_up run

.venv/.ready-test .venv/.ready-lint .venv/.ready-docs .venv/.ready-reasoning-gym .venv/.ready-trackers .venv/.ready-browser .venv/.ready-megatron .venv/.ready-megatron-0.19: \
		.venv/.ready-%: .venv/.ready-run
	@.ci/set_up $*
