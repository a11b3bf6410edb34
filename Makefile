# `make serve` and `make test` need Python >= 3.11, a C++ compiler and make; the rest they install
# into .venv. Run `make help` for the list.

VENV   ?= .venv
PORT   ?= 8080
HOST   ?= 127.0.0.1
MODEL  ?=
ARGS   ?=
# A file, a folder or the name of a test: `make test TESTS=tests/engine/test_queue.py`.
TESTS  ?=
PYTEST_ARGS ?=

PY  := $(VENV)/bin/python

# Without bytecode, each of the hundreds of processes in the tests compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

# A build of llama.cpp uses every core. Set it lower where memory is scarce.
CMAKE_BUILD_PARALLEL_LEVEL ?= $(shell getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
export CMAKE_BUILD_PARALLEL_LEVEL

# Each needs 1 GB.
PYTEST_PROCESSES ?= $(shell n=$(CMAKE_BUILD_PARALLEL_LEVEL); echo $$((n < 2 ? 2 : n > 4 ? 4 : n)))

# GCC before 14 drops the stores that ldtilecfg reads (GCC bug 114098), so that llama.cpp crashes on
# processors with AMX (llama.cpp#20824). Without AMX it uses AVX-512.
ifneq ($(filter 10.% 11.% 12.% 13.%,$(shell $${CXX:-c++} -dumpfullversion 2>/dev/null)),)
export CFLAGS += -U__AMX_INT8__
export CXXFLAGS += -U__AMX_INT8__
endif

# Not --quiet: with it, mkdocs does not count its warnings.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --site-dir site

# $(call silent,name,command): run a command, and show its output only when it fails.
silent = @echo "$1"; $2 > $(VENV)/check.log 2>&1 || { cat $(VENV)/check.log; exit 1; }

# docs/testing.md says which test belongs to which tier.
PYTEST := $(PY) -m pytest -n $(PYTEST_PROCESSES) --dist loadfile
FAST := tests -m 'not system'
SYSTEM := tests -m system
COVERAGE := --cov --cov-report= --cov-fail-under=0

.DEFAULT_GOAL := help
.PHONY: help serve install test test-all test-fast test-system test-chosen test-stress coverage check format docs \
	ui screenshots mutate fuzz soak test-vocabularies test-schemas test-models test-clients test-deploy test-image \
	test-rpc test-ray test-hostile test-kills test-lowest test-wheel audit lock wheel clean distclean

help:
	@echo "make serve        serve on $(HOST):$(PORT); PORT=, HOST=, MODEL=file.gguf, ARGS='--parallel 8'"
	@echo "make test         every check, and the fast tests; TESTS=file-or-name runs these tests alone"
	@echo "make test-all     make test, then the system tests (programs, browser, real time)"
	@echo "make coverage     the same tests; prints the lines and branches that none of them reaches"
	@echo "make test-stress  both tiers again and again, in random order beside busy processes; STRESS_ARGS="
	@echo "make check        format, lint, types, layers, documentation"
	@echo "make format       format the code, and fix what ruff can fix"
	@echo "make docs         build the documentation into site/"
	@echo "make ui           check, test and build the chat page; needs npm"
	@echo "make screenshots  take the pictures of the chat page in docs/images/ again; needs Chromium"
	@echo "make mutate       change the code in 200 places, one at a time, and count what the fast tests notice"
	@echo "make fuzz         decode damaged files, send a server mutated requests, then generated ones for FUZZ_SECONDS=300"
	@echo "make soak         a mixed load on a server for SOAK_SECONDS=600; SOAK_ARGS='--svg FILE'"
	@echo "make test-vocabularies  the tests on the vocabularies and templates of llama.cpp's sources (77 MB, once)"
	@echo "make test-schemas  schemas of published tools under every format; npm installs them to TEST_SCHEMAS"
	@echo "make test-models  tests with a real model, 240 MB that it downloads to TEST_MODELS"
	@echo "make test-clients coding agents and SDKs against a scripted model; installs them (3 GB) into CLIENTS; needs npm"
	@echo "make test-deploy  the tests of examples/deploy, with helm, hadolint and schemas, which it installs"
	@echo "make test-rpc     one model over two RPC servers on this machine, which fail in every way"
	@echo "make test-hostile clients, commands and MCP servers that attack a server, a quarter of an hour"
	@echo "make test-kills   kill servers KILLS=200 times while they store responses and run a batch"
	@echo "make test-ray     the Serve application on a cluster of three nodes; RAY=2.49.2 takes that version of Ray"
	@echo "make test-image   build the image with CONTAINER_ENGINE=docker or podman, and run it; IMAGE_ARGS='--build-arg ...'"
	@echo "make test-lowest  the fast tests with the oldest versions that pyproject.toml allows"
	@echo "make test-wheel   build, check and install the wheel, without extras, on PYTHONS, and chat with it"
	@echo "make audit        dependencies that are not declared, and versions with known vulnerabilities"
	@echo "make lock         resolve the dependencies again, and write constraints.txt; needs uv"
	@echo "make wheel        build the wheel into dist/"
	@echo "make clean        remove what the tools wrote; make distclean: and the environments"

serve: $(VENV)/.installed
	@exec $(PY) -m trioserve --host $(HOST) --port $(PORT) $(if $(MODEL),--model '$(MODEL)') $(ARGS)

install: $(VENV)/.installed-dev

# The checks run beside the tests: together they keep two cores busy.
test: $(VENV)/.installed-dev
ifdef TESTS
	@$(MAKE) --no-print-directory test-chosen
else
	@$(MAKE) --no-print-directory -j2 check test-fast
endif

# The fast tests come first: most defects show there.
test-all: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory test
	@$(MAKE) --no-print-directory test-system

# Before Python 3.14, measuring branches makes tests two to three times as slow.
coverage: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory test-fast PYTEST_ARGS='$(COVERAGE) $(PYTEST_ARGS)'
	@$(MAKE) --no-print-directory test-system PYTEST_ARGS='$(COVERAGE) --cov-append $(PYTEST_ARGS)'
	@$(PY) -m coverage report

test-fast: $(VENV)/.installed-dev
	@$(PYTEST) $(FAST) $(PYTEST_ARGS)

test-system: $(VENV)/.installed-dev
	@$(PYTEST) $(SYSTEM) --durations=15 $(PYTEST_ARGS)

# grep finds the file of a test in no time; pytest would import all of them.
test-chosen: $(VENV)/.installed-dev
	@if [ -e "$(firstword $(subst ::, ,$(TESTS)))" ]; then $(PY) -m pytest $(TESTS) $(PYTEST_ARGS); else \
		files=$$(grep -rlE '(def|class) \w*$(TESTS)' tests --include='test_*.py'); \
		if [ -z "$$files" ]; then echo "No file in tests/ has a test named $(TESTS)." >&2; exit 1; fi; \
		$(PY) -m pytest $$files -k '$(TESTS)' $(PYTEST_ARGS); fi

# Two processes keep both cores busy; the seed is that of the order.
ifndef STRESS_SEED
STRESS_SEED := $(shell date +%s)
endif
STRESS_ARGS ?=
STRESS := $(PYTEST) --random-order-seed=$(STRESS_SEED)

test-stress: $(VENV)/.installed-dev
	@echo "seed $(STRESS_SEED)"
	@for i in 1 2; do $(PY) -c 'while True: pass' & busy="$$busy $$!"; done; trap "kill $$busy" EXIT; \
		$(STRESS) $(FAST) --count 10 $(STRESS_ARGS) && $(STRESS) $(SYSTEM) --count 3 $(STRESS_ARGS)

MUTATE_ARGS ?=

mutate: $(VENV)/.installed-dev
	@$(PY) -m tests.mutate $(MUTATE_ARGS)

check: $(VENV)/.installed-dev
	$(call silent,ruff format,$(PY) -m ruff format --check .)
	$(call silent,ruff check,$(PY) -m ruff check .)
	$(call silent,mypy,$(PY) -m mypy)
	$(call silent,import-linter,$(VENV)/bin/lint-imports --no-logo)
	$(call silent,prose,$(PY) -m tests.prose)
	$(call silent,generated tables,$(PY) docs/tables.py --check)
	$(call silent,mkdocs,$(MKDOCS))

format: $(VENV)/.installed-dev
	@$(PY) -m ruff check --quiet --fix . ; $(PY) -m ruff format .

docs: $(VENV)/.installed-dev
	@$(PY) docs/tables.py
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
	@N_DAMAGED_MEDIA=200 $(PY) -m pytest -q tests/server/media/test_media_hostile.py tests/server/prompts/test_documents.py
	@$(PY) -m tests.fuzz $(FUZZ_SECONDS) $(FUZZ_ARGS)

SOAK_SECONDS ?= 600
SOAK_ARGS ?=

KILLS ?= 200

test-kills: $(VENV)/.installed-dev
	@TEST_KILLS=$(KILLS) $(PY) -m pytest -m system tests/store/test_kills.py $(PYTEST_ARGS)

soak: $(VENV)/.installed-dev
	@$(PY) -m tests.soak $(SOAK_SECONDS) $(SOAK_ARGS)

# LLAMA_CPP_SDIST may name an unpacked sdist of llama-cpp-python; else pip downloads it.
test-vocabularies: $(VENV)/.installed-dev
	@set -e; sources=$${LLAMA_CPP_SDIST:-$$($(PY) -m tests.support.llama_cpp_sources)}; \
	LLAMA_CPP_SDIST="$$sources" $(PY) -m pytest tests/api/test_vocabularies.py tests/api/test_vocabularies_reference.py \
		tests/chat/formats/test_templates.py tests/chat/template/test_histories.py $(PYTEST_ARGS)

TEST_SCHEMAS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trioserve/published-tools

test-schemas: $(VENV)/.installed-dev
	@$(PY) -m tests.published_tools.install '$(TEST_SCHEMAS)'
	@TEST_SCHEMAS='$(TEST_SCHEMAS)' $(PY) -m pytest -n $(PYTEST_PROCESSES) tests/published_tools \
		-o junit_family=xunit1 --junitxml='$(TEST_SCHEMAS)/results.xml' $(PYTEST_ARGS)

TEST_MODELS ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/trioserve/test-models

test-models: $(VENV)/.installed-dev
	@$(PY) -m tests.real_models.install '$(TEST_MODELS)'
	@TEST_MODELS='$(TEST_MODELS)' $(PY) -m pytest tests/real_models $(PYTEST_ARGS)

CLIENTS ?= .venv-clients

# As for test-vocabularies: two of the tests use other models' chat templates.
test-clients: $(VENV)/.installed-dev
	@$(PY) -m tests.programs.install '$(CLIENTS)'
	@set -e; sources=$${LLAMA_CPP_SDIST:-$$($(PY) -m tests.support.llama_cpp_sources)}; \
	LLAMA_CPP_SDIST="$$sources" TEST_CLIENTS='$(abspath $(CLIENTS))' $(PY) -m pytest tests/programs --dist loadfile $(PYTEST_ARGS)

test-deploy:
	@$(MAKE) --no-print-directory VENV=.venv-deploy GROUPS='test deploy' .venv-deploy/.installed-dev
	@.venv-deploy/bin/python -m tests.support.install_helm .venv-deploy/bin
	@TEST_DEPLOY=1 .venv-deploy/bin/python -m pytest tests/deploy $(PYTEST_ARGS)

# As for test-vocabularies. The library that it builds is kept in the environment.
test-rpc: $(VENV)/.installed-dev
	@set -e; sources=$${LLAMA_CPP_SDIST:-$$($(PY) -m tests.support.llama_cpp_sources)}; \
	export XDG_CACHE_HOME='$(abspath $(VENV))/cache'; $(PY) -m trioserve rpc build --sources "$$sources"; \
	TEST_RPC=1 $(PY) -m pytest tests/rpc $(PYTEST_ARGS)

# By default the newest Ray that pyproject.toml allows. Earlier ones do not know protobuf 7.
RAY ?=
RAY_VENV := .venv-ray$(if $(RAY),-$(RAY))

test-ray:
	@$(MAKE) --no-print-directory VENV=$(RAY_VENV) EXTRAS='media speech tools ray' GROUPS=test CONSTRAINTS= \
		$(if $(RAY),MORE="'ray[serve]==$(RAY)' 'protobuf<7'") $(RAY_VENV)/.installed-dev
	@TEST_RAY=1 $(RAY_VENV)/bin/python -m pytest tests/ray tests/ray_cluster $(PYTEST_ARGS)

test-hostile: $(VENV)/.installed-dev
	@TEST_HOSTILE=1 $(PY) -m pytest -n $(PYTEST_PROCESSES) tests/hostile $(PYTEST_ARGS)

CONTAINER_ENGINE ?= docker
IMAGE ?= trioserve
IMAGE_ARGS ?=

test-image: $(VENV)/.installed-dev
	@$(CONTAINER_ENGINE) build -f examples/deploy/Dockerfile -t $(IMAGE) $(IMAGE_ARGS) .
	@TEST_IMAGE=$(IMAGE) CONTAINER_ENGINE='$(CONTAINER_ENGINE)' $(PY) -m pytest tests/deploy/test_image.py $(PYTEST_ARGS)

test-lowest:
	@$(MAKE) --no-print-directory VENV=.venv-lowest .venv-lowest/bin/python
	@.venv-lowest/bin/python -c 'import tomllib; settings = tomllib.load(open("pyproject.toml", "rb")); \
		extras = settings["project"]["optional-dependencies"]; \
		print(*(one.replace(">=", "==") for one in [*settings["project"]["dependencies"], *extras["media"], \
		*extras["tools"], extras["speech"][0], *settings["dependency-groups"]["test"]]), sep="\n")' \
		> .venv-lowest/lowest.txt
	@$(MAKE) --no-print-directory VENV=.venv-lowest GROUPS=test CONSTRAINTS=.venv-lowest/lowest.txt \
		.venv-lowest/.installed-dev
	@.venv-lowest/bin/python -m pytest $(FAST) $(PYTEST_ARGS)

wheel: $(VENV)/.installed-dev
	@$(PY) -m pip wheel -qq --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist

# Without the constraints: users install the newest versions that fit.
PYTHONS ?= python3.11 python3.12 python3.13 python3.14

test-wheel: $(VENV)/.installed-release
	@$(PY) -m tests.wheel $(PYTHONS)

# Imports that are not declared, and versions with a known vulnerability; docs/security.md explains the exception.
audit: $(VENV)/.installed-release
	@$(PY) -m deptry .
	@$(PY) -m pip_audit --requirement constraints.txt --disable-pip --no-deps --ignore-vuln CVE-2025-69872

clean:
	@rm -rf site dist build .coverage .coverage.* .cache .mypy_cache .pytest_cache .ruff_cache \
		.hypothesis .import_linter_cache *.egg-info
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	@rm -rf .venv .venv-deploy .venv-lowest .venv-clients .venv-ray .venv-ray-*

# -- the environment

# Extras of trioserve, and groups of pyproject.toml, separated by spaces. The bundled model shows what these two add.
EXTRAS ?= media speech tools
GROUPS ?= dev
# Requirements beside them.
MORE ?=
# The versions that are installed. Empty: the newest that fit.
CONSTRAINTS ?= constraints.txt
# Settings of llama.cpp's build, such as -DGGML_CUDA=on; or an index that has wheels of llama-cpp-python (docs/install.md).
CMAKE_ARGS ?=
LLAMA_CPP_INDEX ?=

# uv is faster where it is installed. The pip of an older Python has to learn about groups first.
UV := $(shell command -v uv 2>/dev/null)
PIP := $(PY) -m pip install -qq --disable-pip-version-check
# An index may have another version of llama-cpp-python than the one in the constraints, and so may the Python of .venv.
FREE := $(VENV)/constraints.txt
INSTALL = $(if $(CONSTRAINTS),grep -v '^llama-cpp-python==' $(CONSTRAINTS) > $(FREE) || :;) \
	$(if $(UV),$(UV) pip install --quiet --python $(PY),$(PIP) 'pip>=25.1' && $(PIP)) \
	$(if $(CONSTRAINTS),--constraint $(if $(LLAMA_CPP_INDEX)$(wildcard $(VENV)/.copied),$(FREE),$(CONSTRAINTS))) \
	$(if $(LLAMA_CPP_INDEX),--extra-index-url '$(LLAMA_CPP_INDEX)' $(if $(UV),,--prefer-binary))
# pip would take a wheel from its cache that was built with other settings.
COMPILED := $(if $(CMAKE_ARGS),$(if $(UV),--refresh-package llama-cpp-python --no-binary-package llama-cpp-python,\
	--no-cache-dir --no-binary llama-cpp-python))
comma := ,
space := $() $()
TRIOSERVE = --editable '.$(if $(EXTRAS),[$(subst $(space),$(comma),$(strip $(EXTRAS)))])'

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
	"$$found" -m venv $(VENV); \
	$(if $(CMAKE_ARGS)$(LLAMA_CPP_INDEX),,"$$found" .ci/copy_llama_cpp.py $(VENV))

# pip and uv keep the wheel of llama.cpp in their caches, so the slow build happens once for each Python.
define announce
	@$(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("llama_cpp") is None)' \
		|| echo "Installing. If llama.cpp has to be compiled, this takes 4 to 8 minutes on 2 cores."
endef

$(VENV)/.installed: pyproject.toml constraints.txt | $(PY)
	$(announce)
	@$(INSTALL) $(COMPILED) $(TRIOSERVE)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(PY)
	$(announce)
	@$(INSTALL) $(COMPILED) $(TRIOSERVE) $(addprefix --group ,$(GROUPS)) $(MORE)
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-release: $(VENV)/.installed-dev
	@$(INSTALL) --group release
	@touch $@

$(VENV)/.installed-fuzz: $(VENV)/.installed-dev
	@$(INSTALL) --group fuzz
	@touch $@

LOCK := uv pip compile --quiet --universal --python-version 3.11 --no-annotate --custom-compile-command 'make lock'

lock:
	@command -v uv >/dev/null || { echo "make lock needs uv: pip install uv" >&2; exit 1; }
	@$(LOCK) --upgrade pyproject.toml --group dev --group deploy --group fuzz --group release \
		--extra all --output-file constraints.txt
