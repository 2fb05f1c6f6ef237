# Two commands do everything on a fresh machine: `make sweep` and `make test`.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin/python
READY  := $(VENV)/.ready
ARGS   ?= hw=b200
export OMP_NUM_THREADS ?= 1

.PHONY: sweep test lint bench faults checkpoint gate clean
.DEFAULT_GOAL := sweep

$(READY): pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q -e '.[test,launchers]'
	touch $@

sweep: $(READY)            ## the main job: every preparation path for ARGS (default hw=b200)
	$(RUN) -m harness sweep $(ARGS)

test: lint                 ## everything: lint, types, all tests
	$(RUN) -m pytest -n 2 --dist worksteal

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(READY)            ## CPU times of the reference routines, by pytest-benchmark
	mkdir -p results/runs
	$(RUN) -m pytest tests/bench --benchmark-only -n 0 --benchmark-json=results/runs/bench.json

faults: $(READY)           ## the fault suite alone
	$(RUN) -m pytest tests/faults -n 2 --dist worksteal

checkpoint: $(READY)       ## a small checkpoint of each kind, to try source=safetensors on
	$(RUN) -m harness checkpoint

gate: $(READY)             ## digests and decisions of three targets against the committed baseline
	$(RUN) -m harness sweep hw=h200,b200,gfx950 codegen=false report=false
	$(RUN) -m harness gate baseline=cpu-exact run=latest

clean:
	rm -rf $(VENV) results/runs build *.egg-info
