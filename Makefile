# Every verb builds .venv when it is missing. PYTHON chooses the interpreter it is built from.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Two workers with one thread each: torch with two threads beside another busy process crawls.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Those that users install; `make dist EXTRAS=cli` tries this one alone.
EXTRAS ?= progress cli demo masks scipy transformers lightning attribution bench experiments

.PHONY: setup demo test lint docs bench experiments-small dist clean
.DEFAULT_GOAL := setup

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

setup: $(READY)  ## build .venv with what development needs

demo: $(READY)  ## prune and train a small network, compare with baselines, write a report: a minute
	$(BIN)/python -m mfac demo

test: $(READY)  ## the whole test suite
	$(TEST_ENV) $(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(READY)  ## the documentation as a site, build/site/index.html; a warning is an error
	$(BIN)/mkdocs build --quiet --strict
	@echo "open build/site/index.html"

bench: $(READY)  ## measure against the paper's algorithms, other libraries and the limits of the machine
	$(BIN)/python benchmarks/run.py

experiments-small: $(READY)  ## run the paper's experiments at a size for two cores, in build/experiments
	MFAC_RESULTS=build/experiments $(TEST_ENV) $(BIN)/python -m experiments run all --size small --jobs 2

dist: $(READY)  ## build sdist and wheel, check them, and run the README's code on the wheel: alone, and with each extra
	rm -rf dist build
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(MAKE) --no-print-directory $(addprefix wheel-,alone $(EXTRAS))

wheel-%:  # in an empty environment, which is removed if all went well
	rm -rf build/wheel-$* && $(PYTHON) -m venv build/wheel-$*
	build/wheel-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt \
		"$$(ls dist/*.whl)$(if $(filter alone,$*),,[$*])"
	cd build/wheel-$* && bin/python ../../tests/support/installed.py $*
	rm -rf build/wheel-$*

clean:  ## remove what the other verbs made
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
