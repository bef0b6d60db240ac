# `make demo` and `make test` set up .venv by themselves; a second run does nothing but the work.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
TORCH := $(shell grep '^torch==' requirements-cpu.txt)
HUB := keras-hub==0.32.0
STAMP := .venv/.installed

.PHONY: venv demo notebook check check-tests test test-full coverage docs test-versions lint types wheel

venv: $(STAMP)

# torch first, alone and pinned: whatever is installed after it finds it there and pulls no other build.
# The editable install is setuptools' default one: its import finder maps keras_flow.backends to the folder backends/
# (the "compat" mode would not).
$(STAMP): pyproject.toml setup.py requirements-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-cpu.txt -e '.[examples,test]'
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

# Two workers; all tests that ask for the ranks of one engine are run by the same one. What is marked `full` is left out.
test: venv
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup

# The suite and what it leaves out; the parity grid with the product of models, optimizers and options, which writes
# docs/features.md (about 80 minutes on 2 cores).
# Then the sweep over Keras's public names, which writes docs/support.md and docs/support.csv, and the common models, which
# write docs/models.md. Both go on where they were stopped.
test-full: test
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m full --deselect tests/parity/test_grid.py::test_numbers_of_one_device
	$(BIN)/python -m tests.parity.support --product
	$(BIN)/python -m tests.sweep.runner --out sweep-out
	$(BIN)/python -m tests.sweep.support --from sweep-out --fresh
	for backend in jax torch tensorflow; do $(BIN)/python -m tests.models.worker --backend $$backend --out models-out/$$backend.jsonl || exit 1; done
	$(BIN)/python -m tests.models.worker --docs models-out

# Lines that `make test` runs, in all processes; about twice its time.
coverage: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'coverage>=7.10'
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/python -m coverage run -m pytest -q -n 2 --dist loadgroup
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --sort=cover

# The documentation site, in build/site; DOCS=--no-execute shows the notebooks without outputs, in seconds.
docs: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[docs]'
	$(BIN)/python docs/site.py $(DOCS)

# The oldest and newest versions of Keras and the engines; writes docs/versions.md and backends/fingerprints.json.
test-versions: venv
	$(BIN)/python -m tests.versions.runner

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
