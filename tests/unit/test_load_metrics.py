"""The load of vLLM and SGLang is read from the responses of their HTTP servers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import ConfigError
from kvevents.routing.load_readings import LoadError, LoadSettings, ReportedLoad, check_load_url
from kvevents.service.discovery.provider import RankEndpoint, Template, parse_table
from kvevents.service.settings import DnsTable
from kvevents.settings import convert
from kvevents.wire.load import EngineLoad

VLLM = (Path(__file__).parents[1] / "data" / "vllm_metrics.txt").read_bytes()
"""A part of the metrics that vLLM 0.32's own logger reports for two ranks."""
SGLANG = b"""# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",engine_type="unified",model_name="m",tp_rank="0"} 4.0
sglang:num_running_reqs{dp_rank="1",engine_type="unified",model_name="m",tp_rank="0"} 6.0
sglang:num_queue_reqs{dp_rank="0",model_name="m"} 1.0
sglang:num_queue_reqs{dp_rank="1",model_name="m"} 2.0
sglang:num_used_tokens{dp_rank="1",model_name="m"} 300.0
sglang:max_total_num_tokens{dp_rank="1",model_name="m"} 1000.0
"""


def test_each_rank_of_vllm_has_its_own_load() -> None:
    report = ReportedLoad.read(VLLM)
    assert report.of_rank(0) == EngineLoad(running=3, waiting=2, used_tokens=2_048, max_tokens=8_192, rank=0)
    assert report.of_rank(1) == EngineLoad(running=1, waiting=0, used_tokens=4_096, max_tokens=8_192, rank=1)
    assert report.of_rank(0).waiting_uncached_tokens is None, "vLLM does not report them"
    with pytest.raises(LoadError, match=r"has no vllm:num_requests_running of rank 2"):
        report.of_rank(2)


def test_the_only_rank_of_a_server_is_read_whatever_its_number() -> None:
    """Behind an external load balancer each server has one rank, and older releases have no rank label."""
    for labels in (b'{engine="7"}', b'{model_name="m"}', b""):
        text = b"vllm:num_requests_running%b 5\nvllm:num_requests_waiting%b 1\n" % (labels, labels)
        assert ReportedLoad.read(text).of_rank(3) == EngineLoad(5, 1, 0, 0, rank=3)


def test_the_older_name_of_the_usage_is_read() -> None:
    older = VLLM.replace(b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc")
    assert ReportedLoad.read(older).of_rank(0).used_tokens == 2_048


def test_sglang_reports_tokens() -> None:
    report = ReportedLoad.read(SGLANG)
    assert report.of_rank(1) == EngineLoad(6, 2, 300, 1_000, rank=1)
    assert report.of_rank(0) == EngineLoad(4, 1, 0, 0, rank=0)


def test_a_server_load_response_has_only_the_number_of_running_requests() -> None:
    assert ReportedLoad.read(b'{"server_load": 7}').of_rank(0) == EngineLoad(7, 0, 0, 0)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"process_cpu_seconds_total 3\n",
        b"vllm:num_requests_running 1\n",
        b"vllm:num_requests_waiting 1\n",
        b"vllm:num_requests_running NaN\nvllm:num_requests_waiting 0\n",
        b"vllm:num_requests_running +Inf\nvllm:num_requests_waiting 0\n",
        b"vllm:num_requests_running -1\nvllm:num_requests_waiting 0\n",
        b"vllm:num_requests_running 1e300\nvllm:num_requests_waiting 0\n",
        b"vllm:num_requests_running{ 1\nvllm:num_requests_waiting 0\n",
        b"vllm:num_requests_running one\nvllm:num_requests_waiting 0\n",
        b'vllm:num_requests_running{engine="\xff"} 1\n',
        b'{"server_load": -1}',
        b'{"server_load": null}',
        b'{"load": 1}',
        b"{",
        b"vllm:num_requests_running 1\n" * 5_000,
    ],
)
def test_an_invalid_response_raises_an_error_that_says_what_is_wrong(body: bytes) -> None:
    with pytest.raises(LoadError, match=r"^(has|is) ."):
        ReportedLoad.read(body).of_rank(0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([b"vllm:num_requests_running", b"vllm:num_requests_waiting", b"sglang:token_usage", b"x"]),
            st.sampled_from(
                [b" 1", b"{", b'{engine="0"} 2', b'{a="', b"} 1", b'{a="\\', b" 1 2 3 4", b"\t", b'{="1"} 1', b" # {"]
            )
            | st.binary(max_size=12),
        )
    ).map(lambda lines: b"\n".join(name + rest for name, rest in lines))
    | st.binary(max_size=60)
)
def test_any_response_is_read_or_raises_a_load_error(body: bytes) -> None:
    try:
        reported = ReportedLoad.read(body).of_rank(0)
    except LoadError:
        return
    assert min(reported.running, reported.waiting, reported.used_tokens, reported.max_tokens) >= 0


def test_a_url_without_a_path_is_completed_with_the_metrics_path() -> None:
    assert check_load_url("http://h:8000") == check_load_url("http://h:8000/") == "http://h:8000/metrics"
    assert check_load_url("https://h/load") == "https://h/load"
    assert check_load_url("http://[::1]:8000") == "http://[::1]:8000/metrics"


@pytest.mark.parametrize(
    "load", ["http://", "http://h:0", "http://h:x", "http://u:p@h:1", "http://h:1/#x", "http://h 1", "ftp://h:1"]
)
def test_an_invalid_url_raises_a_readable_error(load: str) -> None:
    with pytest.raises(ConfigError, match=f"invalid load {re.escape(repr(load))}"):
        check_load_url(load)
    expected = "expected the URL of an HTTP server, tcp://HOST:PORT or ipc://PATH" if load.startswith("ftp") else "load"
    with pytest.raises(ConfigError, match=expected):
        parse_table(1, {"endpoint": "tcp://e:1", "model": "m", "load": load})
    with pytest.raises(ConfigError, match="load"):
        convert({"target": "http://engines:8000", "load": load}, DnsTable, "dns")


@pytest.mark.parametrize(
    ("load", "reported", "expected"),
    [
        (None, None, None),
        (None, "http://h:8000/metrics", "http://h:8000/metrics"),
        ("none", "http://h:8000/metrics", None),
        ("tcp://10.0.0.9:5559", None, "tcp://10.0.0.9:5560"),
        ("tcp://*:5559", None, "tcp://10.0.0.7:5560"),
        ("http://*:8000", None, "http://10.0.0.7:8000"),
        ("http://*:8000/load", "tcp://h:1", "http://10.0.0.7:8000/load"),
        ("http://10.0.0.9:8000", None, "http://10.0.0.9:8000"),
    ],
)
def test_a_template_gives_the_load_address_of_each_rank(load: str | None, reported: str | None, expected: str | None) -> None:
    """Ranks publish at consecutive ports and share one HTTP server. A wildcard is replaced by the engine's own host."""
    template = Template(model="m", load=load)
    assert template.registration("e", "m", RankEndpoint(1, "tcp://10.0.0.7:5558", load=reported)).load == expected


def test_the_interval_grows_with_the_number_of_servers() -> None:
    """Polling takes a bounded share of a CPU, unless the loads would become too old."""
    settings = LoadSettings(poll_seconds=1.0, max_age_seconds=5.0, polls_per_second=100)
    assert [settings.interval(servers) for servers in (1, 100, 250, 10_000)] == [1.0, 1.0, 2.5, 4.0]
    assert LoadSettings(poll_seconds=4.5, max_age_seconds=5.0).interval(1) == 4.5


def test_line_ends_and_the_length_of_a_line_do_not_matter() -> None:
    for text in (VLLM, VLLM.rstrip(b"\n"), VLLM.replace(b"\n", b"\r\n")):
        assert ReportedLoad.read(text).of_rank(1).max_tokens == 8_192
    long = b'vllm:cache_config_info{a="%b",num_gpu_blocks="1",block_size="1"} 1\n' % (b"x" * (1 << 20))
    body = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n" + long
    assert ReportedLoad.read(body).of_rank(0).max_tokens == 1
