"""One other engine in a process of its own: reads requests as lines of JSON, answers each by one.

It runs in an environment that has the engine, and needs nothing else:

    python -m venv engines && engines/bin/pip install openvino-genai openvino-tokenizers
    engines/bin/pip install llama-cpp-python   # compiles for some minutes

A request is {"ids": [...], "new_tokens": 128, "end_ids": [...]}; an answer is
{"seconds": 1.5, "ids": [...]}, prefill included.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

Write = Callable[[list[int], int, list[int]], Iterable[int]]
"""Returns the new tokens for a prompt, a number of tokens, and the tokens that end a text."""


def openvino(model: str, threads: int, lookup: bool) -> Write:
    """OpenVINO GenAI, with prompt lookup of its own or without."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    given: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if lookup:
        given["prompt_lookup"] = True
    pipe = genai.LLMPipeline(model, "CPU", **given)

    def write(ids: list[int], new_tokens: int, end_ids: list[int]) -> Iterable[int]:
        config = genai.GenerationConfig(max_new_tokens=new_tokens, do_sample=False)
        config.stop_token_ids = set(end_ids)
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
        prompt = genai.TokenizedInputs(
            ov.Tensor(np.array([ids], dtype=np.int64)),
            ov.Tensor(np.ones((1, len(ids)), dtype=np.int64)),
        )
        return pipe.generate(prompt, config).tokens[0]

    return write


def llama_cpp(model: str, threads: int, lookup: bool) -> Write:
    """llama.cpp by its Python package, with the package's prompt lookup or without."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    drafts = LlamaPromptLookupDecoding(num_pred_tokens=10, max_ngram_size=3) if lookup else None
    llama = Llama(
        model, n_ctx=2048, n_threads=threads, n_threads_batch=threads, draft_model=drafts,
        logits_all=lookup, verbose=False,
    )  # fmt: skip

    def write(ids: list[int], new_tokens: int, end_ids: list[int]) -> Iterable[int]:
        llama.reset()
        for count, token in enumerate(llama.generate(ids, temp=0.0), 1):
            yield token
            if count == new_tokens or token in end_ids:
                return

    return write


ENGINES = {"openvino": openvino, "llama.cpp": llama_cpp}


def main() -> None:
    """Answer requests until the input ends: `worker.py ENGINE MODEL THREADS [lookup]`."""
    engine, model, threads, *extra = sys.argv[1:]
    answers = sys.stdout
    sys.stdout = sys.stderr  # some engines print
    write = ENGINES[engine](model, int(threads), "lookup" in extra)
    for request in map(json.loads, sys.stdin):
        start = time.perf_counter()
        ids = list(map(int, write(request["ids"], request["new_tokens"], request["end_ids"])))
        answer = {"seconds": time.perf_counter() - start, "ids": ids}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
