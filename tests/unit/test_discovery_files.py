"""A watched file of sources."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from discovery_cases import Steps, soon, within
from kvevents.service.discovery.engines import EngineProvider
from kvevents.service.discovery.files import FileProvider, read_sources
from kvevents.service.discovery.provider import Finding

GOOD = """
[[sources]]
instance = "a"
endpoint = "tcp://h:5557"
model = "m"
ranks = 2
"""
MORE = GOOD + '[[sources]]\ninstance = "b"\nbase_url = "http://h:8000"\n'


def labels(found: Finding) -> list[str]:
    return [each.label for each in found.registrations]


def put(path: Path, text: str) -> None:
    """Replaced at once by another file, as careful editors and configuration tools do."""
    other = path.with_suffix(".new")
    other.write_text(text)
    other.replace(path)


class Watched:
    """A provider of `path`, and what it found last."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.steps = Steps()
        self.provider = FileProvider(path, clock=self.steps.clock, **options)
        self.found = self.provider.watch()

    async def first(self) -> Finding:
        return await within(soon(self.found))

    async def after(self, change: object = None) -> Finding:
        """The next finding; `change` happens while the provider waits between two looks."""
        following = soon(self.found)
        await self.steps.paused()
        if callable(change):
            change()
        self.steps.go()
        return await within(following)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "fleet.toml"
    found.write_text(GOOD)
    return found


async def test_a_file_is_read_again_when_it_was_replaced(path: Path) -> None:
    """By rename, with engines to be asked among what is new; and its name is what operators see."""
    watched = Watched(path)
    assert watched.provider.name == f"file {path}"
    assert labels(await watched.first()) == ["a rank 0", "a rank 1"]
    found = await watched.after(lambda: put(path, MORE))
    assert labels(found) == ["a rank 0", "a rank 1"]
    assert [type(each) for each in found.providers] == [EngineProvider]
    assert labels(await watched.after(lambda: put(path, "sources = []"))) == []


async def test_a_file_is_read_again_when_it_was_written_in_place(path: Path) -> None:
    """A new size or a new time of modification is enough."""
    watched = Watched(path)
    await watched.first()
    assert len((await watched.after(lambda: path.write_text(MORE))).providers) == 1


async def test_a_configmap_is_read_again_when_its_symlink_is_swapped(tmp_path: Path) -> None:
    """As kubelet does it: fleet.toml -> ..data/fleet.toml, ..data -> ..1, and `..data` renamed over."""
    for name, text in (("..1", GOOD), ("..2", MORE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fleet.toml").write_text(text)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "fleet.toml").symlink_to("..data/fleet.toml")
    watched = Watched(tmp_path / "fleet.toml")
    assert (await watched.first()).providers == ()

    def swap() -> None:
        (tmp_path / "..data_tmp").symlink_to("..2")
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")

    assert len((await watched.after(swap)).providers) == 1


async def test_an_unchanged_file_yields_nothing(path: Path) -> None:
    """Looking costs a stat; nothing is yielded for it."""
    watched = Watched(path)
    await watched.first()
    following = soon(watched.found)
    for _ in range(3):
        assert await watched.steps.step() == 1.0
    await watched.steps.paused()
    assert not following.done()
    following.cancel()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[sources]]\ninstance = "a\n', ["line 2"]),
        ('[[sources]]\ninstance = "a"\nendpoint = "tcp://h:1"\nmodle = "m"\n', ["[[sources]] 1 (a)", "modle", "known fields"]),
        ("", ["no [[sources]]", "sources = []"]),
        ("[sources]\n", ["[[sources]]", "double brackets"]),
        ("[[source]]\n", ["unknown key 'source'"]),
        ("sources = [" + "[" * 5_000, [""]),
    ],
)
async def test_a_bad_file_keeps_what_was_known_and_says_where_it_is_bad(path: Path, text: str, words: list[str]) -> None:
    """A typo, or an editor that has just truncated the file, unregisters no engine; correcting it removes the fault."""
    watched = Watched(path)
    good = await watched.first()
    bad = await watched.after(lambda: put(path, text))
    assert bad.registrations == good.registrations
    (fault,) = bad.faults
    assert fault.subject == str(path)
    assert all(word in fault.sentence for word in [str(path), "named before stay", *words]), fault.sentence
    assert await watched.after(lambda: put(path, GOOD)) == good


async def test_a_file_that_is_not_utf8_or_too_large_is_bad(path: Path) -> None:
    """The fault says that the bytes are not text, or that there are too many."""
    watched = Watched(path, max_bytes=1000)
    await watched.first()
    assert "utf-8" in (await watched.after(lambda: path.write_bytes(b"\xff" * 999))).faults[0].sentence
    assert "more than 1000 bytes" in (await watched.after(lambda: put(path, "#" * 1001))).faults[0].sentence


async def test_a_file_that_disappears_keeps_what_was_known(path: Path) -> None:
    """And comes back as it is then."""
    watched = Watched(path)
    good = await watched.first()
    gone = await watched.after(path.unlink)
    assert gone.registrations == good.registrations
    assert "No such file" in gone.faults[0].sentence
    assert len((await watched.after(lambda: path.write_text(MORE))).providers) == 1


async def test_a_file_that_was_never_there_is_a_fault_from_the_start(tmp_path: Path) -> None:
    """The service starts without it and takes it when it comes."""
    watched = Watched(tmp_path / "later.toml")
    first = await watched.first()
    assert first.registrations == ()
    assert "stay" not in first.faults[0].sentence
    found = await watched.after(lambda: (tmp_path / "later.toml").write_text(GOOD))
    assert (labels(found), found.faults) == (["a rank 0", "a rank 1"], ())


async def test_a_file_that_is_written_while_it_is_read_counts_only_when_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that is in the middle of a writer would see half of the fleet, and unregister the other half."""
    watched = Watched(path)
    await watched.first()

    def read_while_written(it: Path, *, alone: bool, max_bytes: int) -> object:
        monkeypatch.undo()
        half = read_sources(it, alone=alone, max_bytes=max_bytes)
        path.write_text(MORE)
        return half[:0]

    monkeypatch.setattr("kvevents.service.discovery.files.read_sources", read_while_written)
    following = soon(watched.found)
    await watched.steps.paused()
    put(path, GOOD + "# being written")
    watched.steps.go()
    await watched.steps.step()
    found = await within(following)
    assert (labels(found), len(found.providers)) == (["a rank 0", "a rank 1"], 1)


async def test_every_wrong_table_is_reported(path: Path) -> None:
    """All are reported at once, up to a limit that a person can still read."""
    put(path, "[[sources]]\nx = 1\n" * 40)
    with pytest.raises(ExceptionGroup) as caught:
        read_sources(path)
    assert len(caught.value.exceptions) == 40
    assert len((await Watched(path).first()).faults) == 16


async def test_cancelling_ends_it_at_once(path: Path) -> None:
    """While it waits, with the generator closed behind it."""
    watched = Watched(path)
    await watched.first()
    following = soon(watched.found)
    await watched.steps.paused()
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    with pytest.raises(StopAsyncIteration):
        await anext(watched.found)
