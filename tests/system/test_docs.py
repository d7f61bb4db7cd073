"""Documents agree with the code."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from importlib import import_module
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec
import pytest

import paths
from cli_cases import Program
from doc_blocks import SHELLS, Block, blocks_of, commands_of, list_documents
from kvevents import KVEventBatch, RawBatch, Source, Subscriber
from kvevents.cli.program import make_parser
from kvevents.compat import sglang, vllm
from kvevents.endpoints import should_bind
from kvevents.index import PrefixIndex
from kvevents.relay import journal_format
from kvevents.stream import TRANSITIONS, Checkpoint
from kvevents.wire import encode_batch
from kvevents_plane import records, snapshots
from service_cases import engine, prompt
from tools.docs_pictures import PICTURES, diagrams
from tools.ports import reserve_port

DOCS = paths.ROOT / "docs"
README = DOCS.parent / "README.md"


def test_the_state_diagram_is_the_transition_table() -> None:
    """docs/concepts/replay.md shows exactly the changes of state in the table, with the inputs that cause them."""
    edges: dict[tuple[str, str], list[str]] = {}
    for state, row in TRANSITIONS.items():
        for input_, transition in row.items():
            if transition.state is not state:
                edges.setdefault((state.name, transition.state.name), []).append(input_.name)
    diagram = ["stateDiagram-v2", "    [*] --> CONNECTING", "    [*] --> RESTORED"]
    diagram += [f"    {one} --> {other}: {', '.join(inputs)}" for (one, other), inputs in edges.items()]
    text = (DOCS / "concepts" / "replay.md").read_text()
    assert text.split("```mermaid\n")[-1].split("\n```")[0] == "\n".join(diagram)


def test_every_diagram_has_its_picture_for_the_site() -> None:
    """`python -m tools.docs_pictures` draws them."""
    assert diagrams().keys() == set(PICTURES.glob("*.svg"))


def test_versions_of_formats_are_those_of_the_code() -> None:
    """The table of docs/stability.md has the version that each format's module writes."""
    rows = dict(re.findall(r"^\| ([\w ']+\w)[^|]* \| (\d+) \|", (DOCS / "stability.md").read_text(), re.MULTILINE))
    frames = (paths.ROOT / "native" / "index" / "src" / "snapshot" / "frames.rs").read_text()
    [index] = re.findall(r"pub const VERSION: u32 = (\d+);", frames)
    assert rows == {
        "index snapshot": index,
        "relay journal": str(journal_format.VERSION),
        "pages of a plane's log": str(records.VERSION),
        "snapshot of a plane's partition": str(snapshots.VERSION),
    }


def test_the_examples_of_the_testing_guide_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of docs/developers/testing.md run in order without an error."""
    monkeypatch.chdir(DOCS.parent)
    names: dict[str, object] = {}
    for block in python_blocks(DOCS / "developers" / "testing.md"):
        exec(block, names)  # noqa: S102 - our own document


PATIENT: tuple[str, str] = ("shutdown()", "shutdown(60)")
"""Gives a publisher the time of a busy machine to send what it reports as sent."""


def test_the_example_of_publishing_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The example reports that both batches are sent."""
    (block,) = python_blocks(DOCS / "guides" / "publishing.md")
    exec(block.replace(*PATIENT), {})  # noqa: S102 - our own document
    assert re.match(r"tcp://127\.0\.0\.1:\d+ ShutdownReport\(sent=2, unsent=0, ", capsys.readouterr().out)


@pytest.mark.parametrize("name", ["guides/simulation", "guides/workloads", "reference/extension-points"])
def test_the_examples_about_traffic_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = python_blocks(DOCS / f"{name}.md")
    exec(block, {})  # noqa: S102 - our own document
    assert re.match(r"[1-9]\d*% of ", capsys.readouterr().out)


def test_the_examples_of_the_index_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first example follows an engine until its first batch; another rank is added before the last example."""
    following, matching, moving = python_blocks(DOCS / "concepts" / "prefix-match.md")
    tokens = prompt(1)
    with engine() as made:
        made.store(tokens, lora_name="adapter-a", extra_keys=[("tenant-1",), None, None, None])
        following = following.replace("tcp://10.0.0.7:5557", made.endpoint)
        following = following.replace("tcp://10.0.0.7:5558", made.replay_endpoint or "")
        names: dict[str, Any] = {"token_ids": tokens, "path": tmp_path / "index", "other": PrefixIndex()}
        exec(f"{following}        break\n", names)  # noqa: S102 - our own document
        exec(matching, names)  # noqa: S102 - as above
        assert capsys.readouterr().out.startswith("engine-7 0 64 ")
        names["index"].apply(RawBatch("engine-7", 1, 0, 0, False, encode_batch(KVEventBatch(0.0, []))))
        exec(moving, names)  # noqa: S102 - as above
        assert [(each.source, each.rank) for each in names["other"].workers()] == names["came"]
        assert names["came"] == [("engine-7", 0), ("engine-7", 1)]


def test_the_examples_of_streams_run() -> None:
    """The examples follow an engine until its first batch, and resume in another process from the saved state."""
    blocks = python_blocks(DOCS / "concepts" / "stream.md")
    (following,) = (block for block in blocks if "sink=index" in block)
    (load,) = (block for block in blocks if "LoadSubscriber(" in block)
    (saving,) = python_blocks(DOCS / "concepts" / "replay.md")
    with engine() as made:
        made.store(prompt(1))
        names: dict[str, Any] = {
            "Checkpoint": Checkpoint,
            "Subscriber": Subscriber,
            "index": PrefixIndex(),
            "msgspec": msgspec,
            "source": Source(made.endpoint, made.replay_endpoint, name="e"),
        }
        exec(load, names)  # noqa: S102 - our own document
        assert names["load"] is None
        before, _, after = saving.partition("...\n")
        indented = textwrap.indent(before, "    ")
        exec(f"{following}        break\n{indented}", names)  # noqa: S102 - our own document
        with Subscriber(decode=False) as subscriber:
            exec(after, {**names, "subscriber": subscriber})  # noqa: S102 - as above
            assert subscriber.status("e").last_seq == 0


def snippet(path: Path, heading: str, *replaced: tuple[str, str]) -> list[str]:
    """Return the command that runs the Python below a heading, with each of these texts replaced."""
    section = path.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    [block] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    for old, new in replaced:
        assert old in block
        block = block.replace(old, new)
    return [sys.executable, "-c", block]


@pytest.fixture
def ports() -> tuple[tuple[str, str], ...]:
    """Return the ports that documents name, each with a free port to replace it."""
    return tuple((f":{port}", f":{reserve_port()}") for port in (5557, 5558))


def test_the_snippet_of_the_readme_prints_the_output_shown_below_it(ports: tuple[tuple[str, str], ...]) -> None:
    ran = subprocess.run(snippet(README, "Try it", *ports, PATIENT), capture_output=True, text=True, timeout=60, check=False)
    [shown] = blocks(README, "text")
    assert (ran.stdout, ran.stderr, ran.returncode) == (shown, "", 0)


def find_row(page: str, *expected: str) -> list[str]:
    """Return the cells of the row of a page that has all these cells."""
    rows = [[cell.strip() for cell in line.split("|")] for line in (DOCS / page).read_text().splitlines()]
    return next(row for row in rows if set(expected) <= set(row))


def test_the_figures_of_the_readme_are_those_of_the_pages_that_it_links_to() -> None:
    """`make figures` and `make study` write these pages."""
    readme, study = (" ".join(path.read_text().split()) for path in (README, DOCS / "guides" / "routing-study.md"))
    gains = dict(re.findall(r"\*\*(\d) routers?\*\*.*?is ([\d.]+ to [\d.]+ times)", study))
    assert f"behind two routers 90% of first tokens come [{gains['2']}](docs/guides/routing-study.md) as late" in readme
    assert f"90% of first tokens then come [{gains['1']}](docs/guides/routing-study.md) as late" in readme
    assert "27.5 requests a second with events and 28.9 with its tree" in study
    ours, theirs = (cell.partition(" (")[0] for cell in find_row("figures.md", "publish() p50, busy", "vllm 0.33.0")[2:4])
    assert f"`publish()` takes [{ours}](docs/figures.md#publishers), vLLM 0.33.0's {theirs}." in readme
    _, _, ours, theirs, *_ = find_row("figures.md", "replay of 10,000, lost by a late reader", "sglang 0.5.23")
    assert (ours, f"[{theirs.partition(' (')[0].strip()} of them]" in readme) == ("0", True)
    assert "51,000 requests none is predicted wrongly" in " ".join((DOCS / "concepts/prefix-match.md").read_text().split())


ROUTERS = DOCS / "quickstart" / "routers.md"


def test_the_snippets_for_routers_work_with_each_other(ports: tuple[tuple[str, str], ...]) -> None:
    """One snippet publishes, a second reads, and a third finds the prompt; they are as on the page, but publish faster."""
    faster = (("range(60)", "range(50_000)"), ("sleep(1)", "sleep(0.02)"))
    with Program(command=snippet(ROUTERS, "An engine to read from", *ports, *faster)) as publisher:
        with Program(command=snippet(ROUTERS, "Read a stream", *ports)) as reader:
            reader.out.wait(r"^0 \[BlockStored\(block_hashes=\[0\], .* token_ids=\[1, 2, 3, 0\]")
            reader.out.wait(r"^\d+ \[BlockStored.* EXACT$")
        with Program(command=snippet(ROUTERS, "Find a prefix", *ports)) as finder:
            finder.out.wait(r"rank 0: 4 tokens, gpu 4.* EXACT$")
        assert publisher.process.poll() is None, publisher.err.all


def test_the_publisher_for_routers_ends_with_a_report(ports: tuple[tuple[str, str], ...]) -> None:
    """The last lines of the publisher's snippet run as well."""
    quick = (*ports, PATIENT, ("range(60)", "range(3)"), ("sleep(1)", "sleep(0.01)"))
    with Program(command=snippet(ROUTERS, "An engine to read from", *quick)) as publisher:
        ended = publisher.end()
    assert (ended.code, ended.err) == (0, "")
    assert "accepted=3" in ended.out


@pytest.mark.parametrize("page", ["quickstart/engines.md", "guides/vllm.md", "guides/sglang.md"])
def test_engines_with_these_options_listen(page: str) -> None:
    """vLLM and SGLang accept the JSON and listen at the ports of the snippets; neither connects instead."""
    found = re.findall(r"^(vllm|python).*\n  '(\{[^']*\})'$", (DOCS / page).read_text(), re.MULTILINE)
    assert found
    for program, options in found:
        config: Any = (
            vllm.KVEventsConfig(**json.loads(options)) if program == "vllm" else sglang.KVEventsConfig.from_cli(options)
        )
        assert config.publisher == "zmq"
        assert (config.endpoint, config.replay_endpoint) == ("tcp://*:5557", "tcp://*:5558")
        assert should_bind(config.endpoint)


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


# --- installation

OUR_PACKAGE = re.compile(r"(?<![\w/-])kvevents(?:[-_](?:native|plane))?(?:\[[\w,]+\])?(?![\w/.@-])")
INSTALL_PAGE = DOCS / "install.md"


def test_no_command_can_take_our_packages_from_a_registry() -> None:
    """Packages of our names in a registry would be those of others: pip takes ours from files that we built."""
    texts = [*list_documents(), *paths.ROOT.glob("*/**/Dockerfile"), *(paths.ROOT / "examples").rglob("*.py")]
    texts += [*(paths.ROOT / "src").rglob("*.py"), *(paths.ROOT / "plane" / "src").rglob("*.py"), paths.ROOT / "Makefile"]
    lines = [line for path in texts for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()]
    installs = [found[0] for line in lines for found in re.finditer(r"pip install [^`|;]*", line)]
    ours = [line for line in installs if OUR_PACKAGE.search(line)]
    assert len(ours) >= 5
    assert [line for line in ours if not re.search(r" dist/(kvevents-)?\*\.whl", line) and "--no-index" not in line] == []


def test_the_page_of_installation_has_every_extra_and_what_the_build_needs() -> None:
    text = INSTALL_PAGE.read_text(encoding="utf-8")
    project = tomllib.loads((paths.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["extras"]
    assert set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == {*extras, "native", "plane", "all"}
    crates = tomllib.loads((paths.ROOT / "native" / "Cargo.toml").read_text(encoding="utf-8"))
    python, rust = project["project"]["requires-python"].removeprefix(">="), crates["workspace"]["package"]["rust-version"]
    assert f"needs Python {python} with\n`venv`, Rust {rust}, a C compiler" in text
    for dependency in project["project"]["dependencies"]:
        assert dependency.partition(">=")[2] in text


# --- every document


def test_codespell_finds_no_misspelt_word() -> None:
    """codespell reads documents, docstrings, comments and messages, but not tests, because they misspell options on purpose."""
    read = [
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
        "docs",
        "src",
        "plane",
        "native",
        "deploy",
        "observability",
    ]
    read += ["examples", "benchmarks", "tools", "tests/README.md", "mkdocs.yml", "Makefile"]
    command = [sys.executable, "-m", "codespell_lib", *read]
    done = subprocess.run(command, cwd=paths.ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


every_document = pytest.mark.parametrize("path", list_documents(), ids=lambda path: str(path.relative_to(DOCS.parent)))


def blocks(path: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of these languages; an empty name selects blocks without a language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
    return [text for language, text in found if language in languages]


def commands(path: Path) -> list[list[str]]:
    """Return the arguments of each `kvevents` command in a block, up to a pipe."""
    found = [command for block in blocks_of(path) if block.language in SHELLS for command in commands_of(block)]
    split = [shlex.split(command.text, comments=True) for command in found if command.program == "kvevents"]
    split = [words[words.index("kvevents") + 1 :] for words in split]
    return [[*takewhile(lambda word: word not in {"|", ">", "&", "&&", "2>"}, words)] for words in split]


@every_document
def test_the_program_accepts_the_commands_of_documents(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command is parsed but does not run: the parser checks commands, options and the form of values."""
    for words in commands(path):
        code: object = 0
        try:
            make_parser().parse_args(words)
        except SystemExit as ended:
            code = ended.code
        assert code == 0, (words, capsys.readouterr().err)


WRITTEN_BY_PROGRAMS = {DOCS / "figures.md", DOCS / "developers" / "chaos.md", DOCS / "developers" / "plane-chaos.md"}
"""Documents whose lines are as long as the programs write them."""


@every_document
def test_lines_of_documents_are_at_most_120_columns_wide(path: Path) -> None:
    """Tables are wider. Crates have the width of Rust."""
    code = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
    lines = [line for line in code.sub("", path.read_text(encoding="utf-8")).splitlines() if not line.startswith("|")]
    most = 140 if "native" in path.parts else 120
    assert path in WRITTEN_BY_PROGRAMS or [line for line in lines if len(line) > most] == []


WIDE_OUTPUT = {DOCS / "reference" / "cli.md", DOCS / "guides" / "export.md"}
"""Documents that show tables as programs print them."""


@every_document
def test_code_of_documents_is_at_most_88_columns_wide(path: Path) -> None:
    """The site shows no more beside its navigation. What programs print can be wider."""
    shown = [block for block in blocks_of(path) if block.language not in {"mermaid", "rust"}]
    if path in WIDE_OUTPUT:
        shown = [block for block in shown if block.language != "text"]
    lines = [line for block in shown for line in block.text.splitlines() if not is_output(block, line, path)]
    assert [line for line in lines if len(line) > 88] == []


def is_output(block: Block, line: str, path: Path) -> bool:
    """Return whether a line is what a command of the block prints."""
    return path in WIDE_OUTPUT and block.language in {"console", ""} and not line.startswith("$ ")


def test_documents_have_at_least_40_commands() -> None:
    assert sum(len(commands(path)) for path in list_documents()) >= 40


@every_document
def test_links_and_names_in_documents_refer_to_existing_targets(path: Path) -> None:
    """Files, headings, targets of make, modules to run, and files of the repository that are named all exist."""
    text, root = path.read_text(), DOCS.parent
    for place, anchor in re.findall(r"\]\((?!https?://)([^)#\s]*)(?:#([^)]*))?\)", text):
        target = path.parent / place if place else path
        assert target.exists(), place
        assert not anchor or anchor in headings(target), (place, anchor)
    made = (root / "Makefile").read_text()
    targets = re.findall(r"^([\w/.-]+):|^NATIVE := (\S+)", made, re.MULTILINE)
    for target in re.findall(r"(?:`|^\$ |^)make ([\w/.-]+)", text, re.MULTILINE):
        assert any(target in each for each in targets), target
    for module in re.findall(r"python -m ((?:kvevents|benchmarks)[\w.]*)", text):
        assert find_spec(module), module
    for name in re.findall(r"`((?:src|tests|native|deploy|examples|benchmarks|docs|tools|observability)/[\w./-]+)`", text):
        assert (root / name).exists() or (path.parent / name).exists(), name


def headings(path: Path) -> set[str]:
    """Return the anchors of the headings of a document, as links write them."""
    plain = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@every_document
def test_blocks_of_documents_are_valid_in_their_language(path: Path) -> None:
    """JSON blocks parse as one document or one per line, TOML blocks parse, and the imports of Python blocks exist."""
    for text in blocks(path, "json"):
        try:
            json.loads(text)
        except ValueError:
            assert all(json.loads(line) for line in text.splitlines())
    for text in blocks(path, "toml"):
        tomllib.loads(text)
    for text in blocks(path, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                module = import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)
