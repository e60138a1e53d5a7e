# make demo       build .venv, fetch a small model, compare plain and speculative generation
# make test       build .venv, lint, type check, run the tests (downloads the same model once)
# make quick      the unit tests and 100 random calls, in two minutes
# make test-all   the same as `make test` with the slow tests and 10,000 random calls
# make test-oldest  the core tests with the oldest supported transformers, in a separate venv
# make test-newest  the core tests with what pip installs today, without constraints.txt
# make test-ecosystem  the libraries that call `generate`, in a separate venv (some gigabytes)
# make docs       the documentation as a site in build/site
# make bench      the end-to-end benchmark (ARGS="--families code_edit --rounds 1")
# make clean      remove everything that these built; the model stays in the user's cache folder
#
# On a machine without a GPU, torch's CPU wheels save some gigabytes:
#   make demo PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

PYTHON ?= python3
PIP_FLAGS ?=
ARGS ?=
# The number of processes that run the tests, each with one thread.
WORKERS ?= 2
OLDEST_TRANSFORMERS := 5.17.0
# The rooms that touch transformers' code, and whole calls, without what only its newest version has.
CORE_TESTS := $(addprefix tests/,block cache call engines/cpu engines/cuda engines/hybrid generation kernels model \
	runner verification test_abuse.py test_auto.py test_encoder_decoder.py test_fallback.py \
	test_half_precision.py test_hook.py test_lossless.py test_lossless_assistant.py \
	test_pipelines.py test_properties.py test_real_model.py test_speech.py test_wrappers.py)
NOT_ON_OLDEST := --ignore tests/kernels/test_ahead_of_time.py --ignore tests/model/compat/test_private_names.py --ignore tests/cache/test_indexed_layers.py \
	--ignore tests/model/test_self_test_of_mixers.py \
	--deselect tests/engines/cpu/layers/test_compiled.py::test_a_family_writes_plains_text \
	--deselect tests/model/test_self_test.py::test_a_layer_of_the_cache_that_is_written_twice_is_found \
	--deselect tests/runner/test_compiling.py::test_requests_of_a_queue_say_what_was_not_drafted \
	--deselect tests/runner/test_architectures.py::test_logits_are_plains \
	--deselect tests/engines/cpu/test_prompts_by_kernels.py::test_a_queue_does_not_change_the_bits_of_its_texts \
	--deselect tests/verification/test_batched_walk.py::test_greedy_rows_of_a_queue_are_read_at_once

# What needs no model, or hardly one.
UNIT_TESTS := $(addprefix tests/,block cache drafting logits ngram_pool verification test_config.py \
	test_imports.py test_rows.py test_stats.py test_size.py)

PYTEST := -m pytest -q -n $(WORKERS) --dist worksteal --durations 20
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt

.PHONY: FORCE demo quick soak test test-all test-oldest test-newest test-ecosystem lint docs compiled bench clean

demo: .venv/.demo
	.venv/bin/lookahead-hf demo $(ARGS)

quick: .venv/.tests
	TRITON_INTERPRET=1 .venv/bin/python $(PYTEST) -m "not gpu and not slow" --random-calls 100 tests/test_properties.py $(UNIT_TESTS) $(ARGS)

test: .venv/.tests .venv/.docs
	$(MAKE) --jobs 2 --output-sync lint docs compiled
	TRITON_INTERPRET=1 .venv/bin/python $(PYTEST) -m "not gpu and not slow" $(ARGS)

test-all: lint
	.venv/bin/python $(PYTEST) --random-calls 10000 $(ARGS)

test-oldest: .venv-oldest/.tests
	TRITON_INTERPRET=1 .venv-oldest/bin/python $(PYTEST) -m "not gpu and not slow" $(CORE_TESTS) $(NOT_ON_OLDEST) $(ARGS)

test-newest: .venv-newest/.tests
	-.venv-newest/bin/python -m lookahead_hf env
	TRITON_INTERPRET=1 .venv-newest/bin/python $(PYTEST) -m "not gpu and not slow" $(CORE_TESTS) $(ARGS)

test-ecosystem: .venv-ecosystem/.tests
	.venv-ecosystem/bin/python -m pytest -q tests/ecosystem $(ARGS)

soak: .venv/.tests  # 64 clients of one server for 15 minutes
	.venv/bin/python -m tests.soak $(ARGS)

lint: .venv/.tests
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/python -m tests.size

# It takes some seconds. A broken link, a wrong anchor or an unknown name is an error.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict

# Beside lint and docs, which leave one of two processors idle.
compiled: .venv/.tests
	.venv/bin/python -m lookahead_hf compile --dtype float32 --dtype bfloat16 --dtype float16

bench: .venv/.tests
	.venv/bin/python benchmarks/end_to_end.py $(ARGS)

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-ecosystem build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp is newer than the files that it depends on, so a second `make` installs nothing.
.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.demo: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing lookahead-hf and its demo extra into .venv (a few minutes the first time)"
	.venv/bin/python $(PIP_INSTALL) -e ".[demo]"
	@touch $@

.venv/.tests: pyproject.toml constraints.txt | .venv/bin/python
	.venv/bin/python $(PIP_INSTALL) -e ".[demo,dev]"
	@touch $@

.venv/.docs: pyproject.toml constraints.txt | .venv/bin/python
	.venv/bin/python $(PIP_INSTALL) -e ".[docs]"
	@touch $@

.venv-oldest/.tests: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	sed 's/^transformers==.*/transformers==$(OLDEST_TRANSFORMERS)/' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python $(subst -c constraints.txt,-c .venv-oldest/constraints.txt,$(PIP_INSTALL)) -e ".[demo,dev]"
	@touch $@

# Without the upper end of pyproject.toml, which a new version of transformers would not pass, and
# anew every time: the versions are those of the day.
.venv-newest/.tests: FORCE
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -e ".[demo,dev]"
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) --upgrade transformers
	@touch $@

.venv-ecosystem/.tests: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-ecosystem
	.venv-ecosystem/bin/python $(PIP_INSTALL) -e ".[demo,dev,ecosystem]"
	@touch $@
