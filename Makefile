# make demo       build .venv, fetch a small model, compare plain and speculative generation
# make test       build .venv, lint, type check, run the tests (downloads the same model once)
# make test-all   the same with the slow tests
# make test-oldest  the tests with the oldest supported transformers, in a separate venv
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
# Tests that do not use transformers, those of benchmarks, jobs and mixers, which take long, and
# tests of what only its newest version has.
NOT_ON_OLDEST := --ignore tests/kernels --ignore tests/ngram_pool --ignore tests/cli --ignore tests/logits \
	--ignore tests/batching --ignore tests/serving/test_continuous_batching.py \
	--ignore tests/benchmarks --ignore tests/ray --ignore tests/support/test_self_test_of_mixers.py \
	--ignore tests/cache/test_indexed_layers.py \
	--ignore tests/drafting/sources/test_mtp.py --ignore tests/test_multimodal.py \
	--ignore tests/test_models_table.py \
	--deselect tests/patches/layers/test_compiled.py::test_a_family_writes_plains_text \
	--deselect tests/serving/test_openai_fields.py::test_the_first_calls_of_open_webui \
	--deselect tests/test_autocast.py::test_requests_are_decoded_together_under_autocast \
	--deselect tests/test_structured.py::test_requests_of_a_queue_have_schemas_of_their_own \
	--deselect tests/test_structured.py::test_a_wrong_shadow_in_a_queue_costs_its_request_alone \
	--deselect tests/test_locks.py::test_requests \
	--ignore tests/serving/test_schemas.py --ignore tests/serving/test_tools.py \
	--deselect tests/runner/test_architectures.py::test_logits_are_plains \
	--deselect "tests/ecosystem/test_callers.py::test_caller[transformers serve --continuous-batching, the OpenAI client]"

PYTEST := -m pytest -q -n $(WORKERS) --dist worksteal
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt

.PHONY: demo test test-all test-oldest test-ecosystem lint docs bench clean

demo: .venv/.demo
	.venv/bin/lookahead-hf demo $(ARGS)

test: lint docs
	TRITON_INTERPRET=1 .venv/bin/python $(PYTEST) -m "not gpu and not slow" $(ARGS)

test-all: lint
	.venv/bin/python $(PYTEST) $(ARGS)

test-oldest: .venv-oldest/.tests
	.venv-oldest/bin/python $(PYTEST) -m "not gpu and not slow" $(NOT_ON_OLDEST) $(ARGS)

test-ecosystem: .venv-ecosystem/.tests
	.venv-ecosystem/bin/python -m pytest -q tests/ecosystem $(ARGS)
	.venv-ecosystem/bin/python -m tests.ecosystem.table docs/ecosystem.md

lint: .venv/.tests
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

# It takes some seconds. A broken link, a wrong anchor or an unknown name is an error.
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --quiet --strict

bench: .venv/.tests
	.venv/bin/python benchmarks/end_to_end.py $(ARGS)

clean:
	rm -rf .venv .venv-oldest .venv-ecosystem build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# A stamp is newer than the files that it depends on, so a second `make` installs nothing.
.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.demo: pyproject.toml constraints.txt | .venv/bin/python
	@echo "installing lookahead-hf and its demo extra into .venv (a few minutes the first time)"
	.venv/bin/python $(PIP_INSTALL) -e ".[demo]"
	@touch $@

.venv/.tests: pyproject.toml constraints.txt | .venv/bin/python
	.venv/bin/python $(PIP_INSTALL) -e ".[demo,bench,dev]"
	@touch $@

.venv/.docs: pyproject.toml constraints.txt | .venv/bin/python
	.venv/bin/python $(PIP_INSTALL) -e ".[docs]"
	@touch $@

.venv-oldest/.tests: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-oldest
	sed 's/^transformers==.*/transformers==$(OLDEST_TRANSFORMERS)/' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/python $(subst -c constraints.txt,-c .venv-oldest/constraints.txt,$(PIP_INSTALL)) -e ".[demo,dev]"
	@touch $@

.venv-ecosystem/.tests: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-ecosystem
	.venv-ecosystem/bin/python $(PIP_INSTALL) -e ".[demo,dev,ecosystem]"
	@touch $@
