"""Tries to compile grammars in another process, which can be ended.

xgrammar cannot be interrupted, and a small schema may take minutes and gigabytes. Only what another
process has compiled in time is compiled in this one, beside the decoding.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

MOST_BYTES = 1 << 28
"""The largest compiled grammar."""

START_SECONDS = 60.0
"""The longest start of the process, which imports xgrammar."""

POLL_SECONDS = 0.05
"""Time between two looks at whether the client has gone."""

MOST_KEPT = 256
"""How many tasks that were compiled in time are remembered."""


class Trials:
    """Keeps a process that compiles one task after another, for one vocabulary at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._vocabulary: str | None = None  # of the process
        self._passed: dict[str, None] = {}

    def run(
        self,
        vocabulary: str,
        task: Mapping[str, Any],
        is_over: Callable[[], bool],
        seconds: float,
    ) -> None:
        """Return once a task was compiled, by this or an earlier call, or nobody waits for it.

        Args:
            vocabulary: xgrammar's description of the tokenizer.
            task: What `compile_task` takes.
            is_over: Returns whether nobody waits any more.
            seconds: The longest time to compile.

        Raises:
            ValueError: Compiling takes too long, or too much memory.
        """
        name = json.dumps(task)
        with self._lock:
            if vocabulary != self._vocabulary:
                self._end()
                self._passed, self._vocabulary = {}, vocabulary
            if name in self._passed or is_over():
                return
            if self._process is None:
                self._start()
                self._ask(vocabulary, is_over, START_SECONDS)
            if is_over():
                return
            failure = self._ask(task, is_over, seconds)
            if failure is not None:
                raise ValueError(failure)
            self._passed[name] = None
            if len(self._passed) > MOST_KEPT:
                del self._passed[next(iter(self._passed))]

    def end(self) -> None:
        """End the process; the next task starts another one."""
        with self._lock:
            self._end()
            self._vocabulary = None

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what was not yet written
                    pipe.close()  # type: ignore[union-attr]

    def _start(self) -> None:
        path = os.pathsep.join(each for each in sys.path if isinstance(each, str))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lookahead_hf.tools.serving.compiling"],
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,  # which ends with this process, whatever ends it
            stdout=subprocess.PIPE,
            text=True,
        )

    def _ask(self, message: Any, is_over: Callable[[], bool], seconds: float) -> str | None:
        """Return why a task has failed, None if it was done; end a process that is too slow."""
        process, answers = self._process, []
        if process is None:
            return "the process that compiles has ended"

        def talk() -> None:
            assert process.stdin is not None and process.stdout is not None
            with suppress(OSError, ValueError):  # a process that was ended
                print(json.dumps(message), file=process.stdin, flush=True)
                answers.append(json.loads(process.stdout.readline()))

        talking = threading.Thread(target=talk, daemon=True)
        talking.start()
        for _ in range(max(1, round(seconds / POLL_SECONDS))):
            talking.join(POLL_SECONDS)
            if not talking.is_alive() or is_over():
                break
        if not answers:
            process.kill()
            talking.join()
            self._end()
        return answers[0] if answers else f"that takes longer than {seconds:g} seconds"


trials = Trials()
"""The process of all servers of this process."""


def compile_task(compiler: Any, task: Mapping[str, Any]) -> Any:
    """Compile a JSON schema, or the task of `schemas.calling`, with xgrammar's compiler."""
    if "schema" in task:
        return compiler.compile_json_schema(task["schema"], any_whitespace=False)
    return compiler.compile_grammar(_grammar(**task))


def _grammar(
    tools: Mapping[str, Any], markers: Sequence[str], thinking: list[str] | None, thinks: bool
) -> Any:
    """Return xgrammar's grammar of one call, with the usual whitespace.

    `markers` is what stands before and behind the JSON of the call; `thinks`: whether the prompt
    has begun the reasoning.
    """
    from xgrammar import Grammar

    def exactly(text: str) -> Any:
        return Grammar.from_ebnf(f"root ::= {json.dumps(text, ensure_ascii=False)}")

    def call(name: str, schema: Any) -> Any:
        head = f'{markers[0]}{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '
        parameters = Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
        return Grammar.concat(exactly(head), parameters, exactly(f"}}{markers[1]}"))

    each = [call(name, schema) for name, schema in tools.items()]
    calls = each[0] if len(each) == 1 else Grammar.union(*each)
    if thinking is None:
        return calls
    tag = {"type": "tag", "content": {"type": "any_text"}, "end": thinking[1]}
    tag["begin"] = "" if thinks else thinking[0]
    thoughts = Grammar.from_structural_tag(json.dumps({"type": "structural_tag", "format": tag}))
    after = Grammar.concat(thoughts, Grammar.from_ebnf(r"root ::= [\n]*"), calls)
    return after if thinks else Grammar.union(calls, after)


def main() -> None:
    """Compile tasks, one per line of the input; the first line is the vocabulary."""
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(json.loads(sys.stdin.readline()))
    print("null", flush=True)
    for line in sys.stdin:
        failure = None
        # Errors are raised again, and put into words, where the grammar is compiled for use.
        with suppress(Exception):
            compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
            if compile_task(compiler, json.loads(line)).memory_size_bytes > MOST_BYTES:
                failure = f"that takes more than {MOST_BYTES >> 20} MB"
        print(json.dumps(failure), flush=True)


if __name__ == "__main__":
    main()
