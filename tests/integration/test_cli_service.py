"""`kvevents query`, `kvevents top` and their HTTP client, with a real service that follows real publishers."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from cli_cases import SECONDS, Program, interrupts_enabled, refuse_connections, run
from cli_service_cases import (
    BLOCK,
    READY,
    TOKEN,
    RunningService,
    blocks,
    engine,
    error_of,
    run_guarded_service,
    serving,
    source,
    stats,
)
from kvevents.cli import main
from kvevents.cli.console import Console
from kvevents.cli.top_view import TopView
from kvevents.cli.values import service_url
from kvevents.client import Client, ServiceRequestError
from kvevents.client.polling import SOURCE_ORDERS, PolledSource, PollResult, sort_sources
from kvevents.client.schemas import HealthAnswer, LoadView, Problem, worker_name
from kvevents.diagnosis.text_format import duration, first_names, percentage, size
from kvevents.events import KVEventBatch

# --- a service and its engines


@contextmanager
def reserve_port() -> Iterator[int]:
    """Yield a port for services that start and stop: it refuses connections in between, and no other test gets it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningService]:
    """Two engines of one model: one holds half of a prompt of 64 tokens, the other all of it, half of it in host memory."""
    with serving() as served, engine(blocks(2)) as half, engine(blocks(2), blocks(2, 2, "CPU")) as whole:
        served.register("engine-0", half)
        served.register("engine-1", whole)
        served.wait_exact("engine-0/0", 2)
        served.wait_exact("engine-1/0", 4)
        yield served


PROMPT: Final = list(range(64))


# --- query


def test_a_table_shows_how_much_each_worker_holds(fleet: RunningService) -> None:
    ended = run("query", *PROMPT, "--whole-prompt", "--service", fleet.url)
    assert ended.code == 0, ended.err
    head, titles, *rows = ended.out.splitlines()
    assert head == "64 tokens of model m: 2 workers hold a prefix of them"
    assert titles.split() == ["worker", "tokens", "share", "tiers", "trust"]
    assert rows == [
        "engine-1/0      64   100%  gpu 32 + cpu 32  EXACT",
        "engine-0/0      32    50%  gpu 32           EXACT",
    ]


def test_json_is_the_answer_of_the_service(fleet: RunningService) -> None:
    ended = run("query", *PROMPT, "--service", fleet.url, "--output=json")
    found, answer = json.loads(ended.out), fleet.ask("POST", "/v1/match", {"model": "m", "tokens": PROMPT})
    held = {one["instance"]: (one.pop("tokens"), one.pop("tokens_by_tier")) for one in found["workers"]}
    assert held == {"engine-0": (32, {"gpu": 32}), "engine-1": (48, {"gpu": 32, "cpu": 16})}
    for one in answer["workers"]:
        assert one.pop("tiers")["disk"] == one.pop("tokens") == sum(held[one["instance"]][1].values())
    assert found == answer
    assert ended.err == ""


def test_tokens_are_accepted_in_every_form(fleet: RunningService, tmp_path: Path) -> None:
    (tmp_path / "prompt.json").write_text(json.dumps(PROMPT), encoding="utf-8-sig")  # as editors of Windows write it
    (tmp_path / "prompt.u32").write_bytes(array("I", PROMPT).tobytes())
    (tmp_path / "prompt.bin").write_bytes(array("I", PROMPT).tobytes())
    spaced = " ".join(map(str, PROMPT)).encode()
    input_forms: list[tuple[list[object], bytes]] = [
        ([*PROMPT], b""),
        ([json.dumps(PROMPT)], b""),
        (["0,1", "[2, 3]", *PROMPT[4:]], b""),
        (["-"], json.dumps(PROMPT).encode()),
        (["-"], spaced),
        *((["--prompt-file", tmp_path / f"prompt.{kind}"], b"") for kind in ("json", "u32", "bin")),
    ]
    answers = {run("query", *args, "--output=json", "--service", fleet.url, stdin=stdin).out for args, stdin in input_forms}
    assert len(answers) == 1
    assert json.loads(answers.pop())["prompt_tokens"] == 64


def test_the_url_of_the_service_is_read_from_the_environment(fleet: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVEVENTS_SERVICE", fleet.url.removeprefix("http://"))
    assert run("query", *PROMPT).code == 0


def test_select_shows_the_worker_and_the_reason(fleet: RunningService) -> None:
    ended = run("query", *PROMPT, "--select", "--service", fleet.url)
    chosen, why, titles, *rows = ended.out.splitlines()
    assert chosen == "engine-1/0 should get the prompt"
    assert "holds 48 of 64 tokens" in why
    assert titles.startswith("worker")
    assert [row.split()[0] for row in rows] == ["engine-1/0", "engine-0/0"]
    answer = json.loads(run("query", *PROMPT, "--select", "--output=json", "--service", fleet.url).out)
    assert answer["load_from"] == "selections", (
        "the first prompt counts as a request there, and a short one is not worth a queue"
    )
    assert {"gpu": 32, "cpu": 16} in [one["tokens_by_tier"] for one in answer["considered"]]


def test_query_explains_why_no_worker_matches(fleet: RunningService) -> None:
    short = run("query", *PROMPT[:5], "--service", fleet.url)
    assert short.out == "5 tokens of model m: no worker is known to hold a prefix of them\n"
    assert f"not longer than a block of {BLOCK} tokens" in short.err
    other = run("query", *reversed(PROMPT), "--service", fleet.url)
    assert "compare tokens, LoRA and salt" in other.err
    assert (short.code, other.code) == (0, 0)


def test_an_unknown_model_is_reported_with_the_message_of_the_service(fleet: RunningService) -> None:
    ended = run("query", 1, "--model", "n", "--service", fleet.url)
    assert ended.code == 1
    assert ended.err == "kvevents: no engine serves model 'n' for the default tenant; known models: m\n"


def test_query_uses_the_only_model_of_a_tenant_and_rejects_several() -> None:
    with serving() as served, engine(blocks(1)) as one, engine(blocks(1)) as other:
        unknown = run("query", 1, "--service", served.url)
        assert unknown.code == 1
        assert re.search(r"no engine of tenant default group default is registered", unknown.err)
        served.register("engine-0", one)
        served.register("engine-1", other, model_name="n", tenant_id="t")
        served.wait_exact("engine-0/0", 1)
        served.wait_exact("engine-1/0", 1)
        found = json.loads(run("query", *PROMPT, "--output=json", "--tenant", "t", "--service", served.url).out)
        assert [held["instance"] for held in found["workers"]] == ["engine-1"]
        served.register("engine-2", one, model_name="o")
        several = run("query", 1, "--service", served.url)
        assert several.code == 2
        assert "tenant default group default has several models: m, o; name one with --model" in several.err


def write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer for which words are tokens and sequences begin with token 99; it truncates and pads by default."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors  # noqa: PLC0415

    words = {f"w{number}": number for number in range(64)} | {"<s>": 99, "<unk>": 98}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))  # noqa: S106
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 99)])
    made.enable_truncation(8)
    made.enable_padding(length=128, pad_id=97, pad_token="<pad>")  # noqa: S106
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def test_text_is_tokenized_with_or_without_special_tokens(fleet: RunningService, tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path)
    text = " ".join(f"w{number}" for number in PROMPT)
    (tmp_path / "prompt.txt").write_text(text)
    common = ("--tokenizer", tokenizer, "--output=json", "--service", fleet.url)
    plain = json.loads(run("query", "--text", text, "--no-special-tokens", *common).out)
    assert plain == json.loads(run("query", *PROMPT, "--output=json", "--service", fleet.url).out)
    special = json.loads(run("query", "--text-file", tmp_path / "prompt.txt", *common).out)
    assert (special["prompt_tokens"], [held["tokens"] for held in special["workers"]]) == (65, [0, 0])
    piped = json.loads(run("query", "--text-file", "-", "--no-special-tokens", *common, stdin=text.encode()).out)
    assert piped == plain


def test_text_without_the_tokenizers_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    sentence = error_of(capsys, "query", "--text", "w1", "--tokenizer", tmp_path / "tokenizer.json", code=2)
    assert "install kvevents[service]" in sentence


def test_unusable_prompts_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {
        "odd.u32": b"12345",
        "word.json": b"[1, two]",
        "minus.json": b"[-1]",
        "latin.txt": b"\xe9",
        "tokenizer.json": b"{}",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert "5 bytes, which is not a multiple of 4" in error_of(capsys, "query", "--prompt-file", tmp_path / "odd.u32", code=2)
    assert "word.json: invalid token ids '[1, two]'" in error_of(
        capsys, "query", "--prompt-file", tmp_path / "word.json", code=2
    )
    assert "invalid token ids" in error_of(capsys, "query", "--prompt-file", tmp_path / "minus.json", code=2)
    assert "No such file" in error_of(capsys, "query", "--prompt-file", tmp_path / "none.json", code=2)
    assert "- reads the whole prompt from stdin" in error_of(capsys, "query", "-", 1, code=2)
    assert "--text and --text-file need --tokenizer" in error_of(capsys, "query", "--text", "w1", code=2)
    assert "token ids need no tokenizer" in error_of(capsys, "query", 1, "--tokenizer", tmp_path / "tokenizer.json", code=2)
    text = ("--tokenizer", tmp_path / "tokenizer.json", "--text-file", tmp_path / "latin.txt")
    assert "latin.txt is not UTF-8" in error_of(capsys, "query", *text, code=2)
    assert "cannot use --tokenizer" in error_of(
        capsys, "query", "--tokenizer", tmp_path / "tokenizer.json", "--text", "w1", code=2
    )


@pytest.mark.parametrize(
    "args",
    [
        ["query"],
        ["query", "x"],
        ["query", "4294967296"],
        ["query", "-1"],
        ["query", "1", "--text", "w1"],
        ["query", "--text", "w1", "--prompt-file", "x.json"],
        ["query", "1", "--service", "tcp://127.0.0.1:5557"],
        ["query", "1", "--service", "http://127.0.0.1:x"],
        ["query", "1", "--service", "http://me:secret@127.0.0.1"],
        ["query", "1", "--timeout", "0"],
        ["top", "--sort", "color"],
        ["top", "--limit", "0"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_code_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert ended.value.code == 2
    assert "usage: kvevents" in capsys.readouterr().err


# --- tokens and TLS


def test_a_token_comes_from_a_file_or_the_environment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    (tmp_path / "wrong").write_text("another-token-of-many-characters")
    (tmp_path / "none").write_text("two words")
    with run_guarded_service(tmp_path) as (url, _):
        top = ("top", "--once", "--service", url)
        assert "a token is required; set KVEVENTS_TOKEN, or name a file with --token-file" in error_of(capsys, *top)
        assert "unknown token" in error_of(capsys, *top, "--token-file", tmp_path / "wrong")
        assert main([*top, "--token-file", str(tmp_path / "token")]) == 0
        capsys.readouterr()
        monkeypatch.setenv("KVEVENTS_TOKEN", TOKEN)
        assert main([*top]) == 0
        capsys.readouterr()
        assert "has no valid token" in error_of(capsys, *top, "--token-file", tmp_path / "none", code=2)
        assert "cannot read --token-file" in error_of(capsys, *top, "--token-file", tmp_path / "nowhere", code=2)


def test_a_token_is_never_an_argument_nor_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["query", "1", "--token", TOKEN])
    expected = capsys.readouterr().err
    assert "all users of this machine can read arguments" in expected
    assert TOKEN not in expected


@pytest.mark.skipif(shutil.which("openssl") is None, reason="a certificate is made with openssl")
def test_https_works_with_a_private_certificate_authority(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = tmp_path / "key.pem", tmp_path / "ca.pem"
    options = (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=test -addext subjectAltName=IP:127.0.0.1"
    )
    subprocess.run(["openssl", *options.split(), "-keyout", pair[0], "-out", pair[1]], check=True, capture_output=True)  # noqa: S607
    monkeypatch.setenv("KVEVENTS_TOKEN", TOKEN)
    with run_guarded_service(tmp_path, f'tls = {{ certificate = "{pair[1]}", key = "{pair[0]}" }}') as (url, _):
        assert url.startswith("https://")
        top = ("top", "--once", "--service", url)
        assert "is not trusted" in error_of(capsys, *top)
        assert main([*top, "--tls-ca", str(pair[1])]) == 0
        capsys.readouterr()
        assert "whether the URL begins with https://" in error_of(
            capsys, "top", "--once", "--service", url.replace("https", "http")
        )
    assert "cannot use --tls-ca" in error_of(capsys, *top, "--tls-ca", pair[0], code=2)


# --- the client


def catch_request_error(url: str, timeout: float = SECONDS, max_response_bytes: int = 1 << 26) -> ServiceRequestError:
    with pytest.raises(ServiceRequestError) as caught:
        Client(url, deadline=timeout, retries=0, max_response_bytes=max_response_bytes).get("/health", HealthAnswer)
    return caught.value


@contextmanager
def answer_with(reply: bytes | None) -> Iterator[str]:
    from cli_doctor_cases import serve_reply  # noqa: PLC0415 - that module imports this one

    with serve_reply(reply) as endpoint:
        yield endpoint.replace("tcp://", "http://")


def reply(status: str, body: bytes, *headers: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status}".encode(), b"Content-Length: %d" % len(body), *headers]
    return b"\r\n".join([*lines, b"", body])


PROBLEM: Final = msgspec.json.encode(Problem.of(400, "cannot", "it cannot", "do not"))


@pytest.mark.parametrize(
    ("answer", "reason", "expected"),
    [
        (reply("400 Bad Request", PROBLEM), "cannot", "it cannot; do not"),
        (reply("503 Service Unavailable", PROBLEM), "cannot", "it cannot; do not"),
        (reply("502 Bad Gateway", b"<html>\x1b[2J"), "not-kvevents", "if this is a proxy"),
        (reply("302 Found", b"", b"Location: http://other"), "not-kvevents", "the client does not follow redirects"),
        (reply("200 OK", b"<html>"), "not-kvevents", "check the port"),
        (reply("200 OK", b'{"status": "fine"}'), "not-kvevents", "/health is not that of a kvevents service"),
        (b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f", "not-http", "does not answer in HTTP"),
        (b"\xff" * 1_000, "not-http", "does not answer in HTTP"),
        (b"", "closed", "closes the connection"),
    ],
)
def test_responses_of_other_servers_are_explained(answer: bytes, reason: str, expected: str) -> None:
    with answer_with(answer) as url:
        error = catch_request_error(url)
    assert expected in str(error)
    assert error.reason == reason
    assert len(str(error)) < 300


def test_servers_that_do_not_answer_are_reported_with_a_reason() -> None:
    with answer_with(None) as url:
        assert catch_request_error(url, timeout=0.2).reason == "timeout"
    with refuse_connections() as endpoint:
        refused = catch_request_error(endpoint.replace("tcp", "http"))
    assert refused.reason == "refused"
    assert "kvevents serve" in refused.hint
    assert catch_request_error("http://no-such-host.invalid:8090").reason == "unknown-host"
    assert catch_request_error(f"http://{'x' * 70}.invalid").reason == "unknown-host"


def test_a_response_above_the_limit_is_not_read_to_its_end() -> None:
    with answer_with(reply("200 OK", b"x" * (2 << 20))) as url:
        error = catch_request_error(url, max_response_bytes=1 << 20)
    assert error.reason == "too-large"
    assert "1 MiB" in str(error)


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("10.0.0.9:8090", "http://10.0.0.9:8090"),
        ("http://[::1]:8090/", "http://[::1]:8090"),
        ("https://indexer/kv/", "https://indexer/kv"),
    ],
)
def test_short_forms_of_a_url_are_completed(text: str, url: str) -> None:
    assert service_url(text) == url


def test_the_url_of_a_service_may_have_a_path() -> None:
    with answer_with(reply("200 OK", b'{"status": "ok", "warnings": []}')) as url:
        assert Client(f"{url}/kv").get("/health", HealthAnswer).status == "ok"


# --- top


def test_top_once_prints_one_frame_without_a_terminal(fleet: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    ended = run("top", "--once", "--service", fleet.url)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert re.match(rf"{re.escape(fleet.url)}  kvevents \S+, up \S+ \w+  ready: 2 of 2 sources are EXACT", lines[0])
    assert lines[1].split() == ["2", "sources", "2", "EXACT"]
    assert "6 blocks (4 unique)   gpu 4, cpu 2" in ended.out
    titles = lines[lines.index("") + 1].split()
    assert titles[:4] == ["worker", "model", "trust", "blocks"]
    assert lines[-2].split()[:4] == ["engine-0/0", "m", "EXACT", "2"]
    assert lines[-1].split()[:4] == ["engine-1/0", "m", "EXACT", "4"]


def test_top_once_prints_one_frame_as_json(fleet: RunningService) -> None:
    args = ("top", "--once", "--output=json", "--service", fleet.url, "--sort", "blocks", "--limit", 1)
    (line,) = run(*args).out.splitlines()
    frame = json.loads(line)
    assert list(frame) == [
        "at",
        "service",
        "error",
        "failing_since",
        "ready",
        "stats",
        "lookups_per_second",
        "sources",
        "faults",
    ]
    assert frame["ready"]["exact"] == 2
    assert frame["stats"]["blocks"] == 6
    assert [source["instance"] for source in frame["sources"]] == ["engine-1"]


def test_an_unreachable_engine_is_reported_in_one_line() -> None:
    """The service reports it with the name of the engine, and the connection logs nothing else."""
    with (
        refuse_connections() as endpoint,
        Program("serve", "--port", "0", "--model", "m", "--worker", f"engine-0={endpoint}") as program,
    ):
        program.err.wait(f"nothing listens at {endpoint}")
        ended = program.interrupt(signal.SIGTERM)
    warnings = [line for line in ended.err.splitlines() if "WARNING" in line]
    assert len(warnings) == 1, warnings
    assert "engine-0 rank 0" in warnings[0]


def test_top_writes_all_columns_into_a_pipe(fleet: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """The width that `COLUMNS` gives is ignored for a pipe."""
    monkeypatch.setenv("COLUMNS", "40")
    ended = run("top", "--once", "--service", fleet.url)
    assert "worker" in ended.out
    assert re.search(r"model .* tiers .* restarts", ended.out)


def test_top_once_without_a_service_is_an_error() -> None:
    with refuse_connections() as endpoint:
        ended = run("top", "--once", "--service", endpoint.replace("tcp", "http"))
    assert (ended.code, ended.out) == (1, "")
    assert "nothing listens at" in ended.err


def test_a_live_view_needs_a_terminal() -> None:
    ended = run("top")
    assert ended.code == 2
    assert "use --once or --output json" in ended.err


def test_json_lines_contain_rates_and_continue_after_a_restart_of_the_service() -> None:
    with reserve_port() as port, engine(blocks(2)) as publisher, Program("serve", "--port", port) as program:
        served = RunningService(program)
        served.register("engine-0", publisher)
        served.wait_exact("engine-0/0", 2)
        with Program("top", "--output=json", "--interval", "0.05", "--service", served.url) as top:
            top.out.wait(lambda lines: any(frame(line)["error"] is None for line in lines))
            publisher.publish(KVEventBatch(time.time(), [blocks(1, 2)], 0))
            top.out.wait(lambda lines: any(has_rate(frame(line)) for line in lines))
            assert program.interrupt(signal.SIGTERM).code == 0
            outage = frame(top.out.wait('"error":"nothing listens'))
            assert outage["failing_since"] <= outage["at"]
            assert (outage["stats"], outage["sources"]) == (None, [])
            with Program("serve", "--port", port) as restarted:
                RunningService(restarted)
                top.out.wait(lambda lines: frame(lines[-1])["error"] is None)
                assert top.interrupt().code == 0


def frame(line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line)
    return found


def has_rate(line: dict[str, Any]) -> bool:
    return any((source["rate"] or 0) > 0 for source in line["sources"])


class Terminal:
    """`kvevents top` on a pseudo-terminal whose output the test reads."""

    def __init__(self, *args: object, rows: int = 24, columns: int = 120) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        env = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "LINES", "NO_COLOR"}}
        command = [sys.executable, "-m", "kvevents", "top", *map(str, args)]
        with interrupts_enabled():
            self.process = subprocess.Popen(
                command, stdin=slave, stdout=slave, stderr=slave, start_new_session=True, env=env | {"TERM": "xterm-256color"}
            )
        self.settings = termios.tcgetattr(slave)
        self._slave = slave
        self.text = ""

    def wait(self, wanted: str) -> None:
        """Wait until output that matches has been written since the last call."""
        deadline = time.monotonic() + SECONDS
        while not re.search(wanted, self.text):
            assert time.monotonic() < deadline, self.text[-2000:]
            self.text += os.read(self._master, 65536).decode(errors="replace")
        self.text = ""

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        return self.process.wait(SECONDS)

    def is_restored(self) -> bool:
        """Return whether echo and line mode are on again."""
        return bool(termios.tcgetattr(self._slave)[3] == self.settings[3])

    def close(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)
        os.close(self._master)
        os.close(self._slave)


@contextmanager
def terminal(*args: object, **size: int) -> Iterator[Terminal]:
    view = Terminal(*args, **size)
    try:
        yield view
    finally:
        view.close()


def test_a_live_view_ends_with_q_and_restores_the_terminal(fleet: RunningService) -> None:
    with terminal("--service", fleet.url, "--interval", 30) as view:
        view.wait(r"engine-1/0")
        view.press(b"xq")
        assert view.end() == 0
        assert view.is_restored()


def test_a_live_view_ends_with_ctrl_c(fleet: RunningService) -> None:
    with terminal("--service", fleet.url) as view:
        view.wait(r"EXACT")
        view.process.send_signal(signal.SIGINT)
        assert view.end() == 0
        assert view.is_restored()


def test_a_live_view_shows_since_when_the_service_is_unreachable_and_recovers() -> None:
    with reserve_port() as port, terminal("--service", f"127.0.0.1:{port}", "--interval", "0.05") as view:
        view.wait(r"cannot be reached since \d\d:\d\d:\d\d \(\S+ s\): nothing listens")
        for _ in range(2):
            with Program("serve", "--port", port) as program:
                RunningService(program)
                view.wait(r"ready.*0 of 0 sources")
            view.wait(r"cannot be reached since")
        view.wait(r"its last state")
        view.press(b"q")
        assert view.end() == 0


# --- layout of a frame


def draw_frame(
    sources: list[PolledSource], width: int = 120, height: int | None = None, *, limit: int | None = None, **more: Any
) -> list[str]:
    made, written = PollResult(at=1010.0, service="http://x:1", ready=READY, stats=stats(), sources=sources, **more), StringIO()
    Console(written).lines(TopView(limit).draw(made, width, height))
    return written.getvalue().splitlines()


@pytest.mark.parametrize("height", [8, 24, 60, 300])
def test_many_sources_fit_into_the_height_of_the_terminal(height: int) -> None:
    lines = draw_frame([source(number) for number in range(250)], height=height)
    assert len(lines) <= height
    rows = sum(line.startswith("engine-") for line in lines)
    assert rows >= min(250, height - 7)
    assert lines[-1] == (f"and {250 - rows} more" if rows < 250 else lines[-1])
    assert len([line for line in draw_frame([source(number) for number in range(250)], limit=3) if "engine-" in line]) == 3


def test_the_load_of_engines_is_a_column_if_any_reports_it() -> None:
    load = LoadView(running=12, waiting=3, waiting_uncached_tokens=None, used_tokens=0, max_tokens=0, age_seconds=0.1)
    assert not any("waiting" in line for line in draw_frame([source(1)], 200))
    lines = draw_frame([source(1, load=load), source(2), source(3, load_fault="/metrics does not answer")], 200)
    title, *rows = lines[-4:]
    assert "running / waiting" in title
    assert "12 / 3" in rows[0]
    assert " ? " in rows[2]


@pytest.mark.parametrize("width", [30, 40, 60, 80, 100, 140, 200])
def test_narrow_terminals_keep_name_and_trust(width: int) -> None:
    sources = [
        source(
            1, "DEGRADED", reason="batches are permanently lost, or history is truncated", lost=3, tiers={"gpu": 7, "cpu": 3}
        )
    ]
    lines = draw_frame(sources, width)
    assert all(len(line) <= width for line in lines)
    assert "engine-001/0" in lines[-1]
    assert "DEGRADED" in lines[-1]
    assert ("gpu 7 cpu 3" in lines[-1]) == (width >= 140)
    assert ("batches are" in lines[-1]) == (width >= 40)


def test_the_head_of_a_frame_summarises_the_service() -> None:
    text = "\n".join(draw_frame([source(1)], faults={"dns:x": ["it does not resolve"] * 5}, lookups_per_second=2.0))
    for expected in (
        "up 67 min",
        "ready: all are EXACT",
        "1 source",
        "12,345 blocks (10,000 unique)",
        "3.0 MiB of 8.0 GiB",
        "120 batches/s",
        "100 lookups (2.0/s), 56% hit",
        "dns:x: it does not resolve",
        "and 2 faults more",
    ):
        assert expected in text


def test_control_characters_from_peers_are_escaped_in_the_view() -> None:
    lines = draw_frame([source(1, instance="[red]x\x1b[2J", model="[/]", reason="\x1b]0;title\x07")], 160)
    assert "\x1b" not in "".join(lines)
    assert r"[red]x\x1b[2J/0" in lines[-1]


def test_sources_are_sorted_in_each_order() -> None:
    rows = [
        source(1, rate=2.0, blocks=5, lag_seconds=0.1, last_event=30.0, lost=0),
        source(2, "STALE", rate=None, blocks=7, lag_seconds=None, last_event=None, lost=1),
        source(3, "DEGRADED", rate=9.0, blocks=6, lag_seconds=-4.0, last_event=20.0, lost=5),
        source(4, "EXACT", rate=0.0, blocks=1, lag_seconds=0.0, last_event=10.0, lost=0),
    ]
    firsts = {order: [one.instance[-1] for one in sort_sources(rows, order)] for order in SOURCE_ORDERS}
    assert firsts == {
        "trust": ["2", "3", "1", "4"],
        "name": ["1", "2", "3", "4"],
        "blocks": ["2", "3", "1", "4"],
        "rate": ["3", "1", "2", "4"],
        "lag": ["3", "1", "2", "4"],
        "age": ["2", "4", "3", "1"],
        "lost": ["3", "2", "1", "4"],
    }


def test_durations_sizes_and_percentages_are_formatted() -> None:
    assert [duration(value) for value in (0.04, 9.94, 10, 119, 120, 7_199, 7_200, 200_000)] == [
        "0.0 s",
        "9.9 s",
        "10 s",
        "119 s",
        "2 min",
        "120 min",
        "2 h",
        "2 d",
    ]
    assert [size(value) for value in (24, 2048, 3 << 20, 8 << 30)] == ["24 bytes", "2.0 KiB", "3.0 MiB", "8.0 GiB"]
    assert [percentage(*pair) for pair in ((0, 0), (0, 5), (1, 1000), (1, 2), (999, 1000), (5, 5))] == [
        "0%",
        "0%",
        "<1%",
        "50%",
        ">99%",
        "100%",
    ]
    assert [worker_name("e", 1), worker_name("e", 1, "t"), worker_name("e", 1, "t", "g")] == ["e/1", "e/1@t", "e/1@t/g"]
    assert first_names([str(number) for number in range(7)]) == "0, 1, 2, 3, 4 and 2 more"


def test_a_row_shows_state_and_reason_once() -> None:
    """A row has the state once, and a fault that is also part of the reason once."""
    fault = "nothing listens at tcp://x:1"
    row = draw_frame([source(1, "STALE", reason=f"{fault}; disconnected", fault=fault)], 160)[-1]
    assert row.split("  ")[-1].strip() == f"{fault}; disconnected"
    assert row.split().count("STALE") == 1
