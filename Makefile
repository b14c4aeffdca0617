# make reproduce   the notebooks in order; PROFILE=smoke|default|full, OUT=where, ONLY=NN,NN
# make smoke       the same in minutes, tiny
# make test        the tests
# make test-vllm   the tests of the plugin in the real engine, in an environment of its own (.venv-vllm, 3.4 GB)
# make test-vllm-long   eight prompts of 2k to 4k tokens there, too: ten minutes
# make lint        format and lint, changing nothing
# make reference   maintainers: make the results of the default run those that the repository shows
# make reproduce-doc   run every block of REPRODUCE.md, in smoke mode: a quarter of an hour
# make agree       one pass against step by step and brute force, on 10^5 (log, budget) pairs: five minutes
# make torture     the cache through 10^6 appends, wants, fetches that fail or not, trims, reorders and resets: a quarter of an hour
# make malformed   every malformed input again, and the table of what is said of each
# make kills       what can be gone on with, killed twenty times each and in the end compared byte by byte: a quarter of an hour
# make fuzz        any bytes in place of what is read, for SECONDS=3600
# make load        the cache through STEPS=50000 decode steps, and ten recordings in a row
# make mutants     would the tests notice a changed operator? N=20 changes of each module
# make numerics    one prompt recorded in float16, bfloat16 and float32, and what differs
# make coverage    lines of the core that its tests run
# make supply      what the locks bring in: hashes compared, licences, bill of materials, known vulnerabilities (network)
# make clean       forget runs and caches; the environment stays (rm -r .venv for that)
#
# Each makes the environment first, from requirements.lock (HASHES=1: every file compared with requirements.hashes); once that is there nothing here needs the network but the model's download.

PYTHON  ?= python3
PROFILE ?= default
OUT     ?= runs/$(PROFILE)
SECONDS ?= 3600
STEPS   ?= 50000
N       ?= 20
PY      := .venv/bin/python
# The tests of the core ring.
CORE_TESTS := $(wildcard $(patsubst %,tests/test_%.py,errors files trace broken demand policies published_policies golden simulate blocks stats match \
  contests places twins reads churn wakeups grading bursts markers prefetch shipped beyond served fuzz sound tables \
  taught scheduling tiered drawing_measurement drawing_matched malformed))
# One log of each model and regime, shipped at page level.
SHIPPED := $(foreach model,smollm2-135m gemma3-270m,$(patsubst %,runs/default/traces/$(model)_%_s0,niah_d25 cot multiturn))

# One thread a process: results do not depend on how a sum was split, and recordings run in two processes side by side
# without fighting over the cores.
export OMP_NUM_THREADS := 1
export OPENBLAS_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.PHONY: reproduce reproduce-doc smoke test test-vllm test-vllm-long lint reference agree torture malformed kills clean
.DEFAULT_GOAL := reproduce

reproduce: .venv/installed
	$(PY) -m wakekv reproduce --profile $(PROFILE) --out $(OUT) $(if $(ONLY),--only $(ONLY))

smoke: .venv/installed
	$(PY) -m wakekv reproduce --profile smoke --out runs/smoke

test: .venv/installed
	$(PY) -m pytest

test-vllm: .venv-vllm/installed
	.venv-vllm/bin/python -m pytest tests/engine

test-vllm-long: .venv-vllm/installed
	WAKEKV_LONG=1 .venv-vllm/bin/python -m pytest tests/engine/test_engine.py -k long

lint: .venv/installed
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

reference: .venv/installed
	@test -f runs/default/run.json || { echo "there is no default run to show: make reproduce"; exit 2; }
	rm -rf figures artifact/claims artifact/notebooks
	find artifact/tables -type f ! -name malformed.csv -delete
	cp -r runs/default/figures figures
	cp -r runs/default/tables runs/default/claims runs/default/notebooks runs/default/run.json artifact
	$(PY) -m wakekv pack $(SHIPPED) --out artifact/logs
	$(PY) -m wakekv site --out artifact/site
	$(PY) -m wakekv document

reproduce-doc: .venv/installed
	WAKEKV_REPRODUCE=1 $(PY) -m pytest tests/test_document.py -q

agree: .venv/installed
	WAKEKV_PAIRS=100000 $(PY) -m pytest tests/test_simulate.py -q

torture: .venv/installed
	WAKEKV_OPERATIONS=1000000 $(PY) -m pytest tests/test_cache_state.py -q -s

malformed: .venv/installed
	WAKEKV_MALFORMED=1 $(PY) -m pytest tests/test_malformed.py -q

kills: .venv/installed
	WAKEKV_KILLS=20 $(PY) -m pytest tests/test_kills.py -q -s

fuzz: build/checks/installed
	PYTHONPATH=build/checks $(PY) tests/fuzz.py --seconds $(SECONDS) --out benchmarks/results/fuzz.json

load: .venv/installed
	WAKEKV_STEPS=$(STEPS) $(PY) -m pytest tests/test_load.py -q -s

mutants: .venv/installed
	$(PY) tests/mutants.py --n $(N) --out benchmarks/results/mutants.json

numerics: .venv/installed
	$(PY) benchmarks/numerics.py --out benchmarks/results/numerics.json

coverage: build/checks/installed
	PYTHONPATH=build/checks WAKEKV_PAIRS=300 $(PY) -m coverage run --data-file=build/coverage --source=wakekv -m pytest -m "not model" $(CORE_TESTS)
	PYTHONPATH=build/checks $(PY) -m coverage report --data-file=build/coverage --show-missing --fail-under=95 --omit='*/kernels/*' \
	  --include="$$($(PY) -c 'from tests.layers import CORE, files; print(*files(CORE), sep=",")')"

supply: build/checks/installed
	PATH="$(CURDIR)/build/checks/bin:$$PATH" $(PY) tests/supply.py --hashes
	$(PY) -m wakekv document
	$(PY) -m pip install --dry-run --quiet --ignore-installed --no-deps --require-hashes -r requirements.hashes
	PYTHONPATH=build/checks $(PY) -m pip_audit -r requirements.lock --no-deps --disable-pip

clean:
	rm -rf runs build .pytest_cache .ruff_cache .hypothesis
	find wakekv tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is newer than what it was made from, or the environment is brought up to date. Editable, so that kernels find wakekv
# from any folder; --no-build-isolation, so that no network is asked.
.venv/installed: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	  "wakekv needs Python 3.10 or later, and this is %d.%d: make PYTHON=python3.11" % sys.version_info[:2])'
	@echo "making .venv from requirements.lock: some minutes the first time, most of it torch"
	@$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(if $(HASHES),$(PY) -m pip install --disable-pip-version-check --no-deps --require-hashes -r requirements.hashes)
	$(PY) -m pip install --disable-pip-version-check -r requirements.lock
	$(PY) -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# torchvision, torchaudio and torchcodec come with the engine as builds for a GPU, and transformers stumbles over them.
.venv-vllm/packages: requirements-vllm.lock
	@echo "making .venv-vllm from requirements-vllm.lock: some minutes the first time, 3.4 GB"
	@.venv-vllm/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check -r requirements-vllm.lock
	.venv-vllm/bin/python -m pip uninstall --disable-pip-version-check --yes torchvision torchaudio torchcodec
	@touch $@

.venv-vllm/installed: .venv-vllm/packages pyproject.toml
	.venv-vllm/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# Beside the environment, not in it: nothing that a result comes from.
build/checks/installed: .venv/installed requirements-checks.lock
	$(PY) -m pip install --disable-pip-version-check --quiet --upgrade --no-deps --target build/checks -r requirements-checks.lock
	@touch $@
