# A fresh machine needs Python 3.11 or newer and two commands: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PROJECTS := pyproject.toml client/pyproject.toml

# Each process of the tests would compile all that it imports, where this is set.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
CHECKS := check-format check-lint check-types check-imports check-generated check-spelling check-deploy check-documents
.PHONY: help demo venv venv-vllm venv-sglang test smoke smoke-vllm smoke-sglang test-all test-for stress planted coverage test-main test-cluster test-vllm test-sglang soak check $(CHECKS) hooks format proto docs package clean

help:
	@echo "make demo    install, start a daemon, store, kill the engine, load, compare every byte"
	@echo "make test    install what the quick tests need and run them: what starts no process, and each promise once"
	@echo "make test-for   run what a change touches: CHANGED=\"files\", or what differs from main"
	@echo "make smoke   install vLLM and SGLang for the CPU, and run what shows a promise on a real engine"
	@echo "make test-all   every test that needs no GPU, and the bugs that they must find: hours"
	@echo "make stress  the quick tests, TIMES=20 times, on 1.1 cores while processes of theirs stand still"
	@echo "make planted    plant each bug of tests/planted, and see that a test finds it"
	@echo "make coverage  the unit tests, and how much of cache/, core/ and protocol/ they run"
	@echo "make test-cluster  install Mooncake Store, and run the tests of the cluster tier in a network of their own"
	@echo "make test-vllm  install vLLM for the CPU into .venv-vllm and run the connector's tests, also on a real engine"
	@echo "make test-sglang  install SGLang for the CPU into .venv-sglang and run the linker's tests, also on a real engine"
	@echo "make soak    a daemon under engines that are killed at random, for SECONDS=120 on DEVICE=host"
	@echo "make check   format, lint, types, import contracts, spelling, generated code, and the tests of deploy/ and docs/"
	@echo "make hooks   those checks at each commit that look at what changed, and the length of its subject"
	@echo "make format  rewrite the code in the project's format"
	@echo "make docs    write the reference pages of docs/ and build the site into build/docs"
	@echo "make package  build wheel and sdist of daemon and client into dist/, and check what they say of themselves"
	@echo "make proto   regenerate kvsidecar/v1 from proto/"

$(VENV)/pip.stamp:
	@echo "installing into $(VENV) takes a minute or two"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kvsidecar needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "$(PYTHON) has no working venv module (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	@touch $@

# What somebody else has installed there, as README.md says, is newer than the stamps. Then the checkout is again.
INSTALLED := $(wildcard $(VENV)/lib/python3*/site-packages/kvsidecar*.dist-info)
$(INSTALLED):

$(VENV)/run.stamp: $(VENV)/pip.stamp $(PROJECTS) $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ./client --editable .
	@touch $@

# The first pip that knows dependency groups.
GROUPS_PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'

$(VENV)/test.stamp: $(VENV)/pip.stamp $(PROJECTS) $(INSTALLED)
	$(GROUPS_PIP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ./client --editable '.[events]' --group test
	@touch $@ $(VENV)/run.stamp

$(VENV)/all.stamp: $(VENV)/pip.stamp $(PROJECTS) $(INSTALLED)
	$(GROUPS_PIP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ./client --editable '.[events,tracing]' --group test-all
	@touch $@ $(VENV)/run.stamp $(VENV)/test.stamp

$(VENV)/dev.stamp: $(VENV)/pip.stamp $(PROJECTS) $(INSTALLED)
	$(GROUPS_PIP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ./client --editable '.[events,tracing]' --group dev
	@touch $@ $(VENV)/run.stamp $(VENV)/test.stamp $(VENV)/all.stamp

demo: $(VENV)/run.stamp
	@$(BIN)/kvsidecar demo

venv: $(VENV)/dev.stamp

# Three tiers, by the rule of tests/marks.py: `make test`, `.ci/run`, `make test-all`. Most tests run side by side; those
# with the marker `alone` run after them, those with `torch` where vLLM has brought it. A test of a daemon mostly waits:
# for two on a core. An engine keeps a core busy.
CORES := $(shell nproc)
JOBS ?= $(shell echo $$((2 * $(CORES))))
ENGINES ?= $(CORES)
side_by_side = --numprocesses $(1) --dist worksteal -m "not alone and not cluster and not torch"
quick = --numprocesses $(1) --dist worksteal -m quick
OF_CHECK := tests/deploy tests/docs
OF_COVERAGE := $(wildcard tests/cache tests/client tests/core tests/protocol tests/server)
OF_TEST_VLLM := tests/integrations tests/vllm
OF_TEST_SGLANG := tests/sglang
OF_PROCESSES := tests/benchmarks tests/e2e tests/examples tests/packages tests/planted
OF_TEST := $(filter-out tests/__pycache__ $(OF_CHECK) $(OF_COVERAGE) $(OF_TEST_VLLM) $(OF_TEST_SGLANG),$(patsubst %/,%,$(wildcard tests/*/))) $(wildcard tests/test_*.py)
# Files of tests with this marker, because pytest takes seconds to collect all.
files_with = $(shell grep -rlE --include='test_*.py' '(mark\.|@)$(1)\b' $(2))
marked = -m $(1) $(call files_with,$(1),$(2))
OF_QUICK = $(filter-out $(OF_PROCESSES),$(OF_TEST)) $(OF_COVERAGE) tests/integrations $(call files_with,promise,$(OF_PROCESSES))

# With ARGS, what they select is run, whatever its tier.
ARGS ?=
test: $(VENV)/$(if $(ARGS),all,test).stamp
ifneq ($(ARGS),)
	$(BIN)/python -m pytest $(ARGS)
else
	$(BIN)/python -m pytest --quiet $(call quick,$(JOBS)) $(OF_QUICK)
endif

# Those of tests/integrations need what vLLM brings.
smoke-vllm: .venv-vllm/test.stamp
	.venv-vllm/bin/python -m pytest --quiet $(call quick,$(ENGINES)) $(shell grep -rlE 'importorskip..(vllm|torch)' tests/integrations)
	.venv-vllm/bin/python -m pytest --numprocesses $(ENGINES) --dist worksteal -m smoke $(call files_with,promise,tests/vllm)

smoke-sglang: .venv-sglang/test.stamp
	.venv-sglang/bin/python -m pytest --numprocesses $(ENGINES) --dist loadfile -m smoke $(call files_with,promise,tests/sglang)

smoke: smoke-vllm smoke-sglang

CHANGED ?=
test-for: $(VENV)/dev.stamp
	$(BIN)/python -m tests.touched $(CHANGED)

TIMES ?= 20
stress: $(VENV)/test.stamp
	$(BIN)/python -m tests.stress --times $(TIMES) -- $(or $(ARGS),--quiet $(call quick,$(JOBS)) $(OF_QUICK))

planted: $(VENV)/all.stamp
	$(BIN)/python -m tests.planted

test-all: export KVSIDECAR_TESTS = all
test-all: $(VENV)/all.stamp
	$(MAKE) --no-print-directory check
	$(MAKE) --no-print-directory coverage
	$(MAKE) --no-print-directory test-main
	$(MAKE) --no-print-directory test-cluster
	$(MAKE) --no-print-directory test-vllm
	$(MAKE) --no-print-directory test-sglang
	$(MAKE) --no-print-directory planted

# All of the daemon, the client and the commands but the unit tests of `make coverage`.
test-main: $(VENV)/all.stamp
	$(BIN)/python -m pytest $(call side_by_side,$(JOBS)) $(OF_TEST)
	$(BIN)/python -m pytest $(call marked,alone,$(OF_COVERAGE) $(OF_TEST))

# Percent of the lines that the unit tests run, at least: a little less than they did when this was written.
coverage: $(VENV)/all.stamp
	$(BIN)/python -m pytest $(call side_by_side,$(JOBS)) --cov --cov-report= $(OF_COVERAGE)
	$(BIN)/coverage report --include 'kvsidecar/cache/*' --fail-under 98
	$(BIN)/coverage report --include 'kvsidecar/core/*' --fail-under 92
	$(BIN)/coverage report --include 'kvsidecar/protocol/*' --fail-under 95

$(VENV)/cluster.stamp: $(VENV)/all.stamp
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ./client --editable '.[events,tracing,mooncake]' --group test-all
	@touch $@ $(wildcard $(VENV)/*.stamp)

# The client of Mooncake Store listens on all addresses.
test-cluster: $(VENV)/cluster.stamp
	@$(BIN)/python -c 'import sys; from tests.mooncake_cluster import missing; sys.exit(missing() or 0)'
	$(BIN)/python -m tests.own_network $(BIN)/python -m pytest $(call marked,cluster,tests)

# An engine of the tests. What is imported is compiled then: most of these packages never is, and pip would take half a
# minute for it.
ENGINE_PIP = $(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile

.venv-%/engine.stamp: tests/%/requirements.txt tests/%/without-dependencies.txt
	@$(PYTHON) -m venv $(@D)
	$(ENGINE_PIP) -r tests/$*/requirements.txt
	$(ENGINE_PIP) --no-deps -r tests/$*/without-dependencies.txt
	@touch $@

.PRECIOUS: .venv-%/engine.stamp
.venv-%/test.stamp: .venv-%/engine.stamp $(PROJECTS)
	$(ENGINE_PIP) 'pip>=25.1'
	$(ENGINE_PIP) --editable ./client --editable '.[events,tracing]' --group test
	@touch $@

# The newest vLLM in the environment, on the kernels of the older one, which is beside it.
OLDER_VLLM := .venv-vllm/older
.venv-vllm/test.stamp: .venv-vllm/newest.stamp
.venv-vllm/newest.stamp: .venv-vllm/engine.stamp tests/vllm/newest.txt tests/vllm/older.txt tests/vllm/newest.py
	rm -rf $(OLDER_VLLM) $(@D)/wheels
	$(ENGINE_PIP) --no-deps --target $(OLDER_VLLM) -r tests/vllm/older.txt
	$(@D)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(@D)/wheels -r tests/vllm/newest.txt
	$(@D)/bin/python tests/vllm/newest.py $(@D)/wheels/*.whl $(OLDER_VLLM)
	rm -rf $(@D)/wheels
	@touch $@

venv-vllm: .venv-vllm/test.stamp
venv-sglang: .venv-sglang/test.stamp

test-vllm: .venv-vllm/test.stamp
ifneq ($(ARGS),)
	.venv-vllm/bin/python -m pytest $(ARGS)
else
	.venv-vllm/bin/python -m pytest $(call side_by_side,$(ENGINES)) $(OF_TEST_VLLM)
	.venv-vllm/bin/python -m pytest $(call marked,alone,$(OF_TEST_VLLM))
	.venv-vllm/bin/python -m pytest $(call marked,torch,tests)
	PYTHONPATH="$(CURDIR)/$(OLDER_VLLM)" .venv-vllm/bin/python -m pytest $(call marked,older,$(OF_TEST_VLLM)) --numprocesses $(ENGINES) --dist worksteal
endif

# The engines of a file are started once, so a file is not split.
test-sglang: .venv-sglang/test.stamp
ifneq ($(ARGS),)
	.venv-sglang/bin/python -m pytest $(ARGS)
else
	.venv-sglang/bin/python -m pytest --numprocesses $(ENGINES) --dist loadfile $(OF_TEST_SGLANG)
endif

SECONDS ?= 120
DEVICE ?= host
DAEMON_KILLS ?= 0

soak: $(VENV)/test.stamp
	@$(BIN)/python -m benchmarks.soak --seconds $(SECONDS) --device $(DEVICE) --daemon-kills $(DAEMON_KILLS)

PROTOC = $(BIN)/python -m grpc_tools.protoc -Iproto proto/kvsidecar/v1/sidecar.proto

check: $(CHECKS)
$(CHECKS): $(VENV)/dev.stamp

check-format:
	$(BIN)/ruff format --check .

check-lint:
	$(BIN)/ruff check .

check-types:
	$(BIN)/mypy

check-imports:
	$(BIN)/lint-imports

check-generated:
	@drift=$$(mktemp -d) && trap 'rm -rf $$drift' EXIT \
		&& $(PROTOC) --python_out=$$drift --pyi_out=$$drift --grpc_python_out=$$drift \
		&& for file in $$drift/kvsidecar/v1/*; do diff -u kvsidecar/v1/$$(basename $$file) $$file \
			|| { echo "kvsidecar/v1 is not what proto/ generates: run make proto"; exit 1; }; done \
		&& echo "generated code: no drift"

check-spelling:
	$(BIN)/codespell

check-deploy:
	$(BIN)/hadolint Dockerfile deploy/kubernetes/vllm.Dockerfile
	@deploy/systemd/check
	$(BIN)/shellcheck .ci/run deploy/systemd/check
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github/workflows
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec examples/compose.yaml

check-documents:
	$(BIN)/python -m pytest -q -m "not torch" $(OF_CHECK)

hooks: $(VENV)/dev.stamp
	$(BIN)/pre-commit install --hook-type pre-commit --hook-type commit-msg

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(VENV)/dev.stamp
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=.

docs: $(VENV)/dev.stamp
	$(BIN)/python -m docs.generate
	$(BIN)/python -m sphinx --builder html --nitpicky --fail-on-warning --keep-going --quiet docs build/docs
	@echo "build/docs/index.html"

# The same commit gives the same bytes. Of the daemon, a wheel for every platform, and one with compiled kernels for each
# of these processors.
PROCESSORS := x86_64 aarch64
package: $(VENV)/all.stamp
	rm -rf dist
	export SOURCE_DATE_EPOCH=$${SOURCE_DATE_EPOCH:-$$(git log -1 --format=%ct)}; set -e; \
	$(BIN)/python -m build --no-isolation --outdir dist client; \
	KVSIDECAR_CC= $(BIN)/python -m build --no-isolation --outdir dist .; \
	for each in $(PROCESSORS); do \
		KVSIDECAR_CC="$(BIN)/python -m ziglang cc -target $$each-linux-gnu.2.17" \
		KVSIDECAR_PLATFORM=manylinux2014_$$each.manylinux_2_17_$$each \
			$(BIN)/python -m build --no-isolation --wheel --outdir dist .; \
	done
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf dist $(VENV) .venv-vllm .venv-sglang build .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis
