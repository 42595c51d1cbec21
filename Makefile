# make demo            train a small network in three ways, and compare (some minutes);
#                      make demo BACKEND=jax, or torch, with Keras on another backend
# make test            check, then the tests that are not marked thorough (about eight minutes on two cores); CI runs this, test-backends and test-tf1
# make test-all        all tests, with those marked thorough (about an hour)
# make check           formatting, lint and types
# make mutants         break the package in many ways, one at a time, and see whether a test notices (a quarter of an hour)
# make test-oldest     the tests with the oldest supported TensorFlow and Keras (.ci/oldest.txt)
# make test-backends   the equivalence cases, and more, with Keras on JAX and on torch, without TensorFlow (.ci/backends.txt)
# make test-differential  compares the package with that of version 0.2.0 on random cases, on each backend (half an hour)
# make test-hub        models of KerasHub: one with LoRA, as a script and as a notebook, and three in which no examples meet
#                      (keras-hub brings tensorflow-text, and that TensorFlow)
# make test-tf1        GradientAccumulator's tests with TensorFlow 1.14 (.ci/tf1.txt), from the built wheel; needs Python 3.7
# make bench           the first step, and the time and memory of an update, against their targets, on each backend (over an hour)
# make bench-peers     the same with gradient-accumulator and PyTorch, in environments of their own (ten minutes more)
# make bench-replicas  the cost of exchanging gradients between two workers, and a model of it (about ten minutes)
# make pictures        the pictures of README and docs, from the results of make bench
# make docs            the site, into build/site; fails on any broken link
# make docs-serve      the site on http://127.0.0.1:8000, rebuilt when a page changes
# make test-docs       the site in a real browser, without a window; needs chromium
# make test-install    wheel and sdist, installed into clean environments of each Python found
# make clean           remove environments, caches and build products
#
# Each target makes the environment that it needs from a Python found here. To choose one: make test PYTHON=/path/to/python

PHONY_DOCS = pictures docs docs-serve test-docs test-install
.PHONY: $(PHONY_DOCS) demo test check environments pytest test-all test-oldest test-backends test-jax test-torch test-differential test-hub test-tf1 pytest-tf1 mutants bench bench-peers bench-replicas clean
.DEFAULT_GOAL := test

export TF_CPP_MIN_LOG_LEVEL ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1
# Python writes bytecode of what it imports. Of most modules of a backend nobody needs any.
export PIP_NO_COMPILE ?= 1
export PYTHONDONTWRITEBYTECODE =
# Material for MkDocs tells of its successor in each build.
export NO_MKDOCS_2_WARNING ?= 1

# $(call find-python,oldest,newest): the first Python between these minor versions of Python 3 that runs and can make
# environments. Each candidate is run: a name on the PATH may be a shim without an interpreter behind it.
find-python = $(shell \
	for python in python3 python3.13 python3.12 python3.11 python3.10 python3.7 python "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.*/bin/python; do \
		"$$python" -c 'import ensurepip, sys; sys.exit(not (3, $(1)) <= sys.version_info[:2] <= (3, $(2)))' >/dev/null 2>&1 \
		&& echo "$$python" && break; \
	done)

# $(call make-env,folder,python): an environment with pip and nothing else.
make-env = @test -n "$(2)" || { echo "No suitable Python found. Install one with venv, or name it: make PYTHON=..." >&2; exit 1; }; \
	echo "Making $(1) with $$("$(2)" --version)" && "$(2)" -m venv $(1) && touch $@

# $(call install-tf-keras,folder): the tf_keras that matches the TensorFlow in there. Without its dependencies: they would
# put the full TensorFlow package over tensorflow-cpu.
install-tf-keras = version=$$($(1)/bin/python -c 'from importlib.metadata import distributions as find; \
		version = next(found.version for name in ("tensorflow-cpu", "tensorflow") for found in find(name=name)); \
		print(*version.split(".")[:2], sep=".")') && \
	{ $(1)/bin/python -m pip install --quiet --no-deps "tf_keras~=$$version.0" 2>/dev/null \
	|| echo "tf_keras $$version could not be installed into $(1): the tests that need it will be skipped" >&2; }

PYTHON ?= $(call find-python,10,13)
# TensorFlow 2.16 has no build for Python 3.13.
PYTHON_OLDEST ?= $(call find-python,10,12)
# TensorFlow 1.14 has none for Python 3.8.
PYTHON_TF1 ?= $(call find-python,7,7)

# Which backend of Keras the demo runs on, in an environment of its own.
BACKEND ?= tensorflow
DEMO_ENV = $(if $(filter tensorflow,$(BACKEND)),.venv,.venv-$(BACKEND))

demo: $(DEMO_ENV)/demo-installed
	KERAS_BACKEND=$(BACKEND) $(DEMO_ENV)/bin/python examples/demo.py

test: check pytest

check: .venv/dev-installed
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

# Neighbours stay in one process as long as both have work: they share what they compare with. Three
# processes: some tests wait, for processes of their own.
PYTEST = -m pytest -n 3 --dist worksteal --durations 10
# The folders of tests that JAX and torch run, too. A file that imports TensorFlow is left out there.
ON_BACKENDS = tests/contract tests/contract_of_keras tests/equivalence tests/fit tests/loops

pytest: .venv/dev-installed
	.venv/bin/python $(PYTEST)

test-all: .venv/dev-installed .venv-jax/test-installed .venv-torch/test-installed
	.venv/bin/python $(PYTEST) -m ""
	KERAS_BACKEND=jax .venv-jax/bin/python $(PYTEST) -m "" $(ON_BACKENDS)
	KERAS_BACKEND=torch .venv-torch/bin/python $(PYTEST) -m "" $(ON_BACKENDS)

test-oldest: .venv-oldest/dev-installed
	.venv-oldest/bin/python $(PYTEST)

# All that CI needs.
environments: .venv/dev-installed .venv-jax/test-installed .venv-torch/test-installed $(if $(PYTHON_TF1),.venv-tf1/installed)

test-backends: test-jax test-torch

test-jax test-torch: test-%: .venv-%/test-installed
	KERAS_BACKEND=$* .venv-$*/bin/python $(PYTEST) $(ON_BACKENDS)

# How many cases on each backend, and which: make test-differential CASES=20 SEED=1000
CASES ?= 100
SEED ?= 0

test-differential: .venv/dev-installed .venv-jax/test-installed .venv-torch/test-installed
	@status=0; for pair in tensorflow:.venv jax:.venv-jax torch:.venv-torch; do \
		$${pair#*:}/bin/python tests/differential --backend $${pair%%:*} --cases $(CASES) --seed $(SEED) || status=1; \
	done; exit $$status

test-hub: .venv-hub/installed
	.venv-hub/bin/python -m pytest -m "" -k "lora or keras_hub" tests/processes/test_run.py tests/processes/test_notebooks.py tests/fit/test_interaction.py

mutants: .venv/dev-installed
	.venv/bin/python tests/mutants

# Python 3.7 is past its end of life, so few machines have it: its absence is no failure, but is not passed over in silence.
test-tf1:
	@if test -n "$(PYTHON_TF1)"; then $(MAKE) --no-print-directory pytest-tf1; else { \
		echo "****************************************************************************"; \
		echo "The TensorFlow 1.14 tests were NOT RUN: they need Python 3.7, not found here."; \
		echo "To run them, install it, for instance with: pyenv install 3.7"; \
		echo "or name one: make test-tf1 PYTHON_TF1=/path/to/python3.7"; \
		echo "****************************************************************************"; \
	} >&2; fi

# Without pyproject.toml's options for pytest, which make errors of TensorFlow 1.14's own warnings, and without conftest.py,
# which is for Keras 3. The silent line makes sure that the tests get the package from the wheel.
pytest-tf1: export PYTHONPATH =
pytest-tf1: .venv-tf1/installed
	rm -rf build/tf1
	.venv-tf1/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir build/tf1 .
	.venv-tf1/bin/python -m pip install --quiet --force-reinstall --no-deps build/tf1/*.whl
	@.venv-tf1/bin/python -c 'import importlib.util as u, sys; path = u.find_spec("macrobatch").origin; \
		sys.exit(0 if path.startswith(sys.prefix) else "Not the installed package: " + path)'
	.venv-tf1/bin/python -W ignore -m pytest -q -c /dev/null --rootdir . --noconftest -p no:cacheprovider tests/loops/test_accumulator_everywhere.py

# matplotlib comes with the demo.
bench: .venv/demo-installed .venv-jax/test-installed .venv-torch/test-installed
	.venv/bin/python benchmarks/bench.py

bench-peers: .venv/demo-installed .venv-jax/test-installed .venv-torch/test-installed
	.venv/bin/python benchmarks/environments.py
	.venv/bin/python benchmarks/bench.py --peers

bench-replicas: .venv/demo-installed
	.venv/bin/python benchmarks/replicas.py

pictures: .venv/demo-installed
	.venv/bin/python docs/pictures/draw.py

docs: .venv-docs/installed
	.venv-docs/bin/mkdocs build --strict --quiet

docs-serve: .venv-docs/installed
	.venv-docs/bin/mkdocs serve

test-docs: docs
	.venv-docs/bin/python .ci/test_site.py build/site

test-install: .venv/dev-installed
	.venv/bin/python .ci/test_install.py

# Stamps: an environment is installed again only when pyproject.toml (or its file in .ci) changed.

.venv/made:
	$(call make-env,.venv,$(PYTHON))

.venv-oldest/made: .ci/oldest.txt
	$(call make-env,.venv-oldest,$(PYTHON_OLDEST))

.venv-jax/made .venv-torch/made: .venv-%/made: .ci/backends.txt
	$(call make-env,.venv-$*,$(PYTHON))

.venv-tf1/made: .ci/tf1.txt
	$(call make-env,.venv-tf1,$(PYTHON_TF1))

.venv/%-installed: pyproject.toml | .venv/made
	@echo "Installing .[cpu,$*] into .venv; TensorFlow is a large download"
	.venv/bin/python -m pip install --quiet --editable '.[cpu,$*]'
	$(if $(filter dev,$*),@$(call install-tf-keras,.venv))
	@touch $@

.venv-oldest/%-installed: pyproject.toml .venv-oldest/made
	@echo "Installing .[cpu,$*] into .venv-oldest; TensorFlow is a large download"
	.venv-oldest/bin/python -m pip install --quiet --constraint .ci/oldest.txt --editable '.[cpu,$*]'
	$(if $(filter dev,$*),@$(call install-tf-keras,.venv-oldest))
	@touch $@

.venv-docs/made:
	$(call make-env,.venv-docs,$(PYTHON))

# Without the package itself: the site is made from its sources.
.venv-docs/installed: pyproject.toml | .venv-docs/made
	@sed -n 's/^docs = \[\(.*\)\]$$/\1/p' pyproject.toml | tr -d '"' | tr ',' '\n' > .venv-docs/requirements.txt
	.venv-docs/bin/python -m pip install --quiet --requirement .venv-docs/requirements.txt
	@touch $@

.venv-jax/%-installed: pyproject.toml .venv-jax/made
	@echo "Installing .[jax,$*] into .venv-jax; JAX is a large download"
	.venv-jax/bin/python -m pip install --quiet --constraint .ci/backends.txt --editable '.[jax,$*]'
	@touch $@

.venv-torch/%-installed: pyproject.toml .venv-torch/made
	@echo "Installing .[torch,$*] into .venv-torch; torch is a large download"
	.venv-torch/bin/python -m pip install --quiet --constraint .ci/backends.txt --editable '.[torch,$*]'
	@touch $@

.venv-hub/made:
	$(call make-env,.venv-hub,$(PYTHON))

# Without an extra for TensorFlow: keras-hub brings tensorflow-text, and that needs the plain package.
.venv-hub/installed: pyproject.toml | .venv-hub/made
	@echo "Installing .[test] and keras-hub into .venv-hub; TensorFlow is a large download"
	.venv-hub/bin/python -m pip install --quiet --editable '.[test]' keras-hub
	@touch $@

.venv-tf1/installed: .venv-tf1/made
	@echo "Installing .ci/tf1.txt into .venv-tf1; TensorFlow is a large download"
	.venv-tf1/bin/python -m pip install --quiet --requirement .ci/tf1.txt
	@touch $@

clean:
	rm -rf .venv .venv-docs .venv-hub .venv-jax .venv-oldest .venv-tf1 .venv-peers .venv-peers-jax .venv-peers-torch .venv-torch .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist demo.png contrastive.png retrieval.png
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
