"""Wrong uses of every command end in one sentence and a documented code, never in a traceback."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cli_cases import KVEVENTS, SECONDS, Program, environment, refusing, run
from kvevents.cli.program import COMMANDS, main

DEAD = "{dead}"
"""An endpoint at which nothing listens."""
LONG = "x" * 300
"""No file system takes such a name: as with a folder that must not be entered, even asking whether it exists raises."""
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
    "plane": ("status", "--creds", LONG),
    "export": (LONG, LONG),
    "keys": (f"{LONG}/engine",),
    "conform": ("ours", "--scenarios", LONG),
    "sim": ("compare", "--trace", LONG),
}
DEAD_PORTS: dict[str, tuple[str, ...]] = {
    "tail": (DEAD, "--idle-timeout", "0.2"),
    "record": (DEAD, "run.jsonl", "--idle-timeout", "0.2"),
    "doctor": (DEAD, "--duration", "0.2"),
    "relay": (DEAD, "--endpoint", "tcp://127.0.0.1:*", "--replay-endpoint", "tcp://127.0.0.1:*", "--duration", "0.2"),
    "query": ("1", "--model", "m", "--service", DEAD),
    "top": ("--once", "--service", DEAD),
    "plane": ("status", "--nats", DEAD),
}


def test_every_command_has_a_wrong_path() -> None:
    """The table leaves no command out but `demo`, which takes no path."""
    assert sorted([*WRONG_PATHS, "demo"]) == sorted(command.name for command in COMMANDS)


@pytest.mark.parametrize("command", sorted(WRONG_PATHS))
def test_a_path_that_cannot_be_used_is_one_sentence(command: str) -> None:
    """Also where the operating system answers with an error that is not about the file being absent."""
    ended = run(command, *WRONG_PATHS[command])
    assert ended.code in {1, 2, 4}, ended
    assert "Traceback" not in ended.err
    assert ended.err.splitlines()[-1].startswith("kvevents"), ended.err


@pytest.mark.parametrize("command", sorted(DEAD_PORTS))
def test_a_port_where_nothing_listens_is_no_traceback(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that asks or follows a peer raises when it is not there."""
    monkeypatch.chdir(tmp_path)
    with refusing() as endpoint:
        scheme = {"query": "http", "top": "http", "plane": "nats"}.get(command, "tcp")
        dead = endpoint.replace("tcp", scheme)
        ended = run(command, *(arg.replace(DEAD, dead) for arg in DEAD_PORTS[command]))
    assert ended.code in {0, 1, 3, 4}, ended
    assert "Traceback" not in ended.err + ended.out


@pytest.mark.parametrize("line", ["--help", "--version", "export --list-queries", "tail --help"])
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_full_disk_behind_stdout_is_one_sentence(line: str, unbuffered: str) -> None:
    """Whether Python writes at once or at its end."""
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        command = [*KVEVENTS, *line.split()]
        env = environment(PYTHONUNBUFFERED=unbuffered)
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=SECONDS, env=env, check=False)
    assert done.stderr.decode() == "kvevents: cannot write the output: No space left on device\n"
    assert done.returncode == 1


def test_a_full_disk_behind_stderr_is_no_crash() -> None:
    """The sentence is lost, the exit code is not."""
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        done = subprocess.run([*KVEVENTS, "play", LONG], stderr=full, timeout=SECONDS, env=environment(), check=False)
    assert done.returncode == 1


def test_an_interrupt_while_modules_are_imported_is_no_traceback() -> None:
    """The entry point ends at once; Python itself reports each import here, which says when to interrupt."""
    launch = "import sys; from kvevents_command import main; sys.exit(main())"
    command = [sys.executable, "-c", launch]
    with Program("serve", "--port", 0, command=command, PYTHONPROFILEIMPORTTIME="1") as program:
        program.err.wait(r"\bmsgspec")
        ended = program.interrupt()
    assert ended.code in {-signal.SIGINT, 130, 0}
    assert "Traceback" not in ended.err


def test_the_entry_point_is_the_program() -> None:
    """And a process for which SIGINT is ignored, as under nohup, goes on ignoring it."""
    launch = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); from kvevents_command import main;"
        "code = main(); assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN; sys.exit(code)"
    )
    command = [sys.executable, "-c", launch, "play", "none.jsonl"]
    done = subprocess.run(command, capture_output=True, timeout=SECONDS, env=environment(), check=False)
    assert (done.returncode, b"cannot read none.jsonl" in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tial 127.0.0.1:5557", "unknown command tial; did you mean tail?"),
        ("--verison", "unknown option --verison; did you mean --version?"),
        ("help", "unknown command help; did you mean --help?"),
        ("sim compair", "unknown command compair; did you mean compare?"),
    ],
)
def test_a_misspelled_command_has_a_suggestion(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As misspelled options have one."""
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_options_of_a_plane_without_one_say_where_https_is_set(capsys: pytest.CaptureFixture[str]) -> None:
    """`--tls-cert` of `serve` is for NATS; the error names the settings of HTTPS."""
    assert main(["serve", "--tls-cert", "x"]) == 2
    assert "--tls-cert needs --nats, the URL of a NATS server; for HTTPS use --https-cert" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["[1, 2, 3]", "[1,2,3]", '{"a":1}', '"abc"', "two words", "two\nlines", ""])
def test_a_prompt_is_not_sent_as_a_token(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A token file holds one printable word that is not JSON; anything else never leaves this machine."""
    file = tmp_path / "token"
    file.write_text(content)
    assert main(["query", "1", "--model", "m", "--token-file", str(file)]) == 1
    assert f"--token-file {file} has" in capsys.readouterr().err


def test_a_relay_without_its_extra_binds_nothing() -> None:
    """The missing package is named before any endpoint is in use."""
    launch = (
        "import sys; sys.modules['prometheus_client'] = None; from kvevents.cli import main;"
        "sys.exit(main(['relay', '127.0.0.1:1', '--metrics-port', '1', '--duration', '1']))"
    )
    done = subprocess.run([sys.executable, "-c", launch], capture_output=True, timeout=SECONDS, env=environment(), check=False)
    assert done.returncode == 1
    assert done.stderr.decode() == "kvevents: metrics need prometheus_client: pip install 'kvevents[service]'\n"


def test_list_queries_as_json() -> None:
    """One object a line."""
    ended = run("export", "--list-queries", "--output=json")
    assert {"name", "question"} == set(json.loads(ended.out.splitlines()[0]))


def test_top_writes_all_columns_into_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the terminal is said to be."""
    from kvevents.cli.top_view import UNLIMITED, TopView  # noqa: PLC0415 - needs an extra

    monkeypatch.setenv("COLUMNS", "40")
    assert not TopView(None).is_terminal
    assert TopView(None)._console.width == UNLIMITED
