"""`kvevents.sim.costs`: more work never takes less time, and presets are realistic engines."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import ConfigError
from kvevents.sim.costs import A100, H100, LLAMA_8B, PRESETS, CostModel, Gpu, Model, cost_model, roofline

COEFFICIENTS = st.floats(0, 1, allow_subnormal=False)
MODELS = st.one_of(
    st.sampled_from(list(PRESETS.values())),
    st.builds(
        CostModel,
        step=st.floats(0.001, 1),
        token=COEFFICIENTS,
        pair=COEFFICIENTS,
        weights=COEFFICIENTS,
        context=COEFFICIENTS,
        reload=COEFFICIENTS,
        cache_tokens=st.integers(1, 10**9),
        source=st.just("drawn"),
    ),
)
WORK = st.tuples(*[st.integers(0, 10**6)] * 4)


@given(MODELS, WORK, WORK)
def test_more_work_never_takes_less_time(
    costs: CostModel, work: tuple[int, int, int, int], more: tuple[int, int, int, int]
) -> None:
    """This holds for prefilled tokens, pairs, decoding sequences, and their context."""
    least = costs.seconds(*work)
    assert least >= costs.step > 0
    for place, extra in enumerate(more):
        greater = [value + extra * (place == other) for other, value in enumerate(work)]
        assert costs.seconds(*greater) >= least


def test_a_step_is_as_long_as_the_slower_of_arithmetic_and_memory() -> None:
    costs = CostModel(step=1.0, token=0.1, pair=0.01, weights=2.0, context=0.001)
    assert costs.seconds(0, 0, 0, 0) == 3.0
    assert costs.seconds(0, 0, 4, 1000) == pytest.approx(1.0 + 0.4 + 10.0)
    assert costs.seconds(0, 0, 4, 100) == pytest.approx(1.0 + 2.1)
    assert costs.seconds(100, 500, 0, 0) == pytest.approx(1.0 + 15.0)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_realistic_engines(name: str) -> None:
    """An engine decodes tens of tokens a second for one answer, prefills thousands, and has room for some long prompts."""
    costs = cost_model(name)
    assert costs is PRESETS[name]
    assert costs.source.startswith("roofline: ")
    assert 50_000 < costs.cache_tokens < 5_000_000
    assert 10 < 1 / costs.seconds(0, 0, 1, 1_000) < 300
    assert 1_000 < 8192 / costs.seconds(8192, 8192 * 4096, 0, 0) < 100_000
    assert 0 < costs.reload < costs.token, "loading a block is quicker than computing it"


def test_presets_are_ordered_as_their_hardware_and_models_are() -> None:
    work = 4096, 4096 * 2048, 0, 0
    h100, a100, large = (PRESETS[f"llama-3.1-{rest}"].seconds(*work) for rest in ("8b-h100", "8b-a100", "70b-4xh100"))
    assert h100 < a100
    assert h100 < large
    assert roofline(LLAMA_8B, H100, 2, "two").cache_tokens > 2 * roofline(LLAMA_8B, H100, 1, "one").cache_tokens
    assert H100.flops > A100.flops


def test_a_roofline_follows_from_its_figures() -> None:
    costs = roofline(Model(1e9, 10, 8, 2, 64), Gpu(1e15, 1e12, 10e9, 1e10), 2, "example")
    assert costs.token == pytest.approx(2e9 / 1e15)
    assert costs.weights == pytest.approx(2e9 / 1.5e12)
    assert costs.pair == pytest.approx(4 * 10 * 8 * 64 / 1e15)
    assert costs.context == pytest.approx(2 * 2 * 10 * 2 * 64 / 1.5e12)
    assert costs.cache_tokens == int((2 * (9e9 - 3e9) - 2e9) / 5120)


def test_a_model_that_does_not_fit_in_memory_is_refused() -> None:
    with pytest.raises(ConfigError, match="cache_tokens"):
        roofline(Model(70.6e9, 80, 64, 8, 128), H100, 1, "too large")


@given(costs=MODELS)
def test_a_cost_model_survives_encoding_as_json(costs: CostModel) -> None:
    assert msgspec.json.decode(msgspec.json.encode(costs), type=CostModel) == costs


def test_a_cost_model_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"step": 0.01, "token": 0.0001, "cache_tokens": 5000}', encoding="utf-8-sig")
    assert cost_model(str(file)) == CostModel(step=0.01, token=0.0001, cache_tokens=5000)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "truncated"),
        ('{"step": 1}', "token"),
        ('{"step": "a", "token": 1}', "step"),
        ('{"step": 1, "token": 1, "tokens": 2}', "tokens"),
        ('{"step": -1, "token": 1}', "step is -1"),
        ('{"step": 0, "token": 0}', "no time would pass"),
        ('{"step": 1, "token": 1, "cache_tokens": 0}', "cache_tokens is 0"),
    ],
)
def test_the_error_for_an_invalid_file_names_the_file_and_the_field(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "mine.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        cost_model(str(file))
    assert "mine.json" in str(caught.value)


def test_a_missing_preset_or_file_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'gpt': expected qwen3-32b-2xh100, .* or the name of a \.json file"):
        cost_model("gpt")
    with pytest.raises(ConfigError, match=r"cannot read the cost model .*none\.json: No such file"):
        cost_model(str(tmp_path / "none.json"))


@pytest.mark.parametrize("name", ["step", "token", "pair", "weights", "context", "reload"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_coefficient_must_be_a_finite_number_of_seconds(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"^{name} is "):
        CostModel(**{"step": 1.0, "token": 1.0, name: value})  # type: ignore[arg-type]
