"""Cost models that are fitted to measurements."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents.errors import ConfigError
from kvevents.sim.costs import CostModel, Measurement, fit, read_measurements

LENGTHS = (128, 512, 2_048, 8_192, 32_768)
BATCHES = ((1, 512), (8, 1_024), (32, 2_048), (64, 4_096))

costs = st.builds(
    lambda step, token, pair, weights, context: CostModel(step=step, token=token, pair=pair, weights=weights, context=context),
    st.floats(1e-3, 1e-2),
    st.floats(2e-5, 1e-4),
    st.floats(1e-10, 1e-9),
    st.floats(5e-3, 5e-2),
    st.floats(1e-8, 1e-7),
)


def measure(model: CostModel, noise: float = 0.0) -> list[Measurement]:
    """Return the measurements of an engine with these costs, if compute bounds prefill and memory bounds decoding."""
    prefill = [model.step + model.token * n + model.pair * n * (n + 1) / 2 for n in LENGTHS]
    decode = [model.step + model.weights + model.context * batch * n for batch, n in BATCHES]
    signs = [1 + noise * (-1) ** place for place in range(len(LENGTHS) + len(BATCHES))]
    rows = [("prefill", n, 1, seconds) for n, seconds in zip(LENGTHS, prefill, strict=True)]
    rows += [("decode", n, batch, seconds) for (batch, n), seconds in zip(BATCHES, decode, strict=True)]
    return [
        Measurement(kind, n, batch, seconds * sign)  # type: ignore[arg-type] # mypy infers str for the literals
        for (kind, n, batch, seconds), sign in zip(rows, signs, strict=True)
    ]


@given(costs)
def test_a_fit_to_the_predictions_of_a_model_gives_that_model(model: CostModel) -> None:
    """Exact measurements give all coefficients."""
    found = fit(measure(model), cache_tokens=1_000, source="a test").model
    for name in ("step", "token", "pair", "weights", "context"):
        assert getattr(found, name) == pytest.approx(getattr(model, name), rel=1e-3, abs=1e-12)
    assert (found.cache_tokens, found.source) == (1_000, "a test")


@given(costs, st.floats(0.0, 0.2))
def test_noise_never_makes_a_coefficient_negative(model: CostModel, noise: float) -> None:
    """A fit is a usable model for any measurements, and its error is in proportion to the noise."""
    found = fit(measure(model, noise), cache_tokens=1, source="")
    assert min(getattr(found.model, name) for name in ("step", "token", "pair", "weights", "context")) >= 0
    assert found.decode_error <= 2 * noise + 0.05


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("prefill", 10, 1, 1.0), ("prefill", 20, 1, 1.0), ("decode", 1, 1, 1.0), ("decode", 1, 2, 1.0)], "prefill; measure"),
        ([("prefill", n, 1, 1.0) for n in LENGTHS] + [("decode", 4, 1, 1.0), ("decode", 1, 4, 1.0)], "decode; measure"),
        ([], "too few rows of kind prefill"),
    ],
)
def test_too_few_measurements_raise(rows: list[tuple[str, int, int, float]], message: str) -> None:
    """Rows of equal sizes do not count twice."""
    with pytest.raises(ConfigError, match=message):
        fit([Measurement(*row) for row in rows], cache_tokens=1, source="")  # type: ignore[arg-type] # as above


def test_measurements_are_read_from_a_file(tmp_path: Path) -> None:
    """The error for an invalid row names the file and the line."""
    file = tmp_path / "measured.csv"
    file.write_text("kind,tokens,sequences,seconds\nprefill,8192,1,0.61\ndecode,4096,32,0.03\n")
    assert read_measurements(file) == [Measurement("prefill", 8192, 1, 0.61), Measurement("decode", 4096, 32, 0.03)]
    for row in (
        "prefill,x,1,1",
        "warmup,1,1,1",
        "prefill,1,1,0",
        "prefill,0,1,1",
        "prefill,1,1,nan",
        "prefill,1,1",
        "prefill,1,1,1,1",
    ):
        file.write_text(f"kind,tokens,sequences,seconds\nprefill,8192,1,0.61\n{row}\n")
        with pytest.raises(ConfigError, match=re.escape(f"{file}, line 3: ")):
            read_measurements(file)
    with pytest.raises(ConfigError, match="cannot read"):
        read_measurements(tmp_path / "nothing.csv")
