# `make demo` and `make test` set up .venv by themselves; a second run does nothing but the work.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
TORCH := $(shell grep '^torch==' requirements-cpu.txt)
HUB := keras-hub==0.32.0
STAMP := .venv/.installed

.PHONY: venv demo notebook check check-tests test test-changed test-full coverage docs test-versions test-canary lint types wheel

venv: $(STAMP)

# torch first, alone and pinned: whatever is installed after it finds it there and pulls no other build.
# The editable install is setuptools' default one: its import finder maps keras_flow.backends to the folder backends/
# (the "compat" mode would not).
$(STAMP): pyproject.toml setup.py requirements-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing torch, 0.8 GB (1 of 3)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	@echo "installing Keras, JAX, TensorFlow and what the examples and tests need, 2.6 GB (2 of 3)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-cpu.txt -e '.[examples,test]'
	@echo "installing KerasHub (3 of 3)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(HUB)
	touch $@

demo: venv
	$(BIN)/keras-flow compare examples/digits.py --out demo-out

# JupyterLab on the notebooks; KERAS_BACKEND chooses the engine (default: jax, as their first cells say).
notebook: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[notebook]'
	$(BIN)/jupyter lab notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

# What needs no engine, in under a minute: its three parts at the same time.
check: venv
	$(MAKE) --no-print-directory --jobs 3 --output-sync=target lint types check-tests

check-tests: venv
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m check

# A fixed part of all tests, the same on every day and machine. Two workers; all tests that ask for the ranks of one
# engine are run by the same one. What is marked `full` is left out.
test: venv
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup

# All tests of the files that commits have changed in the last day (or `SINCE="2 weeks ago"`), what is marked `full` as
# well; MARKED=full is that alone, after `make test`. Tests of most of the changed files come first. No test begins after
# BUDGET seconds (0: no limit); those are counted as skipped.
SINCE ?= 1 day ago
BUDGET ?= 0
MARKED ?= full or not full
test-changed: venv
	tests=$$($(BIN)/python -m tests.who --since "$(SINCE)"); \
	[ -z "$$tests" ] || $(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "$(MARKED)" --budget $(BUDGET) $$tests || [ $$? = 5 ]  # 5: none is marked so

# What `make test` leaves out, in seven parts for seven nights: `make test-full PART=3/7`; without PART all of it.
# Parts 5 to 7 have the long programs as well: the parity grid with the product of models, optimizers and options, which
# writes docs/features.md (about 80 minutes on 2 cores); the sweep over Keras's public names, which writes docs/support.md
# and docs/support.csv; and the common models, which write docs/models.md. The last two go on where they were stopped.
PART ?=
FULL = $(BIN)/python -m pytest -q -n 2 --dist loadgroup -m full --deselect tests/parity/test_grid.py::test_numbers_of_one_device
test-full: venv
ifeq ($(PART),)
	$(MAKE) --no-print-directory test
	$(FULL)
	$(MAKE) --no-print-directory test-product test-sweep test-models
else
	$(FULL) --part $(PART)
	$(if $(filter 5/7,$(PART)),$(MAKE) --no-print-directory test-product)
	$(if $(filter 6/7,$(PART)),$(MAKE) --no-print-directory test-sweep)
	$(if $(filter 7/7,$(PART)),$(MAKE) --no-print-directory test-models)
endif

.PHONY: test-product test-sweep test-models
test-product: venv
	$(BIN)/python -m tests.parity.support --product

test-sweep: venv
	$(BIN)/python -m tests.sweep.runner --out sweep-out
	$(BIN)/python -m tests.sweep.support --from sweep-out --fresh

test-models: venv
	for backend in jax torch tensorflow; do $(BIN)/python -m tests.models.worker --backend $$backend --out models-out/$$backend.jsonl || exit 1; done
	$(BIN)/python -m tests.models.worker --docs models-out

# Lines that `make test` runs, in all processes; about twice its time.
coverage: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'coverage>=7.10'
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/python -m coverage run -m pytest -q -n 2 --dist loadgroup
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --sort=cover

# The documentation site, in build/site. DOCS=--no-execute does not run the notebooks: a minute instead of ten.
docs: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/python docs/site.py $(DOCS)

# The oldest and newest versions of Keras and the engines; writes docs/versions.md and backends/fingerprints.json. Later
# versions of Python, which must be on the PATH: `python -m tests.versions.runner --pythons`.
test-versions: venv
	$(BIN)/python -m tests.versions.runner

# The nightly Keras, in front of that of .venv; its rows in docs/versions.md have the date.
test-canary: venv
	$(BIN)/python -m tests.versions.runner --canary

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Types are checked on the installed package: keras_flow.backends has its name only there.
types: venv
	rm -rf build/types build/lib
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target build/types .
	$(BIN)/pyright

wheel: venv
	rm -rf dist build/lib
	$(BIN)/python -m build --wheel --outdir dist .
