"""`kvevents.sim.workloads`: workloads by name, their settings, and their document."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

import paths
from kvevents.errors import ConfigError
from kvevents.sim.workloads import WORKLOADS, read_trace, workload

DOCUMENT = paths.ROOT / "docs" / "guides" / "workloads.md"
SETTINGS = {name: set(kind.__struct_fields__) for name, kind in WORKLOADS.items()}
GENERATED = [name for name in WORKLOADS if name != "trace"]


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_requests(name: str) -> None:
    """Requests are in the order of their times, each with a prompt, an answer and a session. Another seed gives others."""
    requests = list(workload(name, requests=300, seed=5))
    assert requests == list(workload(name, requests=300, seed=5))
    assert requests != list(workload(name, requests=300, seed=6))
    assert len(requests) == 300
    assert all(before.at <= after.at for before, after in pairwise(requests))
    assert all(request.prompt and request.output and request.session for request in requests)


@pytest.mark.parametrize("name", WORKLOADS)
def test_requests_have_the_requested_rate_from_the_beginning(name: str) -> None:
    """This includes multi-turn workloads, which need no time to reach their rate."""
    requests = list(workload(name, requests=1_000, rate=40.0))
    assert requests[-1].at == pytest.approx(1_000 / 40, rel=0.1)
    if name in GENERATED:
        assert requests[249].at == pytest.approx(250 / 40, rel=0.2)


@pytest.mark.parametrize("name", GENERATED)
def test_workloads_with_different_seeds_share_no_text(name: str) -> None:
    """So two workloads can run side by side."""
    one, other = (
        {piece for request in workload(name, requests=50, seed=seed) for piece in request.prompt.pieces} for seed in (1, 2)
    )
    assert not {piece[0] for piece in one} & {piece[0] for piece in other}


def test_a_workload_has_at_most_the_requested_number_of_requests() -> None:
    assert len(list(workload("trace", requests=10**6))) == 1_000
    assert list(workload("chat", requests=0)) == []


def test_settings_are_the_fields_of_a_frozen_class() -> None:
    assert {"rate", "arrivals", "lora_share", "turns"} <= SETTINGS["chat"]
    assert {request.lora for request in workload("chat", requests=50, lora_share=1.0, loras=1)} == {"lora-0"}
    with pytest.raises(AttributeError, match="immutable"):
        WORKLOADS["chat"]().rate = 3  # type: ignore[misc]


def test_the_guide_of_workloads_is_correct(tmp_path: Path) -> None:
    """Its example runs, its lines can be read, and its table has every workload with every setting."""
    text = DOCUMENT.read_text()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, {})  # noqa: S102 - our own document
    lines = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    (tmp_path / "trace.jsonl").write_text("".join(lines))
    assert len(list(read_trace(tmp_path / "trace.jsonl"))) == 3
    rows = dict(re.findall(r"^\| `([a-z-]+)` \| .* \| (.*) \|$", text.split("## Names")[1].split("## ")[0], re.MULTILINE))
    common = SETTINGS["chat"] & SETTINGS["agents"] & SETTINGS["llm-d"]
    documented = {name: set(re.findall(r"`([a-z_]+)`", settings)) for name, settings in rows.items()}
    assert documented == {name: SETTINGS[name] - (common if name in GENERATED else set()) for name in WORKLOADS}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"name": "chatter"}, "unknown workload 'chatter': expected trace, chat, agents, shared-prompts, llm-d"),
        ({"name": "chat", "requests": -1}, "invalid requests -1"),
        ({"name": "chat", "turn": 3}, "unknown setting turn of workload chat: expected rate, arrivals"),
        ({"name": "chat", "rate": 0}, "rate is 0"),
        ({"name": "trace", "rate": 0}, "rate is 0"),
    ],
)
def test_invalid_names_and_settings_raise(call: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workload(**call)  # type: ignore[arg-type]
