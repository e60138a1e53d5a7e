"""Schemas of answers and calls of tools in the server's requests, and how they are compiled.

xgrammar cannot be interrupted, and a small schema may take minutes and gigabytes. Only what another
process, which can be ended, has compiled in time is compiled in this one, beside the decoding.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from lookahead_hf.tools.serving.fields import ServedRequest, shown


def take_tools(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the tools of which an answer has to call one: their parameters' schemas by name.

    None if it need not call any. transformers' server ignores `tool_choice`. ValueError if that is
    not understood, or names a tool that the request lacks.
    """
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return None
    given = [tool.get("function") or tool for tool in body.get("tools") or ()]
    any_object = {"type": "object"}
    named = [function for function in given if function.get("name") is not None]
    tools = {each["name"]: each.get("parameters") or any_object for each in named}
    if choice == "required" and tools:
        return tools
    function = choice.get("function", choice) if isinstance(choice, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str) and name in tools:
        return {name: tools[name]}
    raise ValueError(
        f"tool_choice={shown(choice)} is not served with the tools {shown(list(tools))}: give "
        '"required" with tools, {"type": "function", "function": {"name": NAME}} with one of them, '
        '"auto" or "none"'
    )


CALLS: Mapping[str, Any] = {
    "open_pattern": r'\s*\{"name": "(?P<name>[^"]*)", "arguments": ',
    "close": "}\n",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
}
"""The form of calls for a model whose own form is not known: a line of JSON."""


def for_calls(processor: Any, model: Any, request: ServedRequest | None) -> Any:
    """Return the processor with which transformers' server reads the answer to a request.

    If the answer has to call a tool, it is a copy whose template finds the call that the grammar
    lets the model write, in the model's own form if that is JSON between markers.
    """
    if request is None or request.tools is None:
        return processor
    from transformers.cli.serving.utils import get_response_template

    called = copy.copy(processor)
    if hasattr(processor, "tokenizer"):
        called.tokenizer = copy.copy(processor.tokenizer)
    tokenizer = getattr(called, "tokenizer", called)
    template = get_response_template(processor, model) or _any_text(model, tokenizer)
    if _markers(template["fields"].get("tool_calls", {})) is None:
        template = {**template, "fields": {**template["fields"], "tool_calls": CALLS}}
    request.template = tokenizer.response_template = template
    return called


def _any_text(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the template of answers that are a text up to an end token."""
    ends = model.generation_config.eos_token_id
    ends = [ends] if isinstance(ends, int) else ends or ()
    found = "|".join(re.escape(tokenizer.decode([token])) for token in ends)
    text = {"content": "text", **({"close_pattern": found} if found else {})}
    return {"start_anchor_pattern": r"\Z", "fields": {"content": text}}


def calling(
    tools: Mapping[str, Any], template: Mapping[str, Any], tokenizer: Any, prompt: Any
) -> dict[str, Any]:
    """Return the task to compile a grammar of answers that call a tool, after any reasoning.

    `tools` has the JSON schema of each tool's parameters by name; `template` says how the server
    finds the call; `prompt` are tokens, [length] or [1, length].
    """
    thinking = template["fields"].get("reasoning_content", {})
    begins = isinstance(thinking.get("open"), str) and isinstance(thinking.get("close"), str)
    text = tokenizer.decode(torch.as_tensor(prompt).flatten()[-16:])
    return {
        "tools": dict(tools),
        "markers": _markers(template["fields"]["tool_calls"]) or ("", "\n"),
        "thinking": [thinking["open"], thinking["close"]] if begins else None,
        "thinks": begins and text.rstrip().endswith(thinking["open"].rstrip()),
    }


def _markers(field: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return what is around the JSON of a call, None if a call has another form."""
    pattern = field.get("open_pattern", "")
    begin, end = field.get("open", pattern.removeprefix(r"\s*")), field.get("close")
    is_whole = field.get("transform") == {"type": "function", "function": "{content}"}
    is_json = field.get("content") == "json" and "content_args" not in field
    if not (is_json and is_whole and isinstance(begin, str) and isinstance(end, str)):
        return None
    return (f"{begin}\n", f"\n{end}") if not pattern or re.fullmatch(pattern, begin) else None


_TEXT = ("input_ids", "attention_mask", "token_type_ids")
"""Arguments of a generation that hold text."""


def take_schema(body: dict[str, Any]) -> str | None:
    """Take the answer's format, which transformers' server ignores, out of a request's body.

    The body loses `response_format`, or `format` of the Responses API's `text`. Returns the text of
    a JSON schema, None for any text; ValueError if a schema is missing.
    """
    text = body.get("text") or {}
    of_text = text.pop("format", None)
    if not text:
        body.pop("text", None)
    asked = body.pop("response_format", None) or of_text or {"type": "text"}
    if asked["type"] == "text":
        return None
    if asked["type"] == "json_object":
        return '{"type": "object"}'
    named = asked.get("json_schema") or asked
    if "schema" not in named:
        raise ValueError("response_format has no schema: give one, or another type")
    return json.dumps(named["schema"])


def task_of(request: ServedRequest, prompt: Any, tokenizer: Any) -> dict[str, Any] | None:
    """Return the task to compile the grammar of a request, None if it needs none.

    `prompt` are tokens, [length] or [1, length].
    """
    if request.tools is None:
        return None if request.schema is None else {"schema": request.schema}
    assert request.template is not None
    return calling(request.tools, request.template, tokenizer, prompt)


def grammar_of(request: ServedRequest, task: Any, tokenizer: Any, seconds: float) -> Any:
    """Return the logits processor of a request's task, None if nobody waits for it.

    ValueError if it cannot be compiled, or not in so many seconds, or xgrammar is not installed.
    """
    try:
        from lookahead_hf import structured
    except ImportError as error:
        raise ValueError(f"response_format and tool_choice: {error}") from error
    what = "the JSON schema" if "schema" in task else "the parameters of a tool"
    try:
        told = structured.vocabulary(tokenizer)
        is_safe = trials.run(told, task, lambda: request.is_cancelled, seconds)
    except ValueError as error:
        raise ValueError(f"{what} cannot be compiled: {error}") from error
    if not is_safe:
        return None
    return structured.compiled(what, task, tokenizer, compile_task)


def check_media(request: ServedRequest, given: Mapping[str, Any]) -> None:
    """Raise ValueError if the arguments of a generation lack what the messages hold."""
    has_media = any(hasattr(value, "shape") for name, value in given.items() if name not in _TEXT)
    if request.media is not None and not has_media:
        raise ValueError(f"{request.media}: this model reads text alone, so leave that part out")


MOST_BYTES = 1 << 28  # The largest compiled grammar
START_SECONDS = 60.0  # The longest start of the process, which imports xgrammar
POLL_SECONDS = 0.05  # Time between two looks at whether the client has gone
MOST_KEPT = 256  # How many tasks are remembered
FAILED_SECONDS = 60.0  # Time for which a failure is: the machine may have been busy


class Trials:
    """Keeps a process that compiles one task after another, for one vocabulary at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._vocabulary: str | None = None  # of the process
        # Why tasks have failed, empty for those in time, and when
        self._known: dict[str, tuple[str, float]] = {}

    def knows(self, task: Mapping[str, Any]) -> bool:
        """Return whether `run` needs no process for a task."""
        return self._failure_of(json.dumps(task)) is not None

    def _failure_of(self, name: str) -> str | None:
        failure, when = self._known.get(name, (None, 0.0))
        return None if failure and time.monotonic() - when > FAILED_SECONDS else failure

    def run(
        self, vocabulary: str, task: Mapping[str, Any], is_over: Callable[[], bool], seconds: float
    ) -> bool:
        """Return whether a task was compiled, by this or an earlier call; not if nobody waits.

        `vocabulary` is xgrammar's description of the tokenizer, `task` what `compile_task` takes.
        ValueError if compiling takes, or took, longer than so many seconds, or too much memory.
        """
        name = json.dumps(task)
        failure = self._failure_of(name) if vocabulary == self._vocabulary else None
        if failure is None:  # what is known does not wait for the schemas of others
            with self._lock:
                if vocabulary != self._vocabulary:
                    self._end()
                    self._known, self._vocabulary = {}, vocabulary
                failure = self._failure_of(name)
                if failure is None and self._process is None and not is_over():
                    self._start(vocabulary)
                if failure is None:
                    if is_over():
                        return False
                    failure = self._ask(task, is_over, seconds) or ""
                    if failure and is_over():
                        return False
                    self._known[name] = failure, time.monotonic()
                    if len(self._known) > MOST_KEPT:
                        del self._known[next(iter(self._known))]
        if failure:
            raise ValueError(failure)
        return True

    def _start(self, vocabulary: str) -> None:
        path = os.pathsep.join(each for each in sys.path if isinstance(each, str))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "lookahead_hf.tools.serving.schemas"],
            env=os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"},
            stdin=subprocess.PIPE,  # which ends with this process, whatever ends it
            stdout=subprocess.PIPE,
            text=True,
        )
        # The next task needs it, too, so that it starts whoever leaves.
        self._ask(vocabulary, lambda: False, START_SECONDS)

    def end(self) -> None:
        """End the process, whatever it does; the next task starts another one."""
        self.kill()
        with self._lock:
            self._end()
            self._vocabulary = None

    def kill(self) -> None:
        """Kill the process without waiting for it, as a handler of a signal may."""
        if (process := self._process) is not None:
            process.kill()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with suppress(OSError):  # what was not yet written
                    pipe.close()  # type: ignore[union-attr]

    def _ask(self, message: Any, is_over: Callable[[], bool], seconds: float) -> str | None:
        """Return why a task has failed, None if it was done; end a process that is too slow."""
        process, answers = self._process, []
        if process is None:
            raise ValueError("the process that compiles has ended")

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


trials = Trials()  # The process of all servers of this process


def compile_task(compiler: Any, task: Mapping[str, Any]) -> Any:
    """Compile a JSON schema, or the task of `calling`, with xgrammar's compiler."""
    if "schema" in task:
        return compiler.compile_json_schema(task["schema"], any_whitespace=False)
    return compiler.compile_grammar(_grammar(**task))


def _grammar(
    tools: Mapping[str, Any], markers: Sequence[str], thinking: list[str] | None, thinks: bool
) -> Any:
    """Return xgrammar's grammar of one call, with the usual whitespace.

    `markers` stand around the JSON of the call; `thinks`: whether the prompt begins the reasoning.
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
