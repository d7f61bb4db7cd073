"""Wrong usage of every command ends with one sentence and a documented exit code, never with a traceback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli_cases import KVEVENTS, SECONDS, Program, environment, refuse_connections, run
from kvevents.cli.program import COMMANDS, main

UNUSED_ENDPOINT = "{dead}"
"""Placeholder for an endpoint at which nothing listens."""
LONG = "x" * 300
"""A name that is too long for every file system, so that even `Path.exists` raises an error."""
WRONG_PATHS: dict[str, tuple[str, ...]] = {
    "tail": ("127.0.0.1:1", "--curve-key", LONG, "--curve-server-key", LONG),
    "record": ("127.0.0.1:1", f"{LONG}/run.jsonl"),
    "play": (LONG,),
    "publish": (LONG,),
    "doctor": ("--service", "127.0.0.1:1", "--token-file", LONG),
    "relay": ("127.0.0.1:1", "--journal", LONG),
    "bridge": ("--config", LONG),
    "serve": ("--config", LONG),
    "query": ("--prompt-file", LONG),
    "top": ("--once", "--token-file", LONG),
    "sources": ("--token-file", LONG),
    "register": ("e", "127.0.0.1:1", "--model", "m", "--token-file", LONG),
    "drain": ("e", "--token-file", LONG),
    "unregister": ("e", "--model", "m", "--token-file", LONG),
    "reservations": ("--tls-ca", LONG, "--service", "https://127.0.0.1:1"),
    "plane": ("status", "--creds", LONG),
    "export": (LONG, LONG),
    "keys": (f"{LONG}/engine",),
    "conform": ("ours", "--scenarios", LONG),
    "sim": ("compare", "--trace", LONG),
}
WITHOUT_A_LISTENER: dict[str, tuple[str, ...]] = {
    "tail": (UNUSED_ENDPOINT, "--idle-timeout", "0.2"),
    "record": (UNUSED_ENDPOINT, "run.jsonl", "--idle-timeout", "0.2"),
    "doctor": (UNUSED_ENDPOINT, "--duration", "0.2"),
    "relay": (
        UNUSED_ENDPOINT,
        "--endpoint",
        "tcp://127.0.0.1:*",
        "--replay",
        "tcp://127.0.0.1:*",
        "--duration",
        "0.2",
    ),
    "query": ("1", "--model", "m", "--service", UNUSED_ENDPOINT),
    "top": ("--once", "--service", UNUSED_ENDPOINT),
    "sources": ("--service", UNUSED_ENDPOINT),
    "plane": ("status", "--nats", UNUSED_ENDPOINT),
}


def test_every_command_is_tested_with_a_wrong_path() -> None:
    """`WRONG_PATHS` has every command except `demo` and `completion`, which take no path."""
    assert sorted([*WRONG_PATHS, "demo", "completion"]) == sorted(command.name for command in COMMANDS)


@pytest.mark.parametrize("command", sorted(WRONG_PATHS))
def test_an_unusable_path_is_reported_in_one_sentence(command: str) -> None:
    """The operating system reports another error than that the file does not exist; to the user it is wrong usage."""
    ended = run(command, *WRONG_PATHS[command])
    assert ended.code == 2, ended
    assert "Traceback" not in ended.err
    assert ended.err.splitlines()[-1].startswith("kvevents"), ended.err


@pytest.mark.parametrize("command", sorted(WITHOUT_A_LISTENER))
def test_a_port_without_a_listener_causes_no_traceback(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that query or follow a peer end with a documented exit code if the peer is not running."""
    monkeypatch.chdir(tmp_path)
    with refuse_connections() as endpoint:
        scheme = {"query": "http", "top": "http", "sources": "http", "plane": "nats"}.get(command, "tcp")
        unused_endpoint = endpoint.replace("tcp", scheme)
        ended = run(command, *(arg.replace(UNUSED_ENDPOINT, unused_endpoint) for arg in WITHOUT_A_LISTENER[command]))
    assert ended.code in {0, 1, 3, 4}, ended
    assert "Traceback" not in ended.err + ended.out


@pytest.mark.parametrize("line", ["--help", "--version", "export --list-queries", "tail --help"])
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_full_disk_behind_stdout_is_reported_in_one_sentence(line: str, unbuffered: str) -> None:
    """It is reported both if Python writes at once and if it writes at its exit."""
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        command = [*KVEVENTS, *line.split()]
        env = environment(PYTHONUNBUFFERED=unbuffered)
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=SECONDS, env=env, check=False)
    assert done.stderr.decode() == "kvevents: cannot write the output: No space left on device\n"
    assert done.returncode == 1


def test_a_full_disk_behind_stderr_keeps_the_exit_code() -> None:
    """The message is lost, but the exit code is the usual one."""
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        done = subprocess.run([*KVEVENTS, "play", LONG], stderr=full, timeout=SECONDS, env=environment(), check=False)
    assert done.returncode == 2


def test_an_interrupt_during_imports_causes_no_traceback() -> None:
    """The entry point ends at once. Python logs each import here, so the test knows when to send the interrupt."""
    launch = "import sys; from kvevents.cli import run_program; sys.exit(run_program())"
    command = [sys.executable, "-c", launch]
    with Program("serve", "--port", 0, command=command, PYTHONPROFILEIMPORTTIME="1") as program:
        program.err.wait(r"\bmsgspec")
        ended = program.interrupt()
    assert ended.code in {-signal.SIGINT, 130, 0}
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(("words", "code"), [(["export", "--list-queries"], 0), (["play", "none.jsonl"], 2)])
def test_a_signal_at_the_end_keeps_the_exit_code(words: list[str], code: int) -> None:
    """It arrives after the work, while the interpreter ends."""
    launch = (
        "import atexit, os, signal, sys; atexit.register(os.kill, os.getpid(), signal.SIGINT);"
        "from kvevents.cli import run_program; sys.exit(run_program())"
    )
    done = subprocess.run(
        [sys.executable, "-c", launch, *words], capture_output=True, timeout=SECONDS, env=environment(), check=False
    )
    assert done.returncode == code


def test_the_entry_point_runs_the_program_and_keeps_an_ignored_sigint() -> None:
    """A process that ignores SIGINT, as under `nohup`, continues to ignore it."""
    launch = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); from kvevents.cli import run_program;"
        "code = run_program(); assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN; sys.exit(code)"
    )
    command = [sys.executable, "-c", launch, "play", "none.jsonl"]
    done = subprocess.run(command, capture_output=True, timeout=SECONDS, env=environment(), check=False)
    assert (done.returncode, b"cannot read none.jsonl" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("tial 127.0.0.1:5557", "unknown command tial; did you mean tail?"),
        ("--verison", "unknown option --verison; did you mean --version?"),
        ("-x", "unknown option -x"),
        ("tail -x", "unknown option -x"),
        ("help tial", "unknown command tial; did you mean tail?"),
        ("sim compair", "unknown command compair; did you mean compare?"),
        ("top -o jsno", "argument -o/--output: invalid value 'jsno'; did you mean 'json'? expected table, wide, json, yaml"),
        ("conform urs", "argument TARGET: invalid value 'urs'; did you mean 'ours'? expected ours, ours-publisher, dynamo,"),
        (f"demo --requests {10**20}", f"argument --requests: invalid value '{10**20}': expected at most {sys.maxsize}"),
        (
            "sources --timeout 1e20",
            "argument --timeout: invalid value '1e20': expected a number of seconds above 0, at most 1e9",
        ),
        ("completion tcsh", "argument SHELL: invalid value 'tcsh'; expected bash, zsh, fish"),
    ],
)
def test_a_misspelled_word_has_a_suggestion(arguments: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_replica_with_an_engine_names_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--nats", "nats://127.0.0.1:1", "--worker", "a=127.0.0.1:2", "--model", "m"]) == 2
    assert "a replica follows no engines, as its plane's bridges do: remove the options (--worker," in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["relay", "h:1", "--hwm", "2147483648"], "--hwm is 2147483648; it must be from 1 to 2147483647"),
        (["relay", "h:1", "--upstream-curve-key", "k"], "--upstream-curve-key and --upstream-curve-server-key need each other"),
        (["relay", "h:1", "--upstream-curve-server-key", "k"], "--upstream-curve-key and --upstream-curve-server-key need"),
        (["relay", "h:1", "--metrics-host", "127.0.0.1"], "--metrics-host needs --metrics-port"),
        (["serve", "--listen", "tcp://127.0.0.1:1", "--model", "m"], "--model and --block-size need --worker, --engine"),
        (["query", "1", "--no-special-tokens"], "--tokenizer and --no-special-tokens need a text"),
        (["conform", "ours", "--api", "mooncake"], "--api needs --indexer"),
        (["export", "--query", "hit-depth", "x", "--token-ids"], "--token-ids and --force are for the export of recordings"),
        (["doctor", "--bind"], "--bind and --curve-key need ENDPOINT"),
        (["doctor", "h:1", "--tls-ca", "x"], "name an engine or a service"),
        (["tail", "h:1", "--topic-prefix", "\udcff"], "an argument is not valid UTF-8"),
    ],
)
def test_a_value_that_cannot_work_is_rejected_at_once(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert expected in capsys.readouterr().err


def test_tls_cert_without_a_plane_names_the_option_for_https(capsys: pytest.CaptureFixture[str]) -> None:
    """`--tls-cert` of `serve` is for NATS; the error names the settings of HTTPS."""
    assert main(["serve", "--tls-cert", "x"]) == 2
    assert "--tls-cert needs --nats, the URL of a NATS server; for HTTPS use --https-cert" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[1, 2, 3]", "[1,2,3]", '{"a":1}', '"abc"', "two words", "two\nlines", ""])
def test_a_prompt_is_not_sent_as_a_token(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A token file must contain one printable word that is not JSON; any other content is not sent to the service."""
    file = tmp_path / "token"
    file.write_text(content)
    assert main(["query", "1", "--model", "m", "--token-file", str(file)]) == 2
    assert f"--token-file {file} has" in capsys.readouterr().err


def test_a_relay_without_its_extra_fails_before_it_binds() -> None:
    """The error names the missing package, and no endpoint was bound."""
    launch = (
        "import sys; sys.modules['prometheus_client'] = None; from kvevents.cli import main;"
        "sys.exit(main(['relay', '127.0.0.1:1', '--metrics-port', '1', '--duration', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", launch], capture_output=True, timeout=SECONDS, env=environment(), check=False)
    assert done.returncode == 2
    assert (
        done.stderr.decode()
        == "kvevents: metrics need prometheus_client: install kvevents[service], see Install in the documentation\n"
    )


def test_a_command_of_a_group_without_its_package_is_named_in_full() -> None:
    launch = "import sys; sys.modules['nats'] = None; from kvevents.cli import main; sys.exit(main(['plane', 'status']))"
    done = subprocess.run([sys.executable, "-c", launch], capture_output=True, timeout=SECONDS, env=environment(), check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"kvevents: kvevents plane status needs the package nats")


def test_list_queries_prints_one_json_object_per_line() -> None:
    ended = run("export", "--list-queries", "--output=json")
    assert {"name", "question"} == set(json.loads(ended.out.splitlines()[0]))


def test_commands_start_in_new_processes() -> None:
    """Other tests start commands in forks of a process that has imported all of them. test_docs_blocks.py starts the others."""
    names = ("conform", "demo", "keys", "publish", "top")
    started = [subprocess.Popen([*KVEVENTS, name, "--help"], stdout=subprocess.PIPE, env=environment()) for name in names]
    printed = [process.communicate(timeout=SECONDS)[0].decode() for process in started]
    assert [text.partition(" [")[0] for text in printed] == [f"usage: kvevents {name}" for name in names]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("kvevents to", ["top "]),
        ("kvevents completion b", ["bash "]),
        ("kvevents top --s", ["--service", "--sort"]),
        ("kvevents sim compare --policy roun", ["round-robin "]),
    ],
)
def test_a_shell_completes_commands_options_and_values(line: str, expected: list[str], tmp_path: Path) -> None:
    """The variables are those that `register-python-argcomplete` sets."""
    pytest.importorskip("argcomplete")
    found = tmp_path / "completions"
    variables = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(found)}
    words = {"COMP_LINE": line, "COMP_POINT": str(len(line)), "COMP_TYPE": "9"}
    subprocess.run(KVEVENTS, timeout=SECONDS, env=environment() | variables | words, check=True)
    assert found.read_text().split("\n") == expected
