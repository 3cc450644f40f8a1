# Every verb builds .venv when it is missing. PYTHON chooses the interpreter it is built from.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Two workers with one thread each: torch with two threads beside another busy process crawls.
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

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

dist: $(READY)  ## build the wheel, install it into an empty environment and import it
	rm -rf dist build
	$(BIN)/python -m build --wheel --outdir dist
	rm -rf build/wheel-check && $(PYTHON) -m venv build/wheel-check
	build/wheel-check/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt dist/*.whl
	cd build && wheel-check/bin/python -c "import mfac; print('torch-mfac', mfac.__version__, 'imports from', mfac.__file__)"

clean:  ## remove what the other verbs made
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
