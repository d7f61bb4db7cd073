"""The duration of an engine's step, from a roofline model of arithmetic and memory traffic, or from your own figures.

A step computes the tokens of its prefill chunks and one token for each decoding sequence. The arithmetic of a step takes `2 x
parameters` floating point operations for each token, and `4 x layers x attention width` for each pair of a token and an earlier
token that it attends to (the usual count, as in "Scaling Laws for Neural Language Models", arXiv 2001.08361, 2.1). The memory
traffic of a step is all weights and the cached keys and values that the step reads. Arithmetic and traffic overlap, so
the slower of the two determines the duration. A constant for the work of the host is added.

Real kernels reach a share of the data sheet's figures: `COMPUTE_SHARE` and `BANDWIDTH_SHARE`. The two shares are assumptions,
not measurements. The guide to simulation says how to replace a preset by your own figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec

from kvevents.errors import ConfigError
from kvevents.settings import Positive, Range, Settings

COMPUTE_SHARE: Final = 0.5
"""Fraction of the data sheet's dense BF16 rate that prefill reaches."""
BANDWIDTH_SHARE: Final = 0.75
"""Fraction of the data sheet's memory bandwidth that decoding reaches."""
STEP_SECONDS: Final = 0.004
"""Time that the scheduler, the sampler and kernel launches add to each step."""
MEMORY_SHARE: Final = 0.9
"""Fraction of GPU memory that vLLM uses: the default of its option `--gpu-memory-utilization`."""
WORKSPACE_BYTES: Final = 3e9
"""Memory in bytes that activations and CUDA graphs take on each GPU."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """An accelerator as its data sheet describes it."""

    flops: float
    """Dense BF16 operations per second."""
    bandwidth: float
    """Bandwidth of the accelerator's memory, in bytes per second."""
    memory: float
    """Size of the accelerator's memory in bytes."""
    host_link: float
    """Bandwidth from host memory to the accelerator, in bytes per second."""


@dataclass(frozen=True, slots=True)
class Model:
    """A dense decoder with grouped-query attention in BF16, as its `config.json` describes it."""

    parameters: float
    layers: int
    heads: int
    kv_heads: int
    head_size: int

    @property
    def kv_bytes(self) -> int:
        """Size of the keys and values of one token in bytes."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


Cost: TypeAlias = Annotated[float, Range()]


class CostModel(Settings, frozen=True, kw_only=True):
    """The duration of a step, and the size of an engine's cache.

    A step takes `step + max(token x tokens + pair x pairs, weights + context x tokens attended to)`. All coefficients are in
    seconds and at least 0. Raises `ConfigError` for a negative value, and if every step would take no time.
    """

    step: Cost
    """Seconds of each step."""
    token: Cost
    """Seconds for each computed token."""
    pair: Cost = 0.0
    """Seconds for each pair of a computed token and a token that it attends to."""
    weights: Cost = 0.0
    """Seconds for reading all weights."""
    context: Cost = 0.0
    """Seconds for each cached token that is read."""
    reload: Cost = 0.0
    """Seconds for each token that is loaded from host memory."""
    cache_tokens: Positive = 262_144
    """Number of tokens that fit into the cache of all GPUs together."""
    source: str = "of your own"
    """Source of the figures in this cost model."""

    def __post_init__(self) -> None:
        Settings.__post_init__(self)
        if self.step + self.token <= 0:
            raise ConfigError("`step` and `token` are 0, so no time would pass; set one of them to a number of seconds above 0")

    def seconds(self, prefilled: int, pairs: int, decoding: int, context: int) -> float:
        """Return the duration of a step in seconds.

        The step computes `prefilled` tokens of prompts, which attend to `pairs` tokens in total, and one token for each of
        `decoding` sequences, which have `context` tokens in total.
        """
        compute = self.token * (prefilled + decoding) + self.pair * (pairs + context)
        return self.step + max(compute, self.weights + self.context * context)


def roofline(model: Model, gpu: Gpu, gpus: int, source: str) -> CostModel:
    """Return the cost model of `model` on `gpus` accelerators with tensor parallelism."""
    flops = gpus * gpu.flops * COMPUTE_SHARE
    bandwidth = gpus * gpu.bandwidth * BANDWIDTH_SHARE
    weights = 2.0 * model.parameters
    room = gpus * (gpu.memory * MEMORY_SHARE - WORKSPACE_BYTES) - weights
    return CostModel(
        step=STEP_SECONDS,
        token=2.0 * model.parameters / flops,
        pair=4.0 * model.layers * model.heads * model.head_size / flops,
        weights=weights / bandwidth,
        context=model.kv_bytes / bandwidth,
        reload=model.kv_bytes / (gpus * gpu.host_link * BANDWIDTH_SHARE),
        cache_tokens=int(room / model.kv_bytes),
        source=source,
    )


H100: Final = Gpu(989.4e12, 3.35e12, 80e9, 64e9)
"""NVIDIA H100 SXM, data sheet of 2023: dense BF16, HBM3, PCIe 5."""
A100: Final = Gpu(312e12, 2.039e12, 80e9, 32e9)
"""NVIDIA A100 80GB SXM, data sheet of 2021: dense BF16, HBM2e, PCIe 4."""

LLAMA_8B: Final = Model(8.03e9, 32, 32, 8, 128)
LLAMA_70B: Final = Model(70.6e9, 80, 64, 8, 128)
QWEN3_32B: Final = Model(32.8e9, 64, 64, 8, 128)

PRESETS: Final[dict[str, CostModel]] = {
    "qwen3-32b-2xh100": roofline(
        QWEN3_32B, H100, 2, "roofline: Qwen/Qwen3-32B over 2 NVIDIA H100 SXM, as in llm-d's benchmark"
    ),
    "llama-3.1-8b-h100": roofline(LLAMA_8B, H100, 1, "roofline: meta-llama/Llama-3.1-8B over 1 NVIDIA H100 SXM"),
    "llama-3.1-8b-a100": roofline(LLAMA_8B, A100, 1, "roofline: meta-llama/Llama-3.1-8B over 1 NVIDIA A100 80GB SXM"),
    "llama-3.1-70b-4xh100": roofline(LLAMA_70B, H100, 4, "roofline: meta-llama/Llama-3.1-70B over 4 NVIDIA H100 SXM"),
}
"""Maps the name of each preset to its cost model."""


def cost_model(name: str) -> CostModel:
    """Return the preset with this name, or the cost model in this JSON file. Raises `ConfigError`."""
    if name in PRESETS:
        return PRESETS[name]
    if not name.endswith(".json"):
        raise ConfigError(f"unknown preset {name!r}: expected {', '.join(PRESETS)}, or the name of a .json file")
    try:
        return msgspec.json.decode(Path(name).read_text(encoding="utf-8-sig"), type=CostModel)
    except OSError as error:
        raise ConfigError(f"cannot read the cost model {name}: {error.strerror}") from error
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"invalid cost model {name}: {error}") from error
