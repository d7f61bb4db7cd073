"""`kvevents.sim.settings`: invalid settings are refused by name before anything runs."""

from __future__ import annotations

import pytest

from kvevents.errors import ConfigError, UnknownDialectError
from kvevents.sim.cache import CacheSize
from kvevents.sim.costs import PRESETS
from kvevents.sim.settings import DEFAULT_PRESET, MAX_WORKERS, FleetSettings
from kvevents.sim.simulated_engine import StepLimits
from sim_cases import request


def test_the_defaults_are_valid() -> None:
    settings = FleetSettings()
    assert settings.costs is PRESETS[DEFAULT_PRESET]
    assert settings.size == CacheSize(17_261, 16)
    assert settings.step_limits == StepLimits()
    assert settings.wire.engine == "vllm"
    assert len(settings.workers) == 8


def test_each_rank_is_a_worker() -> None:
    assert FleetSettings(engines=2, ranks=2).workers == [("engine-0", 0), ("engine-0", 1), ("engine-1", 0), ("engine-1", 1)]


def test_blocks_are_given_or_follow_from_the_memory_of_the_preset() -> None:
    assert FleetSettings(blocks=7, block_size=4, host_blocks=3).size == CacheSize(7, 4, 3)
    assert FleetSettings(blocks=7, block_size=4, window=8).size == CacheSize(7, 4, 0, 8)
    assert PRESETS[DEFAULT_PRESET].cache_tokens == 276_184
    assert FleetSettings(block_size=64).size.blocks == 4_315  # 276,160 tokens: the last 24 do not fill a block


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engines": 0}, "engines is 0"),
        ({"ranks": 0}, "ranks is 0"),
        ({"engines": MAX_WORKERS, "ranks": 2}, f"{MAX_WORKERS} engines with 2 ranks"),
        ({"event_delay": -0.1}, "event_delay is -0.1"),
        ({"event_delay": float("nan")}, "event_delay is nan"),
        ({"event_delay": float("inf")}, "event_delay is inf"),
        ({"overlay": -1.0}, "overlay is -1"),
        ({"overlay": float("nan")}, "overlay is nan"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 0, "blocks": 4}, "block_size is 0"),
        ({"block_size": 1 << 30}, f"block_size {1 << 30}"),
        ({"blocks": 0}, "^blocks .* 0"),
        ({"blocks": -1}, "^blocks .* -1"),
        ({"host_blocks": -1}, "host_blocks is -1"),
        ({"window": 1}, "window is 1"),
        ({"window": 64, "host_blocks": 1}, "window and host memory"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_num_batched_tokens": 255}, "max_num_batched_tokens is 255; it must be at least max_num_seqs, which is 256"),
        ({"preset": "gpt"}, "unknown preset 'gpt'"),
        ({"preset": "gpt", "blocks": 5}, "unknown preset 'gpt'"),
        ({"preset": "/none.json"}, "cannot read the cost model /none.json"),
        ({"dialect": "vllm-0.20", "window": 64}, "vllm-0.20.0 has no field for groups"),
        ({"dialect": "sglang-0.5.22", "window": 64}, "sglang-0.5.22 has no field for groups"),
        ({"dialect": "vllm-0.9.1", "host_blocks": 1}, "vllm-0.9.1 has no field for tiers"),
    ],
)
def test_an_error_names_the_invalid_field(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FleetSettings(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "gpt", "vllm-latest-and-greatest"])
def test_an_unknown_dialect_raises(name: str) -> None:
    with pytest.raises((UnknownDialectError, ConfigError)):
        FleetSettings(dialect=name)


@pytest.mark.parametrize(
    ("dialect", "salts", "loras"),
    [
        ("vllm-0.9.1", False, False),
        ("vllm-0.10.2", False, False),
        ("vllm-0.14", False, True),
        ("vllm-0.17", True, True),
        ("vllm-latest", True, True),
        ("sglang-0.5.9", False, False),
        ("sglang-0.5.20", True, False),
        ("sglang-0.5.22", True, True),
    ],
)
def test_a_request_that_the_dialect_cannot_announce_is_refused(dialect: str, salts: bool, loras: bool) -> None:
    """Only dialects with fields for salts and for LoRA names accept them."""
    settings = FleetSettings(dialect=dialect)
    settings.check(request([1]))
    for allowed, within, message in ((salts, {"salt": "tenant"}, "salts"), (loras, {"lora": "adapter"}, "LoRA names")):
        if allowed:
            settings.check(request([1], 1, 0.0, **within))
        else:
            with pytest.raises(ConfigError, match=f"{settings.wire} has no field for {message}"):
                settings.check(request([1], 1, 0.0, **within))


@pytest.mark.parametrize(("dialect", "has_field"), [("vllm-0.9.1", False), ("vllm-latest", False), ("sglang-0.5.22", True)])
def test_salts_have_a_separate_field_if_the_dialect_has_one(dialect: str, has_field: bool) -> None:
    assert FleetSettings(dialect=dialect).event_style.has_salt_field == has_field
