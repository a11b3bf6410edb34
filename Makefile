# `make serve` and `make test` need Python >= 3.11, a C++ compiler and make; the rest they install
# into .venv. Run `make help` for the list.

VENV   ?= .venv
PORT   ?= 8080
HOST   ?= 127.0.0.1
MODEL  ?=
ARGS   ?=
PYTEST_ARGS ?=
# Tests wait a good deal, and a file of them shares what it starts.
PYTEST_PROCESSES ?= 2

PY  := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq --disable-pip-version-check

# A build of llama.cpp uses every core. Set it lower where memory is scarce.
CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
export CMAKE_BUILD_PARALLEL_LEVEL

# Not --quiet: with it, mkdocs does not count its warnings.
MKDOCS := $(PY) -m mkdocs build --strict --site-dir site

# $(call silent,name,command): run a command, and show what it says only when it fails.
silent = @echo "$1"; $2 > $(VENV)/check.log 2>&1 || { cat $(VENV)/check.log; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help serve install test check format docs ui screenshots fuzz soak test-vocabularies test-models \
	test-deploy test-image test-rpc test-ray test-lowest wheel clean distclean

help:
	@echo "make serve        serve on $(HOST):$(PORT); PORT=, HOST=, MODEL=file.gguf, ARGS='--parallel 8'"
	@echo "make test         every check, then the tests with coverage; PYTEST_ARGS='-k name'"
	@echo "make check        format, lint, types, layers, documentation"
	@echo "make format       format the code, and mend what ruff can mend"
	@echo "make docs         build the documentation into site/"
	@echo "make ui           check, test and build the chat page; needs npm"
	@echo "make screenshots  take the pictures of the chat page in docs/images/ again; needs Chromium"
	@echo "make fuzz         decode damaged files, send a server mutated requests, then generated ones for FUZZ_SECONDS=300"
	@echo "make soak         a mixed load on a server for SOAK_SECONDS=600; SOAK_ARGS='--svg FILE'"
	@echo "make test-vocabularies  the tests on the vocabularies of llama.cpp's sources (77 MB, once)"
	@echo "make test-models  tests with a real model, 240 MB that it downloads to TEST_MODELS"
	@echo "make test-deploy  the tests of examples/deploy, with helm, hadolint and schemas, which it installs"
	@echo "make test-rpc     one model over two RPC servers on this machine, which fail in every way"
	@echo "make test-ray     the Serve application on a cluster of three nodes; RAY=2.49.2 takes that version of Ray"
	@echo "make test-image   build the image with CONTAINER_ENGINE=docker or podman, and run it; IMAGE_ARGS='--build-arg ...'"
	@echo "make test-lowest  the tests with the oldest versions that pyproject.toml allows"
	@echo "make wheel        build the wheel into dist/"
	@echo "make clean        remove what the tools wrote; make distclean: and the environments"

serve: $(VENV)/.installed
	@exec $(PY) -m trioserve --host $(HOST) --port $(PORT) $(if $(MODEL),--model '$(MODEL)') $(ARGS)

install: $(VENV)/.installed-dev

test: check
	@$(PY) -m pytest -n $(PYTEST_PROCESSES) --dist loadfile --cov --cov-report=term --durations=30 $(PYTEST_ARGS)

check: $(VENV)/.installed-dev
	$(call silent,ruff format,$(PY) -m ruff format --check .)
	$(call silent,ruff check,$(PY) -m ruff check .)
	$(call silent,mypy,$(PY) -m mypy)
	$(call silent,import-linter,$(VENV)/bin/lint-imports --no-logo)
	$(call silent,mkdocs,$(MKDOCS))

format: $(VENV)/.installed-dev
	@$(PY) -m ruff check --quiet --fix . ; $(PY) -m ruff format .

docs: $(VENV)/.installed-dev
	$(call silent,mkdocs,$(MKDOCS))
	@echo "open site/index.html"

UI := trioserve/ui

ui:
	@cd $(UI) && npm ci --no-audit --no-fund --loglevel=error && npm run --silent check \
		&& npm test --silent && npm run --silent build
	@ls $(UI)/dist

screenshots: $(VENV)/.installed-dev
	@mkdir -p docs/images
	@SCREENSHOTS=docs/images $(PY) -m pytest -q tests/ui -k 'looks_good or activity or reads_a_digit'

FUZZ_SECONDS ?= 300
# For a router: --models-dir FOLDER.
FUZZ_ARGS ?=

fuzz: $(VENV)/.installed-fuzz
	@N_DAMAGED_MEDIA=200 $(PY) -m pytest -q tests/server/test_media_hostile.py tests/server/test_documents.py
	@$(PY) -m tests.fuzz $(FUZZ_SECONDS) $(FUZZ_ARGS)

SOAK_SECONDS ?= 600
SOAK_ARGS ?=

soak: $(VENV)/.installed-dev
	@$(PY) -m tests.soak $(SOAK_SECONDS) $(SOAK_ARGS)

# LLAMA_CPP_SDIST may name an unpacked sdist of llama-cpp-python; else pip downloads it.
test-vocabularies: $(VENV)/.installed-dev
	@set -e; sources=$${LLAMA_CPP_SDIST:-$$($(PY) -m tests.support.llama_cpp_sources)}; \
	LLAMA_CPP_SDIST="$$sources" $(PY) -m pytest tests/api/test_vocabularies.py tests/api/test_vocabularies_reference.py $(PYTEST_ARGS)

TEST_MODELS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trioserve/test-models

test-models: $(VENV)/.installed-dev
	@$(PY) -m tests.real_models.install '$(TEST_MODELS)'
	@TEST_MODELS='$(TEST_MODELS)' $(PY) -m pytest tests/real_models $(PYTEST_ARGS)

test-deploy:
	@$(MAKE) --no-print-directory VENV=.venv-deploy EXTRAS=[test,deploy] .venv-deploy/.installed-dev
	@.venv-deploy/bin/python -m tests.support.install_helm .venv-deploy/bin
	@.venv-deploy/bin/python -m pytest tests/deploy $(PYTEST_ARGS)

# As for test-vocabularies. The library that it builds is kept in the environment.
test-rpc: $(VENV)/.installed-dev
	@set -e; sources=$${LLAMA_CPP_SDIST:-$$($(PY) -m tests.support.llama_cpp_sources)}; \
	export XDG_CACHE_HOME='$(abspath $(VENV))/cache'; $(PY) -m trioserve rpc build --sources "$$sources"; \
	TEST_RPC=1 $(PY) -m pytest tests/rpc $(PYTEST_ARGS)

# By default the newest Ray that pyproject.toml allows. Earlier ones do not know protobuf 7.
RAY ?=
RAY_VENV := .venv-ray$(if $(RAY),-$(RAY))

test-ray:
	@$(MAKE) --no-print-directory VENV=$(RAY_VENV) EXTRAS=[ray,test] \
		$(if $(RAY),MORE="'ray[serve]==$(RAY)' 'protobuf<7'") $(RAY_VENV)/.installed-dev
	@TEST_RAY=1 $(RAY_VENV)/bin/python -m pytest tests/ray tests/ray_cluster $(PYTEST_ARGS)

CONTAINER_ENGINE ?= docker
IMAGE ?= trioserve
IMAGE_ARGS ?=

test-image: $(VENV)/.installed-dev
	@$(CONTAINER_ENGINE) build -f examples/deploy/Dockerfile -t $(IMAGE) $(IMAGE_ARGS) .
	@TEST_IMAGE=$(IMAGE) CONTAINER_ENGINE='$(CONTAINER_ENGINE)' $(PY) -m pytest tests/deploy/test_image.py $(PYTEST_ARGS)

test-lowest:
	@$(MAKE) --no-print-directory VENV=.venv-lowest EXTRAS=[test] LOWEST=1 .venv-lowest/.installed-dev
	@.venv-lowest/bin/python -m pytest $(PYTEST_ARGS)

wheel: $(VENV)/.installed-dev
	@$(PY) -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist

clean:
	@rm -rf site dist build .coverage .coverage.* .cache .mypy_cache .pytest_cache .ruff_cache \
		.hypothesis .import_linter_cache *.egg-info
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	@rm -rf .venv .venv-deploy .venv-lowest .venv-ray .venv-ray-*

# -- the environment

EXTRAS ?= [test,check,docs]
# Requirements beside the extras.
MORE ?=

$(PY):
	@set -e; found=; \
	for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14 python; do \
		if "$$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
			>/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "No Python 3.11 or later with venv was found. Name one: make PYTHON=/path/to/python3" >&2; \
		exit 1; \
	fi; \
	echo "Making $(VENV) with $$($$found -V)"; \
	"$$found" -m venv $(VENV)

# pip keeps the wheel of llama.cpp in its cache, so the slow build happens once for each Python.
define announce
	@$(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("llama_cpp") is None)' \
		|| echo "Installing. If llama.cpp has to be compiled, this takes 4 to 8 minutes on 2 cores."
endef

$(VENV)/.installed: pyproject.toml | $(PY)
	$(announce)
	@$(PIP) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(PY)
	$(announce)
ifdef LOWEST
	@$(PY) -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
		print(*(d.replace(">=", "==") for d in \
		[*project["dependencies"], *project["optional-dependencies"]["test"]]), sep="\n")' \
		> $(VENV)/lowest.txt
	@$(PIP) --editable '.$(EXTRAS)' --constraint $(VENV)/lowest.txt
else
	@$(PIP) --editable '.$(EXTRAS)' $(MORE)
endif
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-fuzz: $(VENV)/.installed-dev
	@$(PIP) --editable '.[fuzz]'
	@touch $@
