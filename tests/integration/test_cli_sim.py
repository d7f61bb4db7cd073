"""`kvevents sim compare` from its options to its output, mostly in this process."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from cli_cases import RECORDING, RUN, Program, run
from kvevents.cli import main, sim_compare
from kvevents.cli.command import ExitCode
from kvevents.cli.sim_compare import add_simulation, read_simulation, run_policies
from kvevents.errors import ConfigError, ExternalError
from kvevents.sim.results import Comparison, Disagreement, PolicyResult
from kvevents.sim.routers import POLICIES
from kvevents.sim.settings import DEFAULT_REQUESTS, SimulationSettings
from kvevents.sim.workloads import WORKLOADS, WorkloadName
from sim_cases import growing_conversations
from sim_report_cases import result

SMALL = ("--engines", "2", "--blocks", "400", "--preset", "llama-3.1-8b-h100")
REQUESTS = 60


@pytest.fixture(scope="module", name="trace")
def small_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of growing conversations, of which the caches hold half."""
    return growing_conversations(tmp_path_factory.mktemp("traces") / "trace.jsonl", REQUESTS)


@pytest.fixture(scope="module", name="salted")
def salted_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace in the format of kvevents with a salt, for which some dialects have no field."""
    file = tmp_path_factory.mktemp("traces") / "salted.jsonl"
    file.write_text('{"at": 0.0, "prompt": [[1, 100]], "output": [[2, 5]], "salt": "s"}\n')
    return file


@pytest.fixture(name="compare")
def compare_in_this_process(trace: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> Any:
    """Return a function that runs the command in this process and returns its exit code, stdout and stderr."""

    def compare(*args: object, jobs: int = 1) -> tuple[int, str, str]:
        code = main(["sim", "compare", "--trace", str(trace), *SMALL, "--seeds", "1", "--jobs", str(jobs), *map(str, args)])
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode()

    return compare


# --- output


def test_json_is_one_object_with_every_policy(compare: Any) -> None:
    code, out, _ = compare("--output=json")
    assert code == 0
    assert out.count("\n") == 1
    found = msgspec.json.decode(out, type=Comparison)
    assert [one.policy for one in found.policies] == list(POLICIES)
    assert "round-robin" in POLICIES
    for one in found.policies:
        assert one.finished == one.requests == REQUESTS
        assert one.checked >= REQUESTS
        assert one.disagreements == 0
    assert {name: found.settings[name] for name in ("engines", "blocks", "requests", "seed")} == {
        "engines": 2,
        "blocks": 400,
        "requests": REQUESTS,
        "seed": 0,
    }
    rates = {one.policy: one.hit_rate for one in found.policies}
    assert rates["prefix-aware"] > rates["random"] > 0


def test_the_same_options_give_the_same_bytes_for_any_number_of_jobs(compare: Any) -> None:
    first = compare("--output=json", "--seed", 3, "--policy", "random", "--policy", "prefix-aware")
    assert compare("--output=json", "--seed", 3, "--policy", "random", "--policy", "prefix-aware") == first
    assert compare("--output=json", "--seed", 3, "--policy", "random", "--policy", "prefix-aware", jobs=2) == first
    other = compare("--output=json", "--seed", 4, "--policy", "random", "--policy", "prefix-aware")
    assert json.loads(other[1])["policies"][0] != json.loads(first[1])["policies"][0]


def test_another_process_gives_the_same_bytes(compare: Any, trace: Path) -> None:
    """No result depends on hashes of objects, which differ between processes."""
    ended = run("sim", "compare", "--trace", trace, *SMALL, "--seeds=1", "--output=json", "--policy", "prefix-aware")
    assert (ended.code, ended.out, ended.err) == compare("--output=json", "--policy", "prefix-aware")


def test_the_table_does_not_need_matplotlib(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = compare("--policy", "prefix-aware", "--policy", "round-robin", "--policy", "prefix-aware")
    head, *lines, sentence = out.splitlines()
    assert code == 0
    assert head.split()[:3] == ["policy", "TTFT", "p50"]
    assert [line.split()[0] for line in lines] == ["prefix-aware", "round-robin"]
    assert sentence.startswith("events pay nothing here: round-robin, which needs none, is as fast: its TTFT p90 is 1.00 times")
    assert sentence.endswith("index and engines agreed on all 120 lookups")
    assert re.match(
        r"2 engines, llama-3.1-8b-h100, 60 requests of the trace \S+, seed 0; times in seconds, \* is the best\n", err
    )


def test_a_picture_is_drawn_in_addition_to_the_table(compare: Any, tmp_path: Path) -> None:
    file = tmp_path / "compared.svg"
    code, out, err = compare("--policy", "random", "--requests", 5, "--picture", file)
    assert code == 0
    assert out.startswith("policy")
    assert err.endswith(f"wrote {file}\n")
    assert "<svg" in file.read_text()


def test_disagreements_are_reported_as_a_failure(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = result("random", disagreements=2, examples=[Disagreement("engine-1", 0, 0, 17, 1, 4_096, 512, 528)])
    monkeypatch.setattr(sim_compare, "run_policies", lambda *_, **__: [wrong])
    code, out, err = compare()
    assert code == 1
    assert "DISAGREED on 2 of 100 lookups" in out
    assert (
        "random: engine-1/0 found 512 of 4,096 tokens where the index says 528 (incarnation 0, batch 17, after 1 event of it)"
        in err
    )
    assert "index and engines disagree on 2 lookups" in err
    assert compare("--output=json")[0] == 1


# --- errors


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--preset", "tpu"], r"unknown preset 'tpu': expected qwen3-32b-2xh100, .*"),
        (["--preset", "/none/costs.json"], r"cannot read the cost model /none/costs.json: No such file or directory"),
        (["--dialect", "llama-1.0"], r".*llama.*"),
        (["--trace", "/none/trace.jsonl"], r"cannot read /none/trace.jsonl: .*"),
        (["--trace", os.devnull], r"/dev/null has no requests; .*"),
        (["--trace", __file__], r".*test_cli_sim.py, line 1: .*"),
        (
            ["--workload", "chat", "--trace-speed", "2"],
            r"--trace-speed applies only to a trace; for chat use rate \(--rate\), .*",
        ),
        (["--rate", "0"], r"--rate is 0.0; it must be above 0"),
        (["--trace-speed", "inf"], r"--trace-speed is inf; it must be above 0"),
        (
            ["--max-num-batched-tokens", "1"],
            r"--max-num-batched-tokens is 1; it must be at least max_num_seqs.*",
        ),
        (["--engines", "100000"], r"100000 engines with 1 ranks each are more than \d+ workers: set fewer engines or ranks"),
        (["--dialect", "vllm-0.9", "--host-blocks", "5"], r".*has no field for tiers.*"),
        (["--picture", "/none/a.svg"], r"cannot write /none/a.svg: the directory /none does not exist"),
        (["--picture", "a.html"], r"cannot write a.html: expected a name that ends in .svg, .png, .pdf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_settings_are_reported_in_one_sentence(
    args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sim", "compare", *args]) == (ExitCode.FAILED if __file__ in args else ExitCode.WRONG_USAGE)
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"kvevents: {expected}\n", err)


@pytest.mark.parametrize(
    "args",
    [
        ["--policy", "best"],
        ["--workload", "nonsense"],
        ["--requests", "0"],
        ["--engines", "0"],
        ["--block-size", "0"],
        ["--seed", "-1"],
        ["--event-delay", "nan"],
        ["--rate", "x"],
        ["--rate", "1", "--trace-speed", "2"],
        ["--trace", "x", "--workload", "chat"],
        ["--jobs", "none"],
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_code_2(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sim", "compare", *args])
    assert ended.value.code == 2
    assert "usage: kvevents sim compare" in capsys.readouterr().err


def test_without_matplotlib_a_picture_is_rejected_before_the_simulation(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delattr(sim_compare, "run_policies")
    code, out, err = compare("--picture", "compared.svg")
    assert (code, out) == (ExitCode.WRONG_USAGE, "")
    assert "install kvevents[sim]" in err


def test_a_picture_that_cannot_be_written_is_reported_after_the_table(compare: Any, tmp_path: Path) -> None:
    (tmp_path / "a.svg").symlink_to("a.svg")  # a symlink loop, which no user can open, not even root
    code, out, err = compare("--policy", "random", "--requests", 2, "--picture", tmp_path / "a.svg")
    assert code == ExitCode.WRONG_USAGE
    assert out
    assert "cannot write" in err


def test_a_picture_in_a_read_only_folder_is_rejected_before_the_simulation(
    compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    code, out, err = compare("--picture", tmp_path / "a.svg")
    assert (code, out) == (ExitCode.WRONG_USAGE, "")
    assert f"cannot write {tmp_path}/a.svg: no permission" in err


# --- processes


def ignore(_: PolicyResult) -> None:
    pass


@pytest.fixture(name="settings")
def settings_of_a_small_run(trace: Path) -> SimulationSettings:
    return SimulationSettings(engines=2, blocks=400, trace=str(trace), requests=3)


@pytest.fixture(name="no_child_left", autouse=True)
def assert_no_child_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


TWO = ["random", "round-robin"]


def kill_itself(_settings: SimulationSettings, policy: str, _seed: int) -> None:
    """Kill the process for `round-robin`, as the kernel does if it is out of memory; the others wait."""
    if policy == "round-robin":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def test_a_killed_process_is_reported_and_ends_the_others(
    settings: SimulationSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sim_compare, "_simulate", kill_itself)
    with pytest.raises(ExternalError, match="a process ended before its simulation was done"):
        run_policies(TWO, settings, jobs=2, on_result=ignore)


def test_an_error_in_a_child_process_is_raised_in_the_parent(salted: Path) -> None:
    settings = SimulationSettings(engines=1, blocks=400, dialect="vllm-0.10.2", trace=str(salted))
    for jobs in (1, 2):
        with pytest.raises(ConfigError, match="has no field for salts"):
            run_policies(TWO, settings, jobs=jobs, on_result=ignore)


def test_more_policies_than_jobs_are_all_simulated(settings: SimulationSettings) -> None:
    """All results are reported, and returned in the order of the given policies and the seeds."""
    reported: list[PolicyResult] = []
    policies = ["round-robin", "random", "least-loaded"]
    found = run_policies(policies, settings, seeds=2, jobs=2, on_result=reported.append)
    assert [(one.policy, one.seed) for one in found] == [(policy, seed) for policy in policies for seed in (0, 1)]
    assert sorted((one.policy, one.seed) for one in reported) == sorted((one.policy, one.seed) for one in found)
    assert all(one.finished == 3 for one in found)


def raise_interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_ends_every_process(settings: SimulationSettings) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_policies(TWO, settings, jobs=2, on_result=raise_interrupt)


def test_an_interrupt_is_reported(compare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_compare, "run_policies", raise_interrupt)
    assert compare() == (130, "", "interrupted after 0 of 7 simulations; their results are discarded\n")


def test_sigint_is_blocked_while_child_processes_start() -> None:
    """The terminal sends SIGINT to child processes as well, and each would print a traceback."""
    with sim_compare._block_interrupts():
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())


# --- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "term", "shown"), [(Terminal, "xterm", True), (Terminal, "dumb", False), (io.StringIO, "xterm", False)]
)
def test_progress_is_shown_on_terminals_only_and_erased(
    stream: type[io.StringIO], term: str, shown: bool, monkeypatch: pytest.MonkeyPatch, trace: Path
) -> None:
    written, out = stream(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", term)
    assert main(["sim", "compare", "--trace", str(trace), *SMALL, "--policy", "random", "--seeds", "1", "--jobs", "1"]) == 0
    assert ("\r\x1b[Krandom " in written.getvalue()) is shown
    assert ("%\r\x1b[K" in written.getvalue()) is shown


# --- options


def parse_options(*args: str) -> SimulationSettings:
    parser = ArgumentParser()
    add_simulation(parser)
    return read_simulation(parser.parse_args(args))


def test_every_setting_of_a_fleet_is_an_option() -> None:
    assert parse_options() == SimulationSettings()
    words = "--ranks 2 --routers 8 --max-num-seqs 7 --window 128 --host-blocks 0 --event-delay 0 --overlay 1.5 --seed 9"
    assert parse_options(*words.split()) == SimulationSettings(
        ranks=2, routers=8, max_num_seqs=7, window=128, event_delay=0.0, overlay=1.5, seed=9
    )


def test_the_workload_follows_the_options(trace: Path) -> None:
    """A trace is used to its end by default; `count` returns the number of requests that `generate` yields."""
    chosen = parse_options("--trace", str(trace), "--trace-speed", "3")
    times = [request.at for request in chosen.generate()]
    assert chosen.count() == len(times) == REQUESTS
    assert times[-1] == pytest.approx(0.15 * (REQUESTS - 1) / 3)
    assert parse_options("--trace", str(trace), "--requests", "7").count() == 7
    assert parse_options("--workload", "agents").count() == DEFAULT_REQUESTS
    fast = list(parse_options("--workload", "llm-d", "--rate", "50", "--requests", "100", "--seed", "2").generate())
    assert len(fast) == 100
    assert 1 < fast[-1].at < 4
    assert parse_options().count() == 1_000  # the packaged sample
    with pytest.raises(ConfigError, match="use one of them"):
        SimulationSettings(trace="x", workload="chat")
    assert get_args(WorkloadName) == tuple(WORKLOADS)


def test_other_commands_do_not_load_the_simulation() -> None:
    """The other commands also work on platforms without the native module."""
    loaded = "[m for m in sys.modules if m.startswith('kvevents.sim')]"
    code = f"import sys, kvevents.cli.program as p; p.make_parser(); print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_missing_native_module_is_reported() -> None:
    code = (
        "import sys; sys.modules['kvevents_native._native'] = None\n"
        "from kvevents.cli import main\nsys.exit(main(['sim', 'compare']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.WRONG_USAGE
    assert "kvevents.index needs the package kvevents-native" in done.stderr
    assert "Traceback" not in done.stderr


# --- recordings as traces


def test_a_recording_becomes_a_trace_that_can_be_run(tmp_path: Path) -> None:
    """The requests of a recorded vLLM run replace an existing trace file, which `sim compare` can then read."""
    trace = tmp_path / "mine.jsonl.gz"
    trace.write_bytes(b"something else")
    with Program("sim", "convert", RECORDING, trace, "--run", RUN, "--force") as converting:
        ended = converting.end()
    assert (ended.code, ended.out) == (0, "")
    found = re.search(r"wrote .*mine.jsonl.gz: (\d+) requests", ended.err)
    assert found is not None
    assert int(found[1]) > 20
    with Program(
        "sim", "compare", "--trace", trace, "--policy", "round-robin", "--engines", 2, "--seeds", 1, "-o", "json"
    ) as comparing:
        compared = comparing.end()
    assert compared.code == 0
    assert json.loads(compared.out)["policies"][0]["finished"] == int(found[1])


def test_a_file_that_is_not_a_recording_is_reported(tmp_path: Path) -> None:
    """A missing file, an unknown run, and an output that cannot be written give one sentence; an old trace stays."""
    trace, copy = tmp_path / "out.jsonl", tmp_path / "copy.jsonl"
    trace.write_text("an old trace")
    copy.write_bytes(RECORDING.read_bytes())
    for arguments, code, message in (
        ([tmp_path / "nothing.jsonl", trace, "--force"], 2, "cannot read"),
        ([RECORDING, trace, "--force", "--run", "no such run"], 1, "no request can be derived from"),
        ([RECORDING, tmp_path / "no" / "out.jsonl"], 2, "cannot write"),
        ([RECORDING, trace], 2, "out.jsonl exists; name another file, or use --force to replace it"),
        ([copy, copy, "--force"], 2, "copy.jsonl would replace the recording; name another file for the trace"),
    ):
        with Program("sim", "convert", *arguments) as converting:
            ended = converting.end()
        assert (ended.code, ended.out) == (code, "")
        assert message in ended.err
        assert "Traceback" not in ended.err
    assert trace.read_text() == "an old trace"
    assert copy.read_bytes() == RECORDING.read_bytes()
