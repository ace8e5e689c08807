# Two commands on a fresh machine: `make demo` and `make test`. Both set up $(VENV) first; a second call finds it ready.

PYTHON ?= python3
VENV ?= .venv
OUT ?= out/demo
PORT ?= 3000
TESTERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
BASE := $(VENV)/.installed-base
DEV := $(VENV)/.installed-dev

# No model or data set is fetched at run time, and the service reports to no one.
export HF_HUB_OFFLINE ?= 1
export BENTOML_DO_NOT_TRACK ?= True
export TOKENIZERS_PARALLELISM ?= false

.DELETE_ON_ERROR:
.PHONY: help demo test check serve bench lock clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

demo: $(BASE) ## run the main job on the embedded default; says where the page is (OUT=folder)
	$(BIN)/pfungst demo --out "$(OUT)"

# Two processes of one thread each: small networks gain little from a second thread, and time limits were set on 2 cores.
# A file's tests stay together, for they share what they built.
test: export OMP_NUM_THREADS ?= 1
test: $(DEV) ## run all tests, the slow ones included (TESTERS=2 processes)
	$(BIN)/python -m pytest --numprocesses $(TESTERS) --dist loadfile

check: $(DEV) ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

serve: $(BASE) ## serve audits on 127.0.0.1 (PORT=3000)
	$(BIN)/bentoml serve service:Audit --port $(PORT)

BENCHMARKS := $(patsubst benchmarks/%.py,%,$(wildcard benchmarks/[a-z]*.py)) $(patsubst benchmarks/%/__main__.py,%,$(wildcard benchmarks/*/__main__.py))

bench: $(BASE) ## run every benchmark, one after the other
	@test -n "$(BENCHMARKS)" || { echo "make bench: benchmarks/ holds no benchmark, so there is nothing to run." >&2; exit 2; }
	@set -e; for name in $(BENCHMARKS); do echo "benchmarks.$$name"; $(BIN)/python -m benchmarks.$$name; done

# Torch first and pinned: a resolver that meets an open range elsewhere would fetch a newer build of several GB.
# A stamp is older than pyproject.toml or constraints.txt exactly when something has to be installed again.
$(BASE): pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt -e '.[dev,rtx]'
	@touch $(BASE) $@

# bin/pip and not bin/python is the target: where Debian's python3-venv is missing, only the latter is made.
$(BIN)/pip:
	@$(REQUIRE_PYTHON)
	$(PYTHON) -m venv $(VENV)

define REQUIRE_PYTHON
command -v $(PYTHON) >/dev/null \
	|| { echo "Pfungst needs Python 3.11 or newer, and $(PYTHON) was not found. Name one: make PYTHON=..." >&2; exit 2; }; \
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	|| { echo "Pfungst needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=..." >&2; exit 2; }
endef

# pip's report says torch 2.13.0+cpu; without the local label, the same pin takes any build of that version.
define WRITE_CONSTRAINTS
import json, platform, sys
packages = [entry["metadata"] for entry in json.load(sys.stdin)["install"]]
pins = [p["name"] + "==" + p["version"].split("+")[0] for p in packages if p["name"] != "pfungst"]
python = ".".join(platform.python_version_tuple()[:2])
print(f"# Exact versions for Python {python} on {platform.system()} {platform.machine()}, with the extras dev and rtx.")
print("# Written by make lock; the ranges stand in pyproject.toml.")
print(*sorted(pins, key=str.lower), sep="\n")
endef
export WRITE_CONSTRAINTS

lock: ## resolve the newest versions that the ranges allow and write constraints.txt
	@$(REQUIRE_PYTHON)
	@set -e; scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	$(PYTHON) -m venv "$$scratch/venv"; \
	"$$scratch/venv/bin/pip" install --quiet --disable-pip-version-check --dry-run --report "$$scratch/report.json" '.[dev,rtx]'; \
	"$$scratch/venv/bin/python" -c "$$WRITE_CONSTRAINTS" < "$$scratch/report.json" > "$$scratch/constraints.txt"; \
	cp "$$scratch/constraints.txt" constraints.txt

clean: ## remove the environment, caches and demo output
	rm -rf $(VENV) out build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
