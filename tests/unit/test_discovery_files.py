"""The file provider watches a file of sources."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from discovery_cases import ManualClock, await_in_time, start_next
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


def labels_of(found: Finding) -> list[str]:
    return [each.label for each in found.registrations]


def replace_file(path: Path, text: str) -> None:
    """Replace the file by another one at once, as careful editors and configuration tools do."""
    other = path.with_suffix(".new")
    other.write_text(text)
    other.replace(path)


class WatchedFile:
    """A provider of `path`, and its findings."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.steps = ManualClock()
        self.provider = FileProvider(path, clock=self.steps.clock, **options)
        self.found = self.provider.watch()

    async def first(self) -> Finding:
        return await await_in_time(start_next(self.found))

    async def next_after(self, change: object = None) -> Finding:
        """Return the next finding; `change` is called while the provider waits between two checks of the file."""
        next_finding = start_next(self.found)
        await self.steps.wait_for_sleep()
        if callable(change):
            change()
        self.steps.end_sleep()
        return await await_in_time(next_finding)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "fleet.toml"
    found.write_text(GOOD)
    return found


async def test_a_file_is_read_again_when_it_was_replaced(path: Path) -> None:
    """The file is renamed; the new one has an engine whose sources must be requested. The provider's name has the path."""
    watched = WatchedFile(path)
    assert watched.provider.name == f"file {path}"
    assert labels_of(await watched.first()) == ["a rank 0", "a rank 1"]
    found = await watched.next_after(lambda: replace_file(path, MORE))
    assert labels_of(found) == ["a rank 0", "a rank 1"]
    assert [type(each) for each in found.providers] == [EngineProvider]
    assert labels_of(await watched.next_after(lambda: replace_file(path, "sources = []"))) == []


async def test_a_file_is_read_again_when_it_was_written_in_place(path: Path) -> None:
    """A new size or a new time of modification is enough."""
    watched = WatchedFile(path)
    await watched.first()
    assert len((await watched.next_after(lambda: path.write_text(MORE))).providers) == 1


async def test_a_configmap_is_read_again_when_its_symlink_is_swapped(tmp_path: Path) -> None:
    """kubelet does it like this: fleet.toml -> ..data/fleet.toml, ..data -> ..1, and `..data` is replaced by a rename."""
    for name, text in (("..1", GOOD), ("..2", MORE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fleet.toml").write_text(text)
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "fleet.toml").symlink_to("..data/fleet.toml")
    watched = WatchedFile(tmp_path / "fleet.toml")
    assert (await watched.first()).providers == ()

    def swap() -> None:
        (tmp_path / "..data_tmp").symlink_to("..2")
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")

    assert len((await watched.next_after(swap)).providers) == 1


async def test_an_unchanged_file_yields_nothing(path: Path) -> None:
    """A check costs one stat call, and yields no finding."""
    watched = WatchedFile(path)
    await watched.first()
    next_finding = start_next(watched.found)
    for _ in range(3):
        assert await watched.steps.step() == 1.0
    await watched.steps.wait_for_sleep()
    assert not next_finding.done()
    next_finding.cancel()


async def test_a_file_can_begin_with_a_byte_order_mark(path: Path) -> None:
    """Editors of Windows write one."""
    replace_file(path, f"\ufeff{GOOD}")
    assert labels_of(await WatchedFile(path).first()) == ["a rank 0", "a rank 1"]


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
async def test_an_invalid_file_keeps_the_known_engines_and_names_the_place_of_the_error(
    path: Path, text: str, words: list[str]
) -> None:
    """A typo, or an editor that has just truncated the file, unregisters no engine; correcting it removes the fault."""
    watched = WatchedFile(path)
    good = await watched.first()
    invalid = await watched.next_after(lambda: replace_file(path, text))
    assert invalid.registrations == good.registrations
    (fault,) = invalid.faults
    assert all(word in fault for word in [str(path), "named before stay", *words]), fault
    assert await watched.next_after(lambda: replace_file(path, GOOD)) == good


async def test_a_misspelled_table_of_a_configuration_file_keeps_the_known_engines(path: Path) -> None:
    """A configuration file may contain other settings, and no engine."""
    watched = WatchedFile(path, keys=("sources", "source_files", "port"))
    good = await watched.first()
    invalid = await watched.next_after(lambda: replace_file(path, GOOD.replace("[[sources]]", "[[source]]")))
    assert invalid.registrations == good.registrations
    assert "unknown key 'source'; did you mean 'sources'? correct it; the sources that it named" in invalid.faults[0]
    empty = await watched.next_after(lambda: path.write_text(""))
    assert empty.registrations == good.registrations, "the file was truncated to be written again"
    assert "write sources = [] for an empty list; the sources that it named" in empty.faults[0]
    assert (await watched.next_after(lambda: replace_file(path, "port = 1"))).registrations == ()
    assert (await watched.next_after(lambda: path.write_text(""))).faults == ()


async def test_a_file_that_is_not_utf8_or_too_large_is_invalid(path: Path) -> None:
    """The fault says that the bytes are not text, or that there are too many."""
    watched = WatchedFile(path, max_bytes=1000)
    await watched.first()
    assert "utf-8" in (await watched.next_after(lambda: path.write_bytes(b"\xff" * 999))).faults[0]
    assert "more than 1000 bytes" in (await watched.next_after(lambda: replace_file(path, "#" * 1001))).faults[0]


async def test_the_known_engines_stay_when_the_file_disappears(path: Path) -> None:
    """The provider reads the file again when it returns."""
    watched = WatchedFile(path)
    good = await watched.first()
    missing = await watched.next_after(path.unlink)
    assert missing.registrations == good.registrations
    assert "No such file" in missing.faults[0]
    assert len((await watched.next_after(lambda: path.write_text(MORE))).providers) == 1


async def test_a_file_that_does_not_exist_is_a_fault_from_the_start(tmp_path: Path) -> None:
    """The service starts without the file, and reads it as soon as it exists."""
    watched = WatchedFile(tmp_path / "later.toml")
    first = await watched.first()
    assert first.registrations == ()
    assert "stay" not in first.faults[0]
    found = await watched.next_after(lambda: (tmp_path / "later.toml").write_text(GOOD))
    assert (labels_of(found), found.faults) == (["a rank 0", "a rank 1"], ())


async def test_a_file_that_is_written_while_it_is_read_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader in the middle of a write would see half of the fleet, and unregister the other half."""
    watched = WatchedFile(path)
    await watched.first()

    def read_while_written(given: Path, *, keys: tuple[str, ...], max_bytes: int) -> object:
        monkeypatch.undo()
        half = read_sources(given, keys=keys, max_bytes=max_bytes)
        path.write_text(MORE)
        return half[:0]

    monkeypatch.setattr("kvevents.service.discovery.files.read_sources", read_while_written)
    next_finding = start_next(watched.found)
    await watched.steps.wait_for_sleep()
    replace_file(path, GOOD + "# being written")
    watched.steps.end_sleep()
    await watched.steps.step()
    found = await await_in_time(next_finding)
    assert (labels_of(found), len(found.providers)) == (["a rank 0", "a rank 1"], 1)


async def test_every_wrong_table_is_reported(path: Path) -> None:
    """All are reported at once, up to a limit that a person can still read."""
    replace_file(path, "[[sources]]\nx = 1\n" * 40)
    with pytest.raises(ExceptionGroup) as caught:
        read_sources(path)
    assert len(caught.value.exceptions) == 40
    assert len((await WatchedFile(path).first()).faults) == 16


async def test_cancelling_ends_the_watch_at_once(path: Path) -> None:
    """The provider is waiting when it is cancelled, and its generator is closed afterwards."""
    watched = WatchedFile(path)
    await watched.first()
    next_finding = start_next(watched.found)
    await watched.steps.wait_for_sleep()
    next_finding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await next_finding
    with pytest.raises(StopAsyncIteration):
        await anext(watched.found)
