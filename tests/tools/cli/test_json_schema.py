"""`lookahead-hf generate --json-schema`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.commands import Run
from tests.helpers.grammars import LEVEL, schema
from tests.helpers.tiny_chat import save_tiny_chat


def test_the_command_obeys_a_schema(tmp_path: Path, run: Run) -> None:
    folder, file = save_tiny_chat(tmp_path / "model"), tmp_path / "schema.json"
    file.write_text(json.dumps(schema(level=LEVEL, is_open={"type": "boolean"})))
    common = ("--model", str(folder), "--json-schema", str(file), "--max-new-tokens", "60")
    record = json.loads(run("generate", *common, "abc").out)
    assert record["level"] in LEVEL["enum"]
    file.write_text('{"type": "x"}')
    said = run("generate", *common, "abc", code=1).err
    assert "the JSON schema cannot be compiled: Unsupported type" in said.splitlines()[-1]
    file.write_bytes(b'{"title": "gr\xf6\xdfe"}')
    said = run("generate", *common, "abc", code=1).err
    assert f"{file} is not text in UTF-8: " in said.splitlines()[-1]
