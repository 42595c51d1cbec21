# make demo         train a small network plainly and accumulated, and compare (one to two minutes)
# make test         everything that CI runs: check, then the test suite
# make check        formatting, lint and types
# make test-oldest  the test suite with the oldest supported TensorFlow and Keras (.ci/oldest.txt)
# make bench        what a step costs, in time and memory
# make clean        remove environments, caches and build products
#
# Each target makes the environment that it needs from a Python found here. To choose one: make test PYTHON=/path/to/python

.PHONY: demo test check pytest test-oldest bench clean
.DEFAULT_GOAL := test

export TF_CPP_MIN_LOG_LEVEL ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

# $(call find-python,newest minor version): the first Python 3.10 or newer, up to that version, that runs and can make
# environments. Each candidate is run: a name on the PATH may be a shim without an interpreter behind it.
find-python = $(shell \
	for python in python3 python3.13 python3.12 python3.11 python3.10 python "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/3.1[0-3]*/bin/python; do \
		"$$python" -c 'import ensurepip, sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, $(1)))' >/dev/null 2>&1 \
		&& echo "$$python" && break; \
	done)

# $(call make-env,folder,python): an environment with pip and nothing else.
make-env = @test -n "$(2)" || { echo "No suitable Python found. Install one with venv, or name it: make PYTHON=..." >&2; exit 1; }; \
	echo "Making $(1) with $$("$(2)" --version)" && "$(2)" -m venv $(1) && touch $@

PYTHON ?= $(call find-python,13)
# TensorFlow 2.16 has no build for Python 3.13.
PYTHON_OLDEST ?= $(call find-python,12)

demo: .venv/demo-installed
	.venv/bin/python examples/demo.py

test: check pytest

check: .venv/dev-installed
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

pytest: .venv/dev-installed
	.venv/bin/python -m pytest -n 2

test-oldest: .venv-oldest/dev-installed
	.venv-oldest/bin/python -m pytest -n 2

bench: .venv/dev-installed
	.venv/bin/python benchmarks/step_cost.py

# Stamps: an environment is installed again only when pyproject.toml (or the oldest versions) changed.

.venv/made:
	$(call make-env,.venv,$(PYTHON))

.venv-oldest/made: .ci/oldest.txt
	$(call make-env,.venv-oldest,$(PYTHON_OLDEST))

.venv/%-installed: pyproject.toml | .venv/made
	@echo "Installing .[cpu,$*] into .venv; TensorFlow is a large download"
	.venv/bin/python -m pip install --quiet --editable '.[cpu,$*]'
	@touch $@

.venv-oldest/%-installed: pyproject.toml .venv-oldest/made
	@echo "Installing .[cpu,$*] into .venv-oldest; TensorFlow is a large download"
	.venv-oldest/bin/python -m pip install --quiet --constraint .ci/oldest.txt --editable '.[cpu,$*]'
	@touch $@

clean:
	rm -rf .venv .venv-oldest .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist demo.png
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
