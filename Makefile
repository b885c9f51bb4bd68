# Everything on a fresh machine: `make demo` or `make test`. Needs only make and Python >= 3.11.
# Each target makes .venv and installs what it needs into it, once; a change of pyproject.toml installs again.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# The torch that types and tests are written against; `make test TORCH=torch` takes the newest that we let in.
TORCH  ?= torch<2.14
# Test processes (JOBS=0: in one): one more than two cores, because a test that waits for a browser or another process
# leaves its core idle. Each begins with its share of the tests, slow files first, and takes over from the others when it
# is done: a file's tests share what is dear to make, such as a browser, and no core waits for the longest file. One
# thread in each: the networks in the tests are small, and the sums come out alike on every machine. Bytecode is kept,
# also where containers say that it need not be: else each of many processes compiles all files again.
JOBS   ?= 3
PYTEST  = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint ruff browser format docs bench clean distclean

help:  ## list the targets
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-18s %s\n", $$1, $$2}'

demo: $(VENV)/.installed-page  ## train LeNet-5 at 20 % of its MACs, compact it, print the report, make its page: a minute or two
	@rm -rf runs/demo
	$(BIN)/python -m ellzero train demo --out runs/demo

test: ruff  ## run the linter, and all tests and doctests, of which the type checker is one (JOBS=0: in one process)
	@$(PYTEST)

lint: ruff  ## run the linter and the type checker only
	$(BIN)/mypy

ruff: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

browser:  ## install Debian's chromium, if there is no browser, for the tests of the pages (else they are skipped)
	@for name in "$$ELLZERO_BROWSER" chromium chromium-browser google-chrome google-chrome-stable chrome; do \
	  [ -n "$$name" ] && command -v "$$name" >/dev/null && exit 0; done; \
	if [ "$$(id -u)" -eq 0 ]; then root=env; elif sudo -n true 2>/dev/null; then root="sudo -n"; fi; \
	if [ -z "$$root" ] || ! command -v apt-get >/dev/null; then \
	  echo "no browser is installed, and apt-get or the right to use it is missing: the tests of the pages are skipped" >&2; \
	  exit 0; fi; \
	echo "installing chromium"; \
	apt="$$root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300"; \
	said=$$($$apt update 2>&1 && $$apt install -y --no-install-recommends chromium 2>&1) || { \
	  echo "$$said" | tail -n 5 >&2; echo "chromium could not be installed: the tests of the pages are skipped" >&2; }

format: $(VENV)/.installed-test  ## format the code and fix what the linter can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs  ## build the documentation into docs/_build/html; a warning fails
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

bench: $(VENV)/.installed-examples  ## print the numbers of docs/costs.md: a training step, inference, attach and compact
	$(BIN)/python benchmarks/step_overhead.py --json results/benchmarks/step_overhead.json
	$(BIN)/python benchmarks/step_overhead.py --families --blocks 5 --steps 4 --json results/benchmarks/step_families.json
	$(BIN)/python benchmarks/inference.py --json results/benchmarks/inference.json
	$(BIN)/python benchmarks/attach_compact.py --json results/benchmarks/attach_compact.json

clean:  ## remove caches and build outputs
	rm -rf build dist docs/_build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests examples benchmarks docs -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean  ## remove the virtual environment too
	rm -rf $(VENV)

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ellzero needs Python 3.11 or newer, and \`$(PYTHON)\` is $$($(PYTHON) --version 2>&1 | head -n 1)." >&2; \
	  echo "Name another one: make $(or $(firstword $(MAKECMDGOALS)),test) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.installed-%: pyproject.toml | $(VENV)/.created
	@echo "installing ellzero[$*] into $(VENV); the first time this takes a minute or two"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[$*]' '$(TORCH)'
	@touch $@
