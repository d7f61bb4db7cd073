"""Documents say what the code says."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from kvevents.compat import sglang, vllm
from kvevents.endpoints import should_bind
from kvevents.stream import TRANSITIONS
from ports import quiet_port
from test_cli import Program

DOCS = Path(__file__).parent.parent / "docs"
README = (DOCS.parent / "README.md").read_text()


def test_the_picture_of_the_phases_is_the_table() -> None:
    """docs/stream.md shows exactly the transitions that the machine allows."""
    text = (DOCS / "stream.md").read_text()
    picture = text.split("```")[1].strip()
    table = "\n".join(
        f"{phase.name:<12} -> {after.name:<12} {why}" for phase, ways in TRANSITIONS.items() for after, why in ways.items()
    )
    assert picture == table


def test_the_examples_of_the_testing_guide_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of docs/testing.md does what it says, one after the other."""
    monkeypatch.chdir(DOCS.parent)
    names: dict[str, object] = {}
    for block in python_blocks(DOCS / "testing.md"):
        exec(block, names)  # noqa: S102 - our own document


def snippet(heading: str, *replaced: tuple[str, str]) -> list[str]:
    """The command that runs README's Python below a heading, with each of these texts replaced where it stands."""
    section = README.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    for old, new in replaced:
        assert old in block
        block = block.replace(old, new)
    return [sys.executable, "-c", block]


@pytest.fixture
def ports() -> tuple[tuple[str, str], ...]:
    """The ports that README names, and quiet ones in their place."""
    return tuple((f":{port}", f":{quiet_port()}") for port in (5557, 5558))


def test_the_snippets_of_the_readme_work_with_each_other(ports: tuple[tuple[str, str], ...]) -> None:
    """What one publishes another reads, and in a third the prompt is found; all as README has them, but faster."""
    faster = (("range(60)", "range(5000)"), ("sleep(1)", "sleep(0.02)"))
    with Program(command=snippet("Publish one", *ports, *faster)) as publisher:
        with Program(command=snippet("Read a stream", *ports)) as reader:
            reader.out.wait(r"^0 \[BlockStored\(block_hashes=\[0\], .* token_ids=\[1, 2, 3, 0\]")
            reader.out.wait(r"^\d+ \[BlockStored.* EXACT$")
        with Program(command=snippet("Find a prefix", *ports)) as finder:
            finder.out.wait(r"rank 0: 4 tokens, gpu 4.* EXACT$")
        assert publisher.process.poll() is None, publisher.err.all


def test_what_the_readme_publishes_ends_with_a_report(ports: tuple[tuple[str, str], ...]) -> None:
    """The last lines of that snippet, too."""
    with Program(command=snippet("Publish one", *ports, ("range(60)", "range(3)"), ("sleep(1)", "sleep(0.01)"))) as publisher:
        ended = publisher.end()
    assert (ended.code, ended.err) == (0, "")
    assert "accepted=3" in ended.out


def test_engines_with_the_options_of_the_readme_listen() -> None:
    """vLLM and SGLang take the JSON, and publish at the ports of the snippets; neither connects instead."""
    section = README.partition("\n## Turn events on\n")[2].partition("\n## ")[0]
    vllm_json, sglang_json = re.findall(r"^  '(\{.*\})'$", section, re.MULTILINE)
    configs: tuple[Any, ...] = (vllm.KVEventsConfig(**json.loads(vllm_json)), sglang.KVEventsConfig.from_cli(sglang_json))
    for config in configs:
        assert config.publisher == "zmq"
        assert (config.endpoint, config.replay_endpoint) == ("tcp://*:5557", "tcp://*:5558")
        assert should_bind(config.endpoint)


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)
