"""Writes small models with random weights, which run on any CPU, as folders for `vllm serve`."""

from __future__ import annotations

import json
import struct
from array import array
from pathlib import Path
from random import Random
from typing import Any, Final, Literal, TypeAlias

Model: TypeAlias = Literal["llama", "hybrid"]

VOCABULARY: Final = 1024
FIRST_TOKEN: Final = 3
"""The first token that is not a special token."""
SLIDING_WINDOW: Final = 64
"""Tokens of the sliding windows, which every second layer of the hybrid model has."""
ADAPTERS: Final = ("adapter-0", "adapter-1")
_HIDDEN: Final = 64
_LAYERS: Final = 2
_RANK: Final = 8

_COMMON: Final[dict[str, Any]] = {
    "hidden_size": _HIDDEN,
    "intermediate_size": 2 * _HIDDEN,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
}
_CONFIGURATIONS: Final[dict[Model, dict[str, Any]]] = {
    "llama": _COMMON
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": _LAYERS,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "mlp_bias": False,
    },
    # Its layers alternate, so vLLM makes two KV cache groups: one of sliding windows, one of full attention.
    "hybrid": _COMMON
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": SLIDING_WINDOW,
        "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "pad_token_id": 0,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
}


def write_model(folder: Path, model: Model) -> Path:
    """Write configuration and tokenizer. The weights are random: start the engine with `--load-format dummy`."""
    folder.mkdir(parents=True)
    _write_json(folder / "config.json", _CONFIGURATIONS[model])
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{number}": number for number in range(FIRST_TOKEN, VOCABULARY)}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer: dict[str, Any] = {"version": "1.0", **parts, "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    tokenizer["model"] = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    _write_json(folder / "tokenizer.json", tokenizer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    _write_json(folder / "tokenizer_config.json", settings | {"model_max_length": 2048})
    return folder


def write_adapter(folder: Path, seed: int) -> Path:
    """Write a LoRA adapter of the model `llama`, with random weights."""
    folder.mkdir(parents=True)
    draw = Random(seed)
    shapes = {"lora_A": (_RANK, _HIDDEN), "lora_B": (_HIDDEN, _RANK)}
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.{module}.{part}.weight": shape
        for layer in range(_LAYERS)
        for module in ("q_proj", "v_proj")
        for part, shape in shapes.items()
    }
    header, data = {}, array("f")
    for name, shape in tensors.items():
        start = len(data) * data.itemsize
        data.extend(draw.gauss(0, 0.02) for _ in range(shape[0] * shape[1]))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": (start, len(data) * data.itemsize)}
    # The safetensors format: length of the header, header, data.
    encoded = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + data.tobytes())
    settings = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK, "lora_dropout": 0.0, "bias": "none"}
    more = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", "base_model_name_or_path": "llama"}
    _write_json(folder / "adapter_config.json", settings | more)
    return folder


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
