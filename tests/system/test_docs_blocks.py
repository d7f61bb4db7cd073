"""Every block of code in a document is executed, or a reason says why it is not.

Commands run in the order of their document, in a folder with the files that they name. The addresses of documents are
replaced by those of a running engine and service. The tests in `PYTHON` execute the Python.
"""

from __future__ import annotations

import gzip
import json
import shutil
import threading
import tomllib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import jsonschema  # type: ignore[import-untyped]  # it has no types
import msgspec
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import paths
from cli_cases import RECORDING, run
from doc_blocks import SHELLS, Block, CommandRunner, ShellCommand, blocks_of, commands_of, has_same_shape, list_documents
from kvevents.cli.service_options import find_context
from kvevents.sim.costs import PRESETS
from kvevents.sim.workloads import SAMPLE
from nats_logins import Operator
from service_cases import Engine, engine, prompt, serving
from tools.nats_servers import nats_server
from tools.ports import reserve_port

pytestmark = pytest.mark.timeout(600)
"""A document has several commands, some of which take seconds of CPU."""
DOCS = paths.ROOT / "docs"

REASONS_BY_LANGUAGE = {
    "mermaid": "a picture",
    "text": "what a command or a snippet prints",
    "rust": "the crate compiles them: cargo test --doc",
}
"""Why blocks of these languages are not executed here."""

REASONS_BY_PROGRAM = {
    "make": "test_docs.py looks the target up; what it does takes minutes",
    "pip": "make wheels-check installs the wheels",
    "docker": "there is no container engine; the pipeline builds the image, and test_images.py checks both Dockerfiles",
    "kubectl": "there is no cluster; test_helm_chart.py validates the manifests",
    "helm": "there is no cluster; test_helm_chart.py renders the chart with this command",
    "vllm": "test_docs.py: the options are those of the release's configuration",
    "python -m sglang.launch_server": "as for vllm",
    "python -m benchmarks": "minutes, and rivals from other packages",
    "export": "sets a variable in the environment of an engine",
    "nats-server": "a fixture runs the server",
    "nats": "the command line of NATS is another project's",
}
"""Why these programs do not run here."""

REASONS_BY_COMMAND = {
    "kvevents demo": "seconds: make wheels-check runs it; test_cli_demo.py",
    "echo 'import kvevents.engines.sglang": "changes an installed SGLang",
    "kvevents top": "needs a terminal: test_cli_service.py",
    "kvevents sim compare\n": "`make study` compares what it prints; test_cli_sim.py",
    "kvevents conform": "minutes, and downloads: test_conform.py runs a scenario",
    "kvevents plane status --nats nats://HOST:4222 --plane NAME": "the same command runs in guides/plane.md",
    "curl -s http://REPLICA:8090/readyz": "the same command runs in operations/runbook.md",
    "make": "see REASONS_BY_PROGRAM",
}
"""Why these commands do not run here, by the beginning of the command."""

PYTHON = {
    "README.md": "test_the_snippet_of_the_readme_prints_the_output_shown_below_it",
    "docs/quickstart/routers.md": "test_the_snippets_for_routers_work_with_each_other",
    "docs/concepts/prefix-match.md": "test_the_examples_of_the_index_run",
    "docs/concepts/stream.md": "test_the_examples_of_streams_run",
    "docs/concepts/replay.md": "test_the_examples_of_streams_run",
    "docs/developers/testing.md": "test_the_examples_of_the_testing_guide_run",
    "docs/guides/publishing.md": "test_the_example_of_publishing_runs",
    "docs/guides/routing.md": "test_the_examples_of_the_guide_run",
    "docs/guides/service.md": "test_the_client_of_grpc_in_the_guide_works",
    "docs/guides/simulation.md": "test_the_examples_about_traffic_run",
    "docs/guides/workloads.md": "test_the_examples_about_traffic_run",
    "docs/reference/extension-points.md": "test_the_examples_about_traffic_run",
}
"""The test that executes the Python of a document."""

TOML = {
    "docs/guides/service.md": "test_the_settings_of_the_guide_are_accepted",
    "docs/guides/plane.md": "test_the_settings_in_the_guide_to_planes_are_accepted",
    "docs/reference/cli.md": "test_the_contexts_in_the_reference_are_accepted",
}
JSON = {
    "docs/guides/service.md": "test_the_requests_of_the_guide_work",
    "docs/guides/workloads.md": "test_the_guide_of_workloads_is_correct",
    "docs/reference/conformance.md": "test_the_scenario_in_the_reference_is_valid",
}

RUN_BY_OTHER_TESTS = {"docs/guides/service.md": ({"curl", "printf"}, "test_the_requests_of_the_guide_work")}
"""Programs in documents whose commands another test runs, and that test."""
RUNNABLE = {"kvevents", "curl", "echo", "mkdir"}
"""Programs whose commands run here."""


def relative_name(path: Path) -> str:
    return str(path.relative_to(paths.ROOT))


def has_reason(path: Path, command: ShellCommand) -> bool:
    by_other, _ = RUN_BY_OTHER_TESTS.get(relative_name(path), (set[str](), ""))
    return command.program in REASONS_BY_PROGRAM.keys() | by_other or any(
        f"{command.text.split('#')[0].strip()}\n".startswith(each) for each in REASONS_BY_COMMAND
    )


def shell_commands(path: Path) -> list[ShellCommand]:
    return [command for block in blocks_of(path) if block.language in SHELLS for command in commands_of(block)]


def is_executed(path: Path, block: Block) -> bool:
    tests = {"python": PYTHON, "toml": TOML, "json": JSON}
    if block.language in tests:
        return relative_name(path) in tests[block.language]
    if block.language not in SHELLS:
        return block.language in REASONS_BY_LANGUAGE
    commands = list(commands_of(block))
    return bool(commands) and all(command.program in RUNNABLE or has_reason(path, command) for command in commands)


def test_every_block_is_executed_or_has_a_reason() -> None:
    missing = [
        f"{relative_name(path)}:{block.line} {block.language}"
        for path in list_documents()
        for block in blocks_of(path)
        if not is_executed(path, block)
    ]
    assert missing == []


def test_no_reason_is_out_of_date() -> None:
    """The tests, documents and commands that the tables name exist."""
    tests = "\n".join(each.read_text(encoding="utf-8") for each in paths.TESTS.rglob("test_*.py"))
    for table in (PYTHON, TOML, JSON):
        for document, test in table.items():
            assert (paths.ROOT / document).is_file()
            assert f"def {test}(" in tests, test
    assert {test for _, test in RUN_BY_OTHER_TESTS.values()} <= set(JSON.values())
    used = {command.program for path in list_documents() for command in shell_commands(path)}
    assert set(REASONS_BY_PROGRAM) <= used
    texts = [f"{command.text.split('#')[0].strip()}\n" for path in list_documents() for command in shell_commands(path)]
    assert [each for each in REASONS_BY_COMMAND if not any(text.startswith(each) for text in texts)] == []


# --- commands


class Addresses(NamedTuple):
    """The engine and the service that replace the addresses of documents."""

    engine: Engine
    service: str


@pytest.fixture(scope="module")
def addresses() -> Iterator[Addresses]:
    """Yield an engine that publishes a prompt every 0.1 s, and a service that follows it.

    At this pace the engine's replay buffer holds all of them until the last document.
    """
    with engine(heartbeat=1.0) as made, serving("--port", "0") as service:
        ended = threading.Event()

        def publish() -> None:
            for number in count(1):
                if ended.wait(0.1):
                    return
                made.store(prompt(number))

        made.store(list(range(1, 33)))
        service.register(7, made.publisher, model_name="llama")
        thread = threading.Thread(target=publish)
        thread.start()
        try:
            service.exact(7)
            yield Addresses(made, service.url)
        finally:
            ended.set()
            thread.join()


def substitutes(addresses: Addresses, folder: Path) -> dict[str, str]:
    live, replay = addresses.engine.endpoint, addresses.engine.replay_endpoint or ""
    found = {"--worker engine-0=tcp://10.0.0.7:5557,tcp://10.0.0.7:5558": f"--worker engine-0={live},{replay}"}
    for host in ("127.0.0.1", "10.0.0.7"):
        found |= {f"{host}:5557,5558": f"{live},{replay}", f"tcp://{host}:5557": live, f"tcp://{host}:5558": replay}
        found |= {f"{host}:5557": live.removeprefix("tcp://"), f"{host}:5558": replay.removeprefix("tcp://")}
    return found | {
        "http://127.0.0.1:8090": addresses.service,
        "http://HOST:8090": addresses.service,
        "http://10.0.0.7:8000": "http://127.0.0.1:9",
        "engines.default.svc": "localhost",
        "/var/lib/kvevents": str(folder / "state"),
    }


def write_files(folder: Path, addresses: Addresses) -> None:
    """Write the files that commands of documents read."""
    for each in ("vllm", "run", "pod-0", "pod-1"):
        shutil.copy(RECORDING, folder / f"{each}.jsonl.gz")
    (folder / "fleet.toml").write_text(
        f'[[sources]]\ninstance = "e"\nmodel = "llama"\nendpoint = "{addresses.engine.endpoint}"\n'
    )
    (folder / "mine.json").write_bytes(msgspec.json.encode(PRESETS["llama-3.1-8b-h100"]))
    with gzip.open(SAMPLE) as sample:
        (folder / "your-trace.jsonl").write_bytes(b"".join(sample.readlines()[:20]))
    tokenizer = Tokenizer(models.WordLevel({"Once": 1, "upon": 2, "a": 3, "time": 4, "?": 0}, unk_token="?"))  # noqa: S106 - a word, no password
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


def pages_with_commands() -> list[Path]:
    return [path for path in list_documents() if any(not has_reason(path, command) for command in shell_commands(path))]


@pytest.fixture(scope="module")
def checked() -> set[str]:
    """Return the `doctor` commands that ran already: several documents have the same one, and each takes seconds."""
    return set()


def run_commands(path: Path, reader: CommandRunner, checked: set[str]) -> None:
    """Run the commands of a document, and compare their output with what the document shows."""
    for command in shell_commands(path):
        words = command.text.split("#")[0].strip()
        if has_reason(path, command) or words in checked:
            continue
        if words.startswith("kvevents doctor"):
            checked.add(words)
        printed = reader.run(command)
        if printed and command.output.strip():
            assert has_same_shape(command.output, printed), (command.text, printed)
    reader.stop()


@pytest.mark.parametrize(
    "path", [path for path in pages_with_commands() if relative_name(path) != "docs/guides/plane.md"], ids=relative_name
)
def test_the_commands_of_a_document_work(path: Path, addresses: Addresses, checked: set[str], tmp_path: Path) -> None:
    write_files(tmp_path, addresses)
    replaced = substitutes(addresses, tmp_path)
    replaced |= {f"127.0.0.1:{port}": f"127.0.0.1:{reserve_port()}" for port in (6557, 6558, 5657, 5658, 5567)}
    if relative_name(path) == "docs/guides/curve.md":  # the page starts the publisher that its consumer reads
        ports = {host: f"127.0.0.1:{reserve_port()}" for host in ("10.0.0.7:5557", "10.0.0.7:5558")}
        replaced |= ports | {name.replace("10.0.0.7", "*"): address for name, address in ports.items()}
    if relative_name(path) == "docs/guides/recordings.md":
        (tmp_path / "run.jsonl.gz").unlink()
    with CommandRunner(tmp_path, replaced) as reader:
        run_commands(path, reader, checked)


def test_the_commands_for_a_plane_work(addresses: Addresses, checked: set[str], tmp_path: Path) -> None:
    path = DOCS / "guides" / "plane.md"
    with (
        nats_server(tmp_path / "nats") as server,
        CommandRunner(tmp_path, substitutes(addresses, tmp_path) | {"nats://127.0.0.1:4222": server.url}) as reader,
    ):
        run_commands(path, reader, checked)


# --- other languages


def test_the_client_of_grpc_in_the_guide_works(addresses: Addresses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client imports modules that are generated from the protocol definition in this checkout."""
    monkeypatch.syspath_prepend(str(paths.ROOT / "src/kvevents/service/proto/kvevents/v1"))
    [block] = [each for each in blocks_of(DOCS / "guides" / "service.md") if "import grpc" in each.text]
    names: dict[str, Any] = {"grpc": grpc}
    exec(block.text.replace("127.0.0.1:8090", addresses.service.removeprefix("http://")), names)  # noqa: S102 - our own document
    assert [worker.instance for worker in names["answer"].workers] == ["7"]


def check_settings(command: str, folder: Path, text: str, *more: object) -> None:
    tomllib.loads(text)
    (folder / "settings.toml").write_text(text)
    ended = run(command, "--config", folder / "settings.toml", *more, "--check")
    assert (ended.code, ended.err.strip()) == (0, "these settings can be used")


def test_the_settings_in_the_guide_to_planes_are_accepted(tmp_path: Path) -> None:
    [block] = [each for each in blocks_of(DOCS / "guides" / "plane.md") if each.language == "toml"]
    Operator().credentials(tmp_path / "bridge.creds")
    check_settings("bridge", tmp_path, block.text.replace("/etc/kvevents/", f"{tmp_path}/"))


def test_the_contexts_in_the_reference_are_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = [each for each in blocks_of(DOCS / "reference" / "cli.md") if each.language == "toml"]
    (tmp_path / "contexts.toml").write_text(block.text)
    monkeypatch.setenv("KVEVENTS_CONTEXTS", str(tmp_path / "contexts.toml"))
    context = find_context(None)
    assert context is not None
    assert context.service == "https://indexer.example:8090"


def test_the_scenario_in_the_reference_is_valid() -> None:
    [block] = [each for each in blocks_of(DOCS / "reference" / "conformance.md") if each.language == "json"]
    jsonschema.validate(json.loads(block.text), json.loads((paths.ROOT / "src/kvevents/conform/schema.json").read_text()))
