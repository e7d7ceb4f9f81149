# A fresh machine needs Python 3.11 or newer and two commands: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm soak check format proto docs clean

help:
	@echo "make demo    install, start a daemon, store, kill the engine, load, compare every byte"
	@echo "make test    install what the tests need and run them"
	@echo "make test-vllm  install vLLM for the CPU into .venv-vllm and run the connector's tests on a real engine"
	@echo "make soak    a daemon under engines that are killed at random, for SECONDS=120 on DEVICE=host"
	@echo "make check   format, lint, types, import contracts, generated code, Dockerfiles, deploy/"
	@echo "make format  rewrite the code in the project's format"
	@echo "make docs    write the reference pages of docs/ and build the site into build/docs"
	@echo "make proto   regenerate kvsidecar/v1 from proto/"

$(VENV)/pip.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "kvsidecar needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
		|| { echo "$(PYTHON) has no working venv module (Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	@touch $@

$(VENV)/run.stamp: $(VENV)/pip.stamp pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/test.stamp: $(VENV)/pip.stamp pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $@ $(VENV)/run.stamp

$(VENV)/dev.stamp: $(VENV)/pip.stamp pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@ $(VENV)/run.stamp $(VENV)/test.stamp

demo: $(VENV)/run.stamp
	@$(BIN)/kvsidecar demo

test: $(VENV)/test.stamp
	$(BIN)/python -m pytest $(ARGS)

VLLM_VENV ?= .venv-vllm
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check

$(VLLM_VENV)/vllm.stamp: tests/vllm/requirements.txt tests/vllm/without-dependencies.txt
	@$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) -r tests/vllm/requirements.txt
	$(VLLM_PIP) --no-deps -r tests/vllm/without-dependencies.txt
	@touch $@

$(VLLM_VENV)/test.stamp: $(VLLM_VENV)/vllm.stamp pyproject.toml
	$(VLLM_PIP) --editable '.[test]'
	@touch $@

test-vllm: $(VLLM_VENV)/test.stamp
	$(VLLM_VENV)/bin/python -m pytest $(or $(ARGS),tests/integrations tests/vllm)

SECONDS ?= 120
DEVICE ?= host

soak: $(VENV)/test.stamp
	@$(BIN)/python -m tests.soak --seconds $(SECONDS) --device $(DEVICE)

PROTOC = $(BIN)/python -m grpc_tools.protoc -Iproto proto/kvsidecar/v1/sidecar.proto

check: $(VENV)/dev.stamp
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@drift=$$(mktemp -d) && trap 'rm -rf $$drift' EXIT \
		&& $(PROTOC) --python_out=$$drift --pyi_out=$$drift --grpc_python_out=$$drift \
		&& for file in $$drift/kvsidecar/v1/*; do diff -u kvsidecar/v1/$$(basename $$file) $$file \
			|| { echo "kvsidecar/v1 is not what proto/ generates: run make proto"; exit 1; }; done \
		&& echo "generated code: no drift"
	$(BIN)/hadolint Dockerfile deploy/kubernetes/vllm.Dockerfile
	@deploy/systemd/check
	$(BIN)/python -m pytest -q tests/deploy tests/docs

format: $(VENV)/dev.stamp
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(VENV)/dev.stamp
	$(PROTOC) --python_out=. --pyi_out=. --grpc_python_out=.

docs: $(VENV)/dev.stamp
	$(BIN)/python -m docs.generate
	$(BIN)/python -m sphinx --builder html --nitpicky --fail-on-warning --keep-going --quiet docs build/docs
	@echo "build/docs/index.html"

clean:
	rm -rf $(VENV) $(VLLM_VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
