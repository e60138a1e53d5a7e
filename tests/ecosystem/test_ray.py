"""Ray on a local cluster of two nodes: jobs, a killed worker, and the page about many machines."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.ray import Job, row_seed
from lookahead_hf.tools import ray as data
from tests.helpers.dying_worker import MARK, DyingWorker
from tests.helpers.served import save_ascii_chat

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "many_machines.md"

# Ray leaves sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0}
DRAFTED = {"budget": 8}
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all nodes mount, the folder of a model among it."""
    folder = tmp_path_factory.mktemp("shared")
    save_ascii_chat(folder / "Qwen" / "Qwen3-0.6B")
    return folder


@pytest.fixture(scope="module", autouse=True)
def cluster(shared: Path) -> Iterator[None]:
    """Two nodes, each with a raylet of its own; their workers start in the shared folder."""
    from ray.cluster_utils import Cluster

    before = Path.cwd()
    os.chdir(shared)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv(MARK, str(shared / "killed"))
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        nodes.add_node(num_cpus=2)
        patch.setenv("RAY_ADDRESS", nodes.address)
        ray.init(log_to_driver=False)
        try:
            yield
        finally:
            ray.shutdown()
            nodes.shutdown()
            os.chdir(before)


@pytest.fixture
def job(shared: Path) -> Job:
    model = str(shared / "Qwen" / "Qwen3-0.6B")
    return Job(model, NEW_TOKENS, key="id", seed=7, speculative=DRAFTED, generation=SAMPLED)


def prompts(count: int) -> list[dict[str, Any]]:
    chosen = random.Random(0)
    return [
        {"id": index, "prompt": "".join(chosen.choices("abcd ", k=chosen.randint(4, 30)))}
        for index in range(count)
    ]


def texts_of(answers: Any) -> dict[int, str]:
    """The texts by their ids, each of which occurs once."""
    rows = answers.take_all()
    found = {row["id"]: row["output_text"] for row in rows}
    assert len(found) == len(rows)
    assert all(row["output_error"] is row["output_fallback"] is None for row in rows)
    assert sum(row["output_num_accepted"] for row in rows) > 0
    return found


def test_a_killed_worker_costs_its_block(
    job: Job, shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = prompts(200)
    monkeypatch.setattr(data, "Worker", DyingWorker)
    answers = job.run(ray.data.from_items(rows), concurrency=2, block_size=20).materialize()
    assert (shared / "killed").exists()
    assert texts_of(answers) == in_one_process(job, rows)


def in_one_process(job: Job, rows: list[dict[str, Any]]) -> dict[int, str]:
    """The texts of a worker without Ray, which gets all rows at once."""
    import pyarrow

    table = data.Worker(job)(pyarrow.Table.from_pylist(rows))
    return {row["id"]: row["output_text"] for row in table.to_pylist()}


def test_a_text_is_that_of_generate_whoever_writes_it(job: Job) -> None:
    rows = prompts(12)
    few = texts_of(job.run(ray.data.from_items(rows), concurrency=1, block_size=5))
    turned = ray.data.from_items(rows[::-1])
    assert texts_of(job.run(turned, concurrency=(1, 2), block_size=2)) == few
    model: Any = AutoModelForCausalLM.from_pretrained(job.model).eval()
    tokenizer = tokenizer_of(job)
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        torch.manual_seed(row_seed(7, row["id"]))
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **SAMPLED)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert text == few[row["id"]]


def tokenizer_of(job: Job) -> Any:
    return AutoTokenizer.from_pretrained(job.model)


def test_prompts_of_every_kind(job: Job) -> None:
    said = [{"role": "user", "content": "abc abc"}]
    ids = tokenizer_of(job).apply_chat_template(said, return_dict=True)["input_ids"]
    greedy = Job(job.model, 16, speculative=DRAFTED, generation={"do_sample": False})
    (chat,) = greedy.run(ray.data.from_items([{"prompt": said}])).take_all()
    (tokens,) = greedy.run(ray.data.from_items([{"prompt": list(ids)}])).take_all()
    assert list(chat["output_token_ids"]) == list(tokens["output_token_ids"])
    assert len(chat["output_token_ids"]) == 16
    assert all(row["output_fallback"] is None for row in (chat, tokens))
    assert all(row["output_num_accepted"] > 0 for row in (chat, tokens))


def test_a_row_without_a_prompt_has_an_error_and_the_others_their_texts(job: Job) -> None:
    rows = [{"id": 0, "prompt": "abc"}, {"id": 1, "prompt": ""}, {"id": 2, "prompt": None}]
    found = {row["id"]: row for row in job.run(ray.data.from_items(rows)).take_all()}
    assert found[0]["output_error"] is found[0]["output_fallback"] is None
    assert len(found[0]["output_token_ids"]) == NEW_TOKENS
    why = "a prompt must be a non-empty list of token ids"
    assert all(why in found[each]["output_error"] for each in (1, 2))


def test_a_fallback_is_told(job: Job) -> None:
    unserved = {"draft_invariant": True, "on_fallback": "silent"}
    plain = Job(job.model, 4, speculative=unserved, generation={"do_sample": False})
    (row,) = plain.run(ray.data.from_items(prompts(1))).take_all()
    assert row["output_fallback"] == "continuous_batching"
    assert len(row["output_token_ids"]) == 4


def test_a_model_that_is_not_there_ends_the_job(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="nothing here"):
        Job(str(tmp_path / "nothing here"), 8).run(ray.data.from_items(prompts(3))).take_all()


def snippets(part: str) -> list[str]:
    """The Python code of a section of the page, where `/shared` is the folder of the cluster."""
    (section,) = [each for each in PAGE.read_text().split("\n## ") if each.startswith(part)]
    return [each.partition("```")[0] for each in section.split("```python\n")[1:]]


def run(part: str, shared: Path) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for code in snippets(part):
        exec(compile(code.replace("/shared", str(shared)), str(PAGE), "exec"), names)
    return names


@pytest.fixture
def as_a_new_user() -> None:
    """The page connects to the cluster itself."""
    ray.shutdown()


def test_the_page_answers_a_data_set_and_keeps_a_pool(shared: Path, as_a_new_user: None) -> None:
    names = run("A data set", shared)
    rows = ray.data.read_parquet(str(shared / "answers")).take_all()
    assert sorted(row["id"] for row in rows) == [*range(200)]
    assert all(row["output_text"] and row["output_error"] is None for row in rows)
    assert {row["output_fallback"] for row in rows} == {None}
    assert names["pool"].info.num_texts == 200
    assert len(NgramPool.load(shared / "answers.safetensors")) > 0


def test_the_page_serves_sessions(shared: Path, as_a_new_user: None) -> None:
    names = run("A server", shared)
    try:
        counts = [each.metrics["speculative_decoding"] for each in names["answers"]]
        texts = [each.choices[0].message.content for each in names["answers"]]
    finally:
        names["serve"].shutdown()
    assert len({*texts}) == 1 and texts[0]
    first, second = (each["num_accepted_draft_tokens"] for each in counts)
    assert second > first
