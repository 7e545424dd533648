# Each target makes the environment it needs under .venv/; `make` alone lists the targets.

WORKERS ?= 2
MARKS ?= not slow
ARGS ?=
PY ?= py311
SECONDS ?= 60

comma := ,

# The first interpreter of version $(1) on PATH or under pyenv, or nothing.
find-python = $(shell \
	for python in python$(1) python3 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/$(1).*/bin/python; do \
		$$python -c 'import ensurepip, sys; \
			sys.version_info[:2] == tuple(map(int, "$(1)".split("."))) or sys.exit(1); \
			print(sys.executable)' 2>/dev/null && break; \
	done)

.PHONY: help demo bench bench-quick bench-gate bench-work bench-record test test-slow test-matrix soak fuzz parity accelerators lint format types wheel clean
.PRECIOUS: .venv/%/.ready

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' Makefile

demo: .venv/py311/.ready ## train a spiking network online and draw it (ARGS="--seed 1" passes options)
	@echo "==> demo: examples/delayed_match.py in .venv/py311"
	@.venv/py311/bin/python examples/delayed_match.py --plot build/demo.png $(ARGS)

# Explicit files: the suites are no tests, and pytest does not look for them.
# PY=py313 takes the newest JAX, and braintrace 0.2.8 instead of 0.2.6.
RUN_BENCH = JAX_PLATFORMS=cpu .venv/$(PY)/bin/python -W ignore -m
BENCH = $(RUN_BENCH) pytest benchmarks/bench_*.py -q -W ignore -p no:xdist --benchmark-columns=median,iqr,rounds
QUICK = -m quick --seconds 1.5 --no-peak
# What is counted is the program before LLVM gets it.
COUNT = XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true" $(RUN_BENCH) benchmarks.gate work

bench: .venv/$(PY)/.ready ## measure against BPTT and braintrace: table, JSON, docs/scaling.png (ARGS="--full", PY=py313)
	@echo "==> bench: suites of benchmarks/ in .venv/$(PY)"
	@mkdir -p benchmarks/results
	@$(BENCH) --benchmark-json=benchmarks/results/bench.json $(ARGS)
	@$(RUN_BENCH) benchmarks.report benchmarks/results/bench.json --plot docs/scaling.png

bench-quick: .venv/$(PY)/.ready ## the same on few workloads
	@echo "==> bench-quick: suites of benchmarks/ in .venv/$(PY), what is marked quick"
	@mkdir -p benchmarks/results
	@$(BENCH) $(QUICK) --benchmark-json=benchmarks/results/quick.json $(ARGS)
	@$(RUN_BENCH) benchmarks.report benchmarks/results/quick.json

bench-gate: bench-quick ## fail if ratios are worse than those recorded, beyond their spread
	@echo "==> bench-gate: ratios against benchmarks/baseline.json"
	@rm -f benchmarks/results/again-*.json
	@$(RUN_BENCH) benchmarks.gate ratios benchmarks/results/quick.json || { \
		for run in 1 2; do \
			echo "==> bench-gate: one process may be slow by chance, so once more ($$run of 2)"; \
			$(BENCH) $(QUICK) --benchmark-json=benchmarks/results/again-$$run.json || exit 1; \
		done; \
		$(RUN_BENCH) benchmarks.gate ratios benchmarks/results/quick.json benchmarks/results/again-*.json; }

bench-work: .venv/$(PY)/.ready ## fail if compiled programs do more work than recorded (ARGS=--record records it)
	@echo "==> bench-work: counted work against benchmarks/baseline.json"
	@$(COUNT) $(ARGS)

# Three processes: ratios differ more between processes than between the rounds of one.
bench-record: .venv/$(PY)/.ready ## record ratios, with their spread over three runs, and counted work anew
	@mkdir -p benchmarks/results
	@for run in 1 2 3; do \
		echo "==> bench-record: suites of benchmarks/ in .venv/$(PY), what is marked quick, run $$run of 3"; \
		$(BENCH) $(QUICK) --benchmark-json=benchmarks/results/record-$$run.json || exit 1; \
	done
	@$(RUN_BENCH) benchmarks.report benchmarks/results/record-1.json
	@$(RUN_BENCH) benchmarks.gate ratios benchmarks/results/record-*.json --record
	@$(COUNT) --record

test: test-py311 ## run the suite on Python 3.11 (ARGS="-k name" passes options to pytest)

test-matrix: ## repeat the suite on Python 3.13 with the newest JAX, where that is installed
	@if [ -n "$(call find-python,3.13)" ]; then $(MAKE) --no-print-directory test-py313; \
	else echo "==> test-matrix: skipped, no Python 3.13 on PATH or under pyenv"; fi

test-slow: ## run the rest of the suite, which repeats slowly what `make test` does on fewer models
	@$(MAKE) --no-print-directory test-py311 MARKS=slow

test-%: .venv/%/.ready
	@echo "==> test: pytest in .venv/$* on $(WORKERS) workers, tests that are $(MARKS)"
	@JAX_PLATFORMS=cpu .venv/$*/bin/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder -m "$(MARKS)" $(ARGS)

STEPS ?= 20000

soak: .venv/py311/.ready ## kill a learner at random over STEPS=20000 steps, and compare (ARGS="--kills 30 --seed 1")
	@echo "==> soak: python -m tests.soak in .venv/py311"
	@JAX_PLATFORMS=cpu .venv/py311/bin/python -m tests.soak --steps $(STEPS) $(ARGS)

fuzz: .venv/py311/.ready ## hold random programs against an oracle (SECONDS=600; SEED=n repeats one)
	@echo "==> fuzz: python -m tests.fuzz in .venv/py311, for $(SECONDS) s"
	@JAX_PLATFORMS=cpu .venv/py311/bin/python -m tests.fuzz $(SECONDS) $(if $(SEED),--seed $(SEED)) $(ARGS)

parity: .venv/py311/.ready ## run braintrace's own tests here, and count (ARGS=--sample; EXAMPLES=checkout)
	@echo "==> parity: python -m parity in .venv/py311"
	@JAX_PLATFORMS=cpu .venv/py311/bin/python -m parity --workers $(WORKERS) $(if $(EXAMPLES),--examples $(EXAMPLES)) $(ARGS)

accelerators: .venv/accelerators/.ready ## compile every kernel for GPUs and TPUs, of which none is needed
	@echo "==> accelerators: python -m accelerators in .venv/accelerators"
	@.venv/accelerators/bin/python -m accelerators --jobs $(WORKERS) $(ARGS)

lint: .venv/py311/.ready ## check style and format with ruff
	@echo "==> lint: ruff check, ruff format --check"
	@.venv/py311/bin/ruff check
	@.venv/py311/bin/ruff format --check

format: .venv/py311/.ready ## rewrite the sources in ruff's format, imports sorted
	@echo "==> format: ruff check --fix, ruff format"
	@.venv/py311/bin/ruff check --fix
	@.venv/py311/bin/ruff format

types: .venv/py311/.ready ## check types with mypy
	@echo "==> types: mypy"
	@.venv/py311/bin/mypy

wheel: .venv/py311/.ready ## build the source distribution, and from it the wheel, into dist/
	@echo "==> wheel: python -m build"
	@.venv/py311/bin/python -m build --no-isolation

clean: ## remove environments, builds and caches
	@echo "==> clean: .venv, build, dist and caches"
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/accelerators/.ready: constraints/py311.txt

.venv/%/.ready: pyproject.toml constraints/%.txt
	$(eval version := $(if $(filter py3%,$*),$(patsubst py3%,3.%,$*),3.11))
	$(eval extras := $(if $(filter py3%,$*),test$(comma)bench$(comma)examples,$*))
	$(eval python := $(call find-python,$(version)))
	@test -n "$(python)" || { \
		echo "Python $(version) with its venv module is not on PATH: install it, then repeat" >&2; \
		exit 1; }
	@echo "==> set-up: virtual environment .venv/$* from $(python)"
	@"$(python)" -m venv .venv/$*
	@echo "==> set-up: installing the library with what [$(extras)] needs, pinned by constraints/$*.txt"
	@.venv/$*/bin/python -m pip install --quiet --editable '.[$(extras)]' --constraint constraints/$*.txt
	@touch $@
