"""More than one machine, on Ray: texts for a data set (`Job`), and servers with sessions."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import lookahead_hf
from lookahead_hf.config import SpeculativeConfig, check_int
from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.tools.serving.fields import current

if TYPE_CHECKING:
    import pyarrow
    import ray.data


__all__ = ["Job", "Worker", "application", "row_seed"]

HEADER = b"x-session-id"
"""Names the session of a request. Ray's consistent hash router reads the same header."""

SESSION_TOKENS = 100_000  # Most tokens that are kept of a session, at 34 bytes each


def application(
    model: str, speculative: Any = True, *, session_pools: int = 0, **options: Any
) -> Any:
    """Build the application of `lookahead-hf serve`, to be run by any ASGI server.

    It loads the model, so call it in the process that serves.

    Args:
        model: A folder or a name of the Hugging Face hub.
        speculative: How to speculate where a request does not say, as in `generate`.
        session_pools: Most sessions whose texts are kept. A request with the header `x-session-id`
            drafts from the earlier answers of its session, and from nobody else's.
        **options: Options of transformers' `Serve`, such as `device` and `dtype`.

    Returns:
        The application, a FastAPI object.

    Raises:
        ValueError: `speculative` or `session_pools` has a value that is not allowed.
    """
    config = SpeculativeConfig.resolve(speculative)
    check_int("session_pools", session_pools, 0, 2**20)
    if config is None:
        raise ValueError(f"speculative={speculative!r}: without speculation, transformers serves")
    if session_pools and (config.pool is not None or config.learn):
        raise ValueError("session_pools= replaces pool and learn of speculative=: leave them out")

    from starlette.middleware import Middleware
    from transformers.cli.serve import Serve

    from lookahead_hf.tools.serving.server import speculating

    class Unstarted(Serve):
        def start_server(self) -> None:
            """Leave that to the caller."""

    with speculating(config, lookahead_hf.warm_up):
        served = Unstarted(force_model=model, non_blocking=True, **options)
    app = served.server.config.app
    if session_pools:  # behind the middleware that reads a request's own fields
        app.user_middleware.append(Middleware(SessionPools, config=config, most=session_pools))
    return app


class SessionPools:
    """An ASGI middleware that gives the requests of each session a pool of their own.

    Args:
        app: The application that answers.
        config: How the server speculates where a request does not say.
        most: Most sessions; the one that was idle longest leaves first.
    """

    def __init__(self, app: Any, config: SpeculativeConfig, most: int) -> None:
        self._app, self._config, self._most = app, config, most
        self._pools: OrderedDict[bytes, NgramPool] = OrderedDict()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, as ASGI asks for."""
        request, session = current.get(), dict(scope.get("headers", ())).get(HEADER)
        if request is not None and session and request.speculative is not False:
            own = request.speculative
            asked = own if isinstance(own, SpeculativeConfig) else self._config
            request.speculative = replace(asked, pool=self._pool(session), learn=True)
        await self._app(scope, receive, send)

    def _pool(self, session: bytes) -> NgramPool:
        if session not in self._pools:
            self._pools[session] = NgramPool(SESSION_TOKENS)
        self._pools.move_to_end(session)
        if len(self._pools) > self._most:
            self._pools.popitem(last=False)
        return self._pools[session]


OUTPUT = "output_"  # How the names of the columns that a job adds begin


def row_seed(seed: int, key: Any) -> int:
    """Return the seed of a row: its sample is what `generate` writes after `torch.manual_seed`.

    Args:
        seed: The seed of the job.
        key: The row's value in the column `key`, or else its prompt as a list of token ids.
    """
    digest = hashlib.blake2b(f"{seed} {key}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class Job:
    """Generates a text for each row of a data set.

    Greedy texts in float32, and samples with a `seed`, depend on the row alone: not on the number
    of workers, on which of them wrote it, or on how often it was tried.

    Attributes:
        model: A folder or a name of the Hugging Face hub, which every worker loads.
        max_new_tokens: Most tokens of a text.
        column: The column of the prompts: texts, lists of token ids, or chats, which are lists of
            messages `{"role": ..., "content": ...}`.
        key: A column that identifies rows; with `seed` it decides about their samples. Without it
            the prompts do, so that equal prompts get equal samples.
        seed: The seed of the job; None draws other samples in every run.
        speculative: The argument `speculative=` of `generate`.
        max_slots: Texts that a worker decodes together.
        generation: Further fields of the generation config, such as `{"temperature": 0.7}`.
        loading: Further arguments of `AutoModelForCausalLM.from_pretrained`.
    """

    model: str
    max_new_tokens: int
    column: str = "prompt"
    key: str | None = None
    seed: int | None = None
    speculative: Any = True
    max_slots: int = 8
    generation: Mapping[str, Any] = field(default_factory=dict)
    loading: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_int("max_new_tokens", self.max_new_tokens, 1, 2**31)
        check_int("max_slots", self.max_slots, 1, 4096)
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**63)
        SpeculativeConfig.resolve(self.speculative)
        if unknown := GenerationConfig().update(**self.settings):
            raise ValueError(f"generation configs have no {', '.join(unknown)}: leave it out")
        if self.settings.get("num_return_sequences", 1) != 1:
            raise ValueError(
                "a row gets one text, so leave num_return_sequences out: repeat the row of a "
                "prompt, each time with another value in the column `key`"
            )

    @property
    def settings(self) -> dict[str, Any]:
        """Fields of the generation config that are not the model's own."""
        return {"max_new_tokens": self.max_new_tokens, **self.generation}

    def run(
        self,
        rows: ray.data.Dataset,
        *,
        concurrency: int | tuple[int, int] = 1,
        block_size: int = 64,
        **resources: Any,
    ) -> ray.data.Dataset:
        """Return the data set with columns for the texts, which Ray computes when they are read.

        The columns are `output_text`, `output_token_ids`, `output_num_steps`,
        `output_num_drafted`, `output_num_accepted`, `output_fallback` (why nothing was speculated)
        and `output_error` (why the row has no text).

        Args:
            rows: The data set.
            concurrency: Number of workers, or the least and the most. The least has to leave a core
                for reading.
            block_size: Rows that a worker takes at a time. If it dies, they are tried again.
            **resources: What each worker needs, as in `map_batches`: `num_gpus=1`, `num_cpus=8`.

        Raises:
            ValueError: The columns of the data set do not suit, or a number is wrong.
        """
        from ray.data import ActorPoolStrategy

        least, most = (concurrency,) * 2 if isinstance(concurrency, int) else concurrency
        check_int("concurrency", most, 1, 2**31)
        check_int("concurrency", least, 1, most)
        check_int("block_size", block_size, 1, 2**31)
        columns = rows.columns() or []
        for name in (self.column, self.key or self.column):
            if name not in columns:
                raise ValueError(f"the data set has no column {name!r}, only {', '.join(columns)}")
        if taken := [name for name in columns if name.startswith(OUTPUT)]:
            raise ValueError(f"rename {', '.join(taken)}: a job adds columns that begin so")
        return rows.repartition(target_num_rows_per_block=block_size).map_batches(
            Worker,
            fn_constructor_args=(self,),
            batch_size=block_size,
            batch_format="pyarrow",
            compute=ActorPoolStrategy(min_size=least, max_size=most),
            **resources,
        )


class Worker:
    """Holds the model of one worker; `map_batches` calls it with tables, batch_format="pyarrow"."""

    def __init__(self, job: Job) -> None:
        """Load the model, onto the GPU if Ray gave the worker one, and warm it up."""
        self._job = job
        self._tokenizer = AutoTokenizer.from_pretrained(job.model)
        model = AutoModelForCausalLM.from_pretrained(job.model, **{"dtype": "auto", **job.loading})
        if torch.cuda.is_available() and "device_map" not in job.loading:
            model = model.to("cuda")
        self._model = lookahead_hf.enable(model.eval())
        self._config = copy.deepcopy(model.generation_config)
        self._config.update(**job.settings)
        lookahead_hf.warm_up(model, batch_size=job.max_slots)

    def __call__(self, rows: pyarrow.Table) -> pyarrow.Table:
        """Return the rows with their texts."""
        job = self._job
        prompts = [self._token_ids(prompt) for prompt in rows[job.column].to_pylist()]
        requests: list[Any] = prompts
        if self._config.do_sample and job.seed is not None:
            keys = prompts if job.key is None else rows[job.key].to_pylist()
            seeds = [row_seed(job.seed, key) for key in keys]
            pairs = zip(prompts, seeds, strict=True)
            requests = [{"input_ids": prompt, "seed": seed} for prompt, seed in pairs]
        given = {"speculative": job.speculative, "max_slots": job.max_slots}
        outputs = self._model.generate_batch(requests, self._config, **given)
        for name, values in self._columns([*outputs.values()]).items():
            rows = rows.append_column(OUTPUT + name, values)
        return rows

    def _token_ids(self, prompt: Any) -> list[int]:
        """Return the token ids of a prompt; [] for an empty one, whose row then has an error."""
        if isinstance(prompt, str):
            return list(self._tokenizer(prompt).input_ids)
        prompt = [] if prompt is None else list(prompt)
        if not prompt or not isinstance(prompt[0], Mapping):
            return prompt
        # Arrow gives every message the fields of all of them.
        chat = [
            {name: value for name, value in said.items() if value is not None} for said in prompt
        ]
        encoded = self._tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True
        )
        return list(encoded["input_ids"])

    def _columns(self, outputs: list[Any]) -> dict[str, pyarrow.Array]:
        from pyarrow import array, int32, list_, string

        ids = [output.generated_tokens for output in outputs]
        fallen_back = lookahead_hf.last_stats(self._model) or lookahead_hf.SpeculativeStats()
        stats = [getattr(output, "speculative_stats", None) or fallen_back for output in outputs]
        counts = ("num_steps", "num_drafted", "num_accepted")
        return {
            "text": array(self._tokenizer.batch_decode(ids, skip_special_tokens=True), string()),
            "token_ids": array(ids, list_(int32())),
            **{name: array([getattr(each, name) for each in stats], int32()) for name in counts},
            "fallback": array([each.fallback_reason for each in stats], string()),
            "error": array([output.error for output in outputs], string()),
        }
