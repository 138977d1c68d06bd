# Every target sets up .venv first (once; see scripts/set_up.py). On another Python: make PYTHON=/path/to/python3.11 chat
# Further arguments of a target's command: make test ARGS="-k models"

PYTHON ?=
ARGS ?=
BENCH ?= ttft throughput e2e memory encode kernels
RESULTS ?= benchmarks/results
MACHINE ?= cpu
BIN := .venv/bin
READY := .venv/.ready

# The packaged models need no network; a model of one's own may.
OFFLINE := $(if $(INFERSCALE_MODEL)$(INFERSCALE_EMBEDDER),,HF_HUB_OFFLINE=1)
export MEM0_TELEMETRY ?= false

.PHONY: help chat test test-fast test-engine lint bench lock clean

help:
	@echo "make chat    talk to a model that remembers you (/help in it lists what it can do)"
	@echo "make test    all tests: test-fast, by a worker for each core, up to 4;  then test-engine, those that start vLLM"
	@echo "make lint    ruff and mypy"
	@echo "make bench   all benchmarks, some 20 minutes; BENCH='ttft kernels' only these, ARGS for each of them"
	@echo "make lock    make requirements/cpu.lock again"
	@echo "make clean   remove .venv and all caches of this folder"

$(READY): requirements/cpu.lock pyproject.toml scripts/setup.sh scripts/set_up.py
	@PYTHON="$(PYTHON)" sh scripts/setup.sh

chat: $(READY)
	@$(OFFLINE) $(BIN)/python examples/chatbot.py $(ARGS)

# Tests that start vLLM share its engines, so one process runs them. 5 is pytest's status where ARGS select none.
FAST := $(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile -m "not engine"
ENGINE := $(BIN)/python -m pytest -m engine

test: $(READY)
	@failed=0; \
	$(FAST) $(ARGS) || [ $$? = 5 ] || failed=1; \
	$(ENGINE) $(ARGS) || [ $$? = 5 ] || failed=1; \
	exit $$failed

test-fast: $(READY)
	@$(FAST) $(ARGS)

test-engine: $(READY)
	@$(ENGINE) $(ARGS)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(READY)
	@mkdir -p $(RESULTS)
	@for name in $(BENCH); do echo "$$name:"; \
	  env $(OFFLINE) $(BIN)/inferscale-mem bench $$name --json $(RESULTS)/$$name-$(MACHINE).json $(ARGS) || exit; \
	done

lock: $(READY)
	@$(BIN)/python scripts/relock.py $(ARGS)

clean:
	rm -rf .venv dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
