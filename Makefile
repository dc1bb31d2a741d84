# Everything a fresh machine needs: `make demo` to look, `make test` to check.
# Works with GNU make 3.81 (macOS) and later, and with BSD make. All that is installed lives in
# .venv and .venv-extras; `make clean` removes them.

PYTHON = python3
VENV   = .venv
BIN    = $(VENV)/bin
PIP    = $(BIN)/python -m pip $(QUIET)
QUIET  = -qq --disable-pip-version-check

# torchvision fits one version of torch, so the libraries of the extras have an environment of
# their own.
VENV_EXTRAS = .venv-extras
BIN_EXTRAS  = $(VENV_EXTRAS)/bin

# Stamps: made once, and again when the dependencies change. They are gone with the environment.
MADE = $(VENV)/.made
DEMO = $(VENV)/.installed-demo
TEST = $(VENV)/.installed-test
MADE_EXTRAS = $(VENV_EXTRAS)/.made
TEST_EXTRAS = $(VENV_EXTRAS)/.installed-test

# Two modules at a time, of those that tests/beside.py names.
TWO = -n 2 --dist loadfile --no-loadscope-reorder -m
TESTS_EXTRAS = tests/extras tests/test_experiments.py tests/test_equality.py tests/parallel

.PHONY: help venv demo test soak test-extras cluster clean sound
.NOTPARALLEL:

help:
	@echo "make demo         install into $(VENV) and run a sweep over strategies and device counts"
	@echo "make test         install what the tests need too; lint, types and the tests"
	@echo "make soak         the long tests, which make test leaves out"
	@echo "make test-extras  install torchvision, Hugging Face's libraries, trackers and Hydra's plugins into $(VENV_EXTRAS); their tests"
	@echo "make cluster      tests on a Slurm and on network namespaces of their own (root; they skip where something is missing)"
	@echo "make venv         only make $(VENV), for example to put a torch of your own into it first"
	@echo "make clean        remove $(VENV), $(VENV_EXTRAS) and caches; outputs/ stays"
	@echo "Another Python: make demo PYTHON=python3.12"

venv: sound $(MADE)

# One thread a device, so that the counts compare: on a CPU a single device would else use all cores.
demo: sound $(DEMO)
	@echo "A sweep on 1,797 real images; one thread a device (OMP_NUM_THREADS=1)."
	@folder="outputs/sweeps/$$(date +%Y-%m-%d)/$$(date +%H-%M-%S)-demo-$$$$"; \
	OMP_NUM_THREADS=1 $(BIN)/python -m dpexp -m +experiment=digits \
	    batch_size=240 epochs=8 warmup_steps=8 \
	    parallel=none,dp,ddp num_devices=1,2,3 hydra.sweep.dir="$$folder" && \
	echo && echo "Next, type this and open the address that it prints:" && \
	echo && echo "    $(BIN)/python -m dpexp.board $$folder" && echo

test: sound $(TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest $(TWO) "beside and not slow and not cluster"
	$(BIN)/python -m pytest -m "not beside and not slow and not cluster"

soak: sound $(TEST)
	$(BIN)/python -m pytest $(TWO) "beside and slow"
	$(BIN)/python -m pytest -m "slow and not beside"

# What needs those libraries, and the core of the rest on the torch that they need.
test-extras: sound $(TEST_EXTRAS)
	$(BIN_EXTRAS)/python -c 'import torchvision, transformers, datasets, mlflow, wandb, joblib, submitit, ray, optuna'
	$(BIN_EXTRAS)/python -m pytest $(TWO) "beside and not slow" $(TESTS_EXTRAS)
	$(BIN_EXTRAS)/python -m pytest -m "not beside and not slow" $(TESTS_EXTRAS)

# In the environment of the extras: Slurm's jobs come from submitit.
cluster: sound $(TEST_EXTRAS)
	$(BIN_EXTRAS)/python -m pytest -m cluster tests/cluster

clean:
	rm -rf $(VENV) $(VENV_EXTRAS) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find dpexp tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(MADE) $(MADE_EXTRAS):
	@command -v "$(PYTHON)" >/dev/null 2>&1 || { \
	    echo "There is no $(PYTHON) here. Install Python 3.10 or later, or name yours: make demo PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "dpexp needs Python 3.10 or later; $(PYTHON) is $$("$(PYTHON)" -V 2>&1). Another one: make demo PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
	    echo "$(PYTHON) cannot make environments: its venv module is missing. On Debian and Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	@echo "Making $(@D) with $$("$(PYTHON)" -V)"
	@"$(PYTHON)" -m venv "$(@D)"
	@touch $@

$(DEMO): $(MADE) pyproject.toml constraints.txt
	@echo "Installing dpexp and what it needs into $(VENV) (a first download of torch takes minutes)."
	@$(PIP) install -c constraints.txt -e '.[digits]'
	@touch $@

# The test extra has all that the demo needs, so the demo's stamp is made with it.
$(TEST): $(MADE) pyproject.toml constraints.txt
	@echo "Installing dpexp and what its tests need into $(VENV) (a first download of torch takes minutes)."
	@$(PIP) install -c constraints.txt -e '.[test]'
	@touch $(DEMO) $@

$(TEST_EXTRAS): $(MADE_EXTRAS) pyproject.toml constraints-extras.txt
	@echo "Installing dpexp with torchvision, Hugging Face's libraries, trackers and Hydra's plugins into $(VENV_EXTRAS) (a first download takes minutes)."
	@$(BIN_EXTRAS)/python -m pip $(QUIET) install -c constraints-extras.txt -e '.[test,vision,hf,mlflow,wandb,launchers]'
	@touch $@

# An environment whose Python is gone (upgraded, moved) fails in ways that are hard to read.
sound:
	@for folder in $(VENV) $(VENV_EXTRAS); do \
	    if [ -e "$$folder/.made" ] && ! "$$folder/bin/python" -c '' 2>/dev/null; then \
	        echo "The Python in $$folder does not work any more. Type: make clean, then this again" >&2; exit 1; \
	    fi; \
	done
