"""Ray on a local cluster of two nodes: the texts of a job, and the page about many machines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lookahead_hf.ngram_pool import NgramPool
from lookahead_hf.ray import Job, row_seed
from tests.helpers.served import save_ascii_chat

ray = pytest.importorskip("ray")
pytest.importorskip("ray.data")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "many_machines.md"

# Ray leaves sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 0}


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


def test_a_text_is_that_of_generate_whoever_writes_it(shared: Path) -> None:
    folder = str(shared / "Qwen" / "Qwen3-0.6B")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    said = [{"role": "user", "content": "abc abc"}]
    tokens = tokenizer.apply_chat_template(said, return_dict=True)["input_ids"]
    rows = [{"id": at, "prompt": "abcd "[at % 3 :] * (1 + at % 5)} for at in range(12)]
    job = Job(folder, 16, key="id", seed=7, speculative={"budget": 8}, generation=SAMPLED)
    few = texts_of(job.run(ray.data.from_items(rows), concurrency=1, block_size=5))
    turned = ray.data.from_items(rows[::-1])
    assert texts_of(job.run(turned, concurrency=(1, 2), block_size=2)) == few
    for prompt in (said, list(tokens)):
        (text,) = texts_of(job.run(ray.data.from_items([{"id": 12, "prompt": prompt}]))).values()
        assert few.setdefault(12, text) == text
    for row in (*rows, {"id": 12, "prompt": tokenizer.decode(tokens)}):
        ids = tokenizer(row["prompt"], return_tensors="pt").input_ids
        torch.manual_seed(row_seed(7, row["id"]))
        mask = torch.ones_like(ids)
        out = model.generate(ids, attention_mask=mask, max_new_tokens=16, **SAMPLED)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert text == few[row["id"]]


def texts_of(answers: Any) -> dict[int, str]:
    """The texts by their ids."""
    rows = answers.take_all()
    assert all(row["output_error"] is row["output_fallback"] is None for row in rows)
    assert sum(row["output_num_accepted"] for row in rows) > 0
    return {row["id"]: row["output_text"] for row in rows}


def test_a_row_without_a_text_says_why_and_the_others_have_theirs(shared: Path) -> None:
    job = Job(str(shared / "Qwen" / "Qwen3-0.6B"), 4)
    rows = [{"id": 0, "prompt": "abc"}, {"id": 1, "prompt": ""}, {"id": 2, "prompt": None}]
    found = {row["id"]: row for row in job.run(ray.data.from_items(rows)).take_all()}
    assert found[0]["output_error"] is found[0]["output_fallback"] is None
    assert len(found[0]["output_token_ids"]) == 4
    why = "a prompt must be a non-empty list of token ids"
    assert all(why in found[each]["output_error"] for each in (1, 2))


def run(part: str, shared: Path) -> dict[str, Any]:
    """Run a section of the page as a new user, `/shared` being the folder of the cluster."""
    ray.shutdown()  # the page connects to the cluster itself
    (section,) = [each for each in PAGE.read_text().split("\n## ") if each.startswith(part)]
    names: dict[str, Any] = {}
    for each in section.split("```python\n")[1:]:
        code = each.partition("```")[0].replace("/shared", str(shared))
        exec(compile(code, str(PAGE), "exec"), names)
    return names


def test_the_page_answers_a_data_set_and_keeps_a_pool(shared: Path) -> None:
    names = run("A data set", shared)
    rows = ray.data.read_parquet(str(shared / "answers")).take_all()
    assert sorted(row["id"] for row in rows) == [*range(200)]
    assert all(row["output_text"] and row["output_error"] is None for row in rows)
    assert {row["output_fallback"] for row in rows} == {None}
    assert names["pool"].info.num_texts == 200
    assert len(NgramPool.load(shared / "answers.safetensors")) > 0


def test_the_page_serves_sessions(shared: Path) -> None:
    names = run("A server", shared)
    try:
        counts = [each.metrics["speculative_decoding"] for each in names["answers"]]
        texts = [each.choices[0].message.content for each in names["answers"]]
    finally:
        names["serve"].shutdown()
    assert len({*texts}) == 1 and texts[0]
    first, second = (each["num_accepted_draft_tokens"] for each in counts)
    assert second > first
