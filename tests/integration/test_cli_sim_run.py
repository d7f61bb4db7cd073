"""`kvevents sim run` as a process, and as a fleet that consumers follow."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from cli_cases import SECONDS, ProcessResult, Program
from kvevents.cli import main, sim_run
from kvevents.cli.command import ExitCode
from kvevents.cli.console import Console
from kvevents.cli.sim_run import fleet_line, show_progress, streams_line
from kvevents.endpoints import MAX_PORT
from kvevents.service.discovery.files import read_sources
from kvevents.sim.results import LiveResult, StreamResult
from service_cases import Service, serving, wait_for
from sim_cases import conversations, growing_conversations
from sim_live_cases import open_fleet
from tools.ports import reserve_adjacent_ports

SMALL = ("--engines", "2", "--blocks", "400", "--preset", "llama-3.1-8b-h100")
FAST = ("--time-scale", "20")
TURNS = 24
ENDLESS = ("--workload", "chat", "--rate", "20")


@pytest.fixture(scope="module", name="trace")
def small_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of four seconds of simulated time."""
    return growing_conversations(tmp_path_factory.mktemp("traces") / "trace.jsonl", TURNS)


@pytest.fixture(name="fleet")
def run_in_this_process(trace: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., ProcessResult]:
    """Return a function that runs the command in this process."""

    def fleet(*args: object) -> ProcessResult:
        code = main(["sim", "run", "--trace", str(trace), *SMALL, *FAST, *map(str, args)])
        out, err = capfdbinary.readouterr()
        return ProcessResult(code, out.decode(), err.decode())

    return fleet


def start_program(*args: object, **env: str) -> Program:
    return Program("sim", "run", *SMALL, *args, **env)


def parse_result(text: str) -> LiveResult:
    """Decode the only line of JSON on stdout."""
    assert text.count("\n") == 1
    return msgspec.json.decode(text, type=LiveResult)


# --- end of a run


def test_a_run_ends_when_all_requests_are_answered(fleet: Callable[..., ProcessResult]) -> None:
    """Stderr has the endpoints; stdout has a table, a sentence, and the final state of the streams."""
    ended = fleet()
    assert ended.code == 0
    head, row, sentence, streams = ended.out.splitlines()
    assert head.split()[:3] == ["policy", "TTFT", "p50"]
    assert row.split()[0] == "prefix-aware"
    assert sentence.endswith(f"index and engines agreed on all {TURNS} lookups")
    assert re.fullmatch(r"2 of 2 streams EXACT; \d+ batches delivered, 0 gaps repaired, 0 lost, 0 resets", streams)
    assert len(re.findall(r"^engine-[01]/0 publishes at tcp://127\.0\.0\.1:\d+, replay at tcp:", ended.err, re.MULTILINE)) == 2
    assert "\x1b[" not in ended.out + ended.err


def test_json_output_is_one_object(fleet: Callable[..., ProcessResult]) -> None:
    ended = fleet("--output=json", "--requests", 10, "--policy", "round-robin", "--faults", "drop:1%", "--dialect", "vllm-0.24")
    assert ended.code == 0
    found = parse_result(ended.out)
    (result,) = found.policies
    assert (result.policy, result.requests, result.finished, result.disagreements) == ("round-robin", 10, 10, 0)
    assert [(one.source, one.rank, one.trust) for one in found.streams] == [("engine-0", 0, "EXACT"), ("engine-1", 0, "EXACT")]
    assert sum(one.batches for one in found.streams) == result.batches
    shown = {name: found.settings[name] for name in ("engines", "requests", "time_scale", "faults", "dialect")}
    assert shown == {"engines": 2, "requests": 10, "time_scale": 20.0, "faults": "drop:1%", "dialect": "vllm-0.24"}
    assert found.seconds > 0
    assert found.faults == {}


def test_faults_are_injected_and_reported(fleet: Callable[..., ProcessResult]) -> None:
    ended = fleet("--faults", "reset:50ms, restart:200ms", "--time-scale", 4)
    assert ended.code == 0
    streams = ended.out.splitlines()[-1]
    assert re.search(r"[1-9]\d* resets?, [1-9]\d* resets?, [1-9]\d* restarts?$", streams), streams


def test_a_run_ends_after_its_duration(fleet: Callable[..., ProcessResult]) -> None:
    """The trace would take two hundred seconds; index and engines agree until the end of the duration."""
    found = parse_result(fleet("--duration", 0.4, "--time-scale", 0.02, "--output=json").out)
    assert 0.4 <= found.seconds < 100
    assert found.policies[0].requests < TURNS
    assert found.policies[0].disagreements == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_endless_run_with_the_table(number: signal.Signals) -> None:
    """The run has no end of its own, and begins when a consumer has subscribed."""
    with start_program("--engines", 1, *ENDLESS, *FAST, "--wait-for-subscriber", SECONDS) as running:
        endpoints = re.search(r"publishes at (\S+), replay at (\S+)", running.err.wait("engine-0/0 publishes"))
        assert endpoints
        with Program("tail", endpoints[1], "--replay", endpoints[2], "--output=wide") as follower:
            follower.out.wait(lambda lines: sum("+1 block" in one for one in lines) > 5)
            ended = running.interrupt(number)
    assert ended.code == 0
    assert ended.out.splitlines()[1].startswith("prefix-aware")
    assert "index and engines agreed on all" in ended.out
    assert "Traceback" not in ended.err


def test_without_a_terminal_progress_is_printed_as_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_run, "LINE_INTERVAL_SECONDS", 0.0)
    notes = io.StringIO()
    with open_fleet(engines=2, pace=20) as fleet:
        show = show_progress(fleet, Console(notes=notes))
        fleet.run(conversations(4, rate=10))
        for _ in range(3):
            show()
    lines = notes.getvalue().splitlines()
    assert len(lines) == 3
    assert all(
        re.match(r"[\d.:]+\S* ?\S*: \d+ of \d+ answered, \d+ running, \d+ waiting, .* of prompt tokens cached, ", one)
        for one in lines
    ), lines
    assert all(re.search(r"2 streams EXACT, \d+ batches, index and engine agreed on (\d+) of \1$", one) for one in lines)


# --- endpoints and sources


def test_the_written_sources_can_be_read_by_a_service(fleet: Callable[..., ProcessResult], tmp_path: Path) -> None:
    """The file replaces an older one and contains ranks, configured ports, and names that TOML must quote."""
    file, port = tmp_path / "fleet.toml", reserve_adjacent_ports(4)
    file.write_text("[[sources")
    model = 'a "model" \\ of ours \u00e9'
    ended = fleet(
        "--write-sources",
        file,
        "--engines",
        1,
        "--ranks",
        2,
        "--base-port",
        port,
        "--model",
        model,
        "--requests",
        1,
        "--block-size",
        32,
    )
    assert ended.code == 0
    assert f"kvevents serve --sources {file}" in ended.err
    tables = read_sources(file)
    assert [(one.instance, one.rank, one.endpoint, one.replay_endpoint) for one in tables] == [
        ("engine-0", 0, f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}"),
        ("engine-0", 1, f"tcp://127.0.0.1:{port + 2}", f"tcp://127.0.0.1:{port + 3}"),
    ]
    assert {(one.model, one.block_size) for one in tables} == {(model, 32)}


def test_a_service_follows_the_simulated_fleet(tmp_path: Path) -> None:
    """The streams of `kvevents serve --sources` become EXACT with blocks in spite of lost batches and cut connections."""
    file = tmp_path / "fleet.toml"
    fault_options = ("--faults", "drop:5%,reset:300ms")
    with start_program(
        *(*ENDLESS, "--time-scale", 4, *fault_options, "--write-sources", file),
        *("--wait-for-subscriber", SECONDS, "--output=json"),
    ) as running:
        running.err.wait("engine-1/0 publishes")
        with serving("--sources", file) as service:
            for engine in ("engine-0", "engine-1"):
                wait_for(f"{engine} to be EXACT and hold blocks", partial(is_exact_with_blocks, service, engine))
        ended = running.interrupt()
    assert ended.code == 0
    found = parse_result(ended.out + "\n")
    assert found.policies[0].disagreements == 0
    assert found.policies[0].checked > 0


def is_exact_with_blocks(service: Service, engine: str) -> bool:
    found = service.sources().get((engine, 0))
    return found is not None and found["trust"]["state"] == "EXACT" and found["blocks"] > 0


def test_a_run_that_waits_for_a_subscriber_fails_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "run", *SMALL, "--wait-for-subscriber", "0.05"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(
        r"kvevents: no subscriber connected to tcp://127\.0\.0\.1:\d+ within 0.05 s; start one, such as kvevents tail tcp://\S+\n$",
        err,
    )


# --- errors


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--faults", "crash:1s"], r"unknown fault 'crash': expected restart:60s .*"),
        (["--faults", "drop:7"], r"invalid fault 'drop:7': expected a share from 0% to 100%, for example drop:1%"),
        (["--faults", "cut:0s"], r"invalid fault 'cut:0s': expected a duration above 0, for example cut:60s"),
        (
            ["--base-port", str(MAX_PORT - 2)],
            rf"invalid base port {MAX_PORT - 2}: 2 workers would need port \d+; choose a lower one",
        ),
        (["--base-port", "99999999"], r".*99999999.*"),
        (["--host", "no such host"], r".*no such host.*"),
        (["--write-sources", "/none/fleet.toml"], r"cannot write /none/fleet.toml: No such file or directory"),
        (["--write-sources", "/none", "--model", "a\x7f"], r"invalid --model 'a\\x7f': expected printable characters"),
        (["--write-sources", "/"], r"cannot write /: Is a directory"),
        (["--trace", "/none/trace.jsonl"], r"cannot read /none/trace.jsonl: .*"),
        (["--trace", os.devnull], r"/dev/null has no requests; .*"),
        (["--dialect", "llama-1.0"], r".*llama.*"),
        (["--preset", "tpu"], r"unknown preset 'tpu': .*"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_settings_are_reported_in_one_sentence(
    args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    is_external = args[0] == "--host"
    assert main(["sim", "run", *SMALL, "--duration", "5", *args]) == (ExitCode.FAILED if is_external else ExitCode.WRONG_USAGE)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"kvevents: {expected}\n", err)


@pytest.mark.parametrize(
    "args",
    [
        ["--policy", "best"],
        ["--time-scale", "0"],
        ["--time-scale", "-1"],
        ["--time-scale", "inf"],
        ["--duration", "x"],
        ["--duration", "-1"],
        ["--base-port", "0"],
        ["--base-port", "x"],
        ["--wait-for-subscriber", "x"],
        ["--requests", "0"],
        ["--event-delay", "1"],
        ["--jobs", "2"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_code_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sim", "run", *args])
    assert ended.value.code == 2
    assert "usage: kvevents " in capsys.readouterr().err


def test_a_port_in_use_is_reported_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with open_fleet(engines=1) as other:
        port = other.addresses[0].endpoint.rpartition(":")[2]
        assert main(["sim", "run", *SMALL, "--base-port", port]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"kvevents: .*127\.0\.0\.1:{port}.*\n", err)


# --- live view


def test_a_terminal_gets_one_line_that_is_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(written, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sim_run, "FRAME_INTERVAL_SECONDS", 0.0)
    with open_fleet(engines=2, pace=20) as fleet:
        show_progress(fleet, Console())()
        assert written.getvalue().startswith(f"\r\x1b[K{fleet_line(fleet)[:40]}")
    assert "\n" not in written.getvalue()


def test_the_final_state_of_the_streams_is_summarised_in_one_line() -> None:
    stream = StreamResult(
        source="a",
        rank=0,
        endpoint="tcp://x:1",
        trust="EXACT",
        batches=1_000,
        replayed=3,
        gaps_repaired=1,
        lost=0,
        resets=2,
        reconnects=4,
    )
    other = msgspec.structs.replace(stream, source="b", trust="STALE (disconnected)", lost=1_200)
    assert streams_line([stream, other], {"restart": 2, "cut": 1}) == (
        "1 of 2 streams EXACT; 2,000 batches delivered, 2 gaps repaired, 1,200 lost, 4 resets, 2 restarts, 1 cut"
    )
