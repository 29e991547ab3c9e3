"""What a checkpoint's own files say about its model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from backend.core.sampling_params import InvalidRequestError, SamplingParams


class CheckpointError(ValueError):
    """The checkpoint directory cannot be served; the message names the file, key or tensor."""


@dataclass(frozen=True)
class ModelConfig:
    """The shape of one masked diffusion model and the token ids that have a meaning to it.

    Attributes:
        eos_token_ids: committing one of these ends an answer.
        logits_shift: the prediction for position p is the logits' row p - logits_shift.
        defaults: fields of `SamplingParams` of requests that do not name them.
    """

    architecture: str
    vocab_size: int
    embedding_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    mask_token_id: int
    eos_token_ids: tuple[int, ...]
    tie_embeddings: bool = False
    logits_shift: int = 0
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


# Options of the official LLaDA code that change the forward and that no published LLaDA checkpoint sets.
_LLADA_FIXED = {
    "alibi": False,
    "attention_layer_norm": False,
    "bias_for_layer_norm": False,
    "block_type": "llama",
    "activation_type": "silu",
    "include_bias": False,
    "include_qkv_bias": False,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "rope": True,
    "scale_logits": False,
}

# The same for Dream: what its code reads, at the one value that every published checkpoint has. A
# `sliding_window` without `use_sliding_window` has no effect, there as here.
_DREAM_FIXED = {
    "attention_bias": True,
    "hidden_act": "silu",
    "mlp_bias": False,
    "rope_scaling": None,
    "use_mrope": False,
    "use_sliding_window": False,
}


def load_config(directory: Path) -> ModelConfig:
    """Reads `config.json` of a Hugging Face checkpoint directory, and what other files add to it.

    `generation_config.json` and `tokenizer_config.json`, if they are there, have a say in which tokens
    end an answer, the first also in what a request gets that does not ask for something else.

    Raises:
        CheckpointError: a missing file or key, an unknown architecture, or an unsupported setting.
    """
    path = directory / "config.json"
    raw = _read(path)
    if raw is None:
        raise CheckpointError(f"{directory} is no checkpoint directory: it has no config.json")
    architecture = (raw.get("architectures") or ["(none)"])[0]
    try:
        if architecture == "LLaDAModelLM":
            config = _llada_config(raw)
        elif architecture == "DreamModel":
            config = _dream_config(raw)
        else:
            supported = "LLaDAModelLM, DreamModel"
            raise CheckpointError(f"{path}: architecture {architecture!r} is not supported; supported: {supported}")
    except KeyError as error:
        raise CheckpointError(f"{path}: key {error.args[0]!r} is missing") from None
    if not 0 <= config.mask_token_id < config.vocab_size:
        raise CheckpointError(
            f"{path}: mask_token_id={config.mask_token_id} is outside the vocabulary of {config.vocab_size}"
        )
    return _with_defaults(config, directory)


def _read(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`; None if there is no such file."""
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:  # not UTF-8 is one too
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} is not valid JSON: it has to be an object")
    return raw


def _require(raw: dict[str, Any], fixed: dict[str, object]) -> None:
    for key, supported in fixed.items():
        if raw.get(key, supported) != supported:
            raise CheckpointError(f"config.json: {key}={raw[key]!r} is not supported; only {supported!r} is")


def _require_divisible(raw: dict[str, Any], hidden: str, heads: str, kv_heads: str, num_kv_heads: int) -> None:
    if raw[hidden] % raw[heads] or raw[heads] % num_kv_heads:
        raise CheckpointError(
            f"config.json: {hidden}={raw[hidden]}, {heads}={raw[heads]}, {kv_heads}={num_kv_heads} do not divide"
        )


def _llada_config(raw: dict[str, Any]) -> ModelConfig:
    _require(raw, _LLADA_FIXED)
    heads = raw["n_heads"]
    kv_heads = raw.get("n_kv_heads") or (1 if raw.get("multi_query_attention") else heads)
    _require_divisible(raw, "d_model", "n_heads", "n_kv_heads", kv_heads)
    return ModelConfig(
        architecture="llada",
        vocab_size=raw["vocab_size"],
        embedding_size=raw.get("embedding_size") or raw["vocab_size"],
        hidden_size=raw["d_model"],
        intermediate_size=raw.get("mlp_hidden_size") or raw["mlp_ratio"] * raw["d_model"],
        num_layers=raw["n_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        max_position=raw["max_sequence_length"],
        rms_norm_eps=raw.get("rms_norm_eps", 1e-5),
        rope_theta=raw.get("rope_theta", 10000.0),
        mask_token_id=raw["mask_token_id"],
        eos_token_ids=_ids(raw["eos_token_id"]),
        tie_embeddings=raw.get("weight_tying", False),
    )


def _dream_config(raw: dict[str, Any]) -> ModelConfig:
    _require(raw, _DREAM_FIXED)
    heads = raw["num_attention_heads"]
    kv_heads = raw.get("num_key_value_heads") or heads
    _require_divisible(raw, "hidden_size", "num_attention_heads", "num_key_value_heads", kv_heads)
    return ModelConfig(
        architecture="dream",
        vocab_size=raw["vocab_size"],
        embedding_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        max_position=raw["max_position_embeddings"],
        rms_norm_eps=raw["rms_norm_eps"],
        rope_theta=raw["rope_theta"],
        mask_token_id=raw["mask_token_id"],
        eos_token_ids=_ids(raw["eos_token_id"]),
        tie_embeddings=raw.get("tie_word_embeddings", False),
        logits_shift=1,
    )


def _with_defaults(config: ModelConfig, directory: Path) -> ModelConfig:
    """`config` with what the files beside `config.json` say of a request's defaults."""
    generation = _read(directory / "generation_config.json") or {}
    tokenizer = _read(directory / "tokenizer_config.json") or {}
    # What followed an answer in training was padding, so nothing follows it here. DiffuCoder's is a
    # token of its own, which only its tokenizer names.
    added = (tokenizer.get("added_tokens_decoder") or {}).items()
    padding = [int(i) for i, token in added if token["content"] == tokenizer.get("pad_token")]
    named = _ids(generation.get("eos_token_id"))
    if wrong := [i for i in named if not isinstance(i, int) or not 0 <= i < config.vocab_size]:
        raise CheckpointError(
            f"{directory / 'generation_config.json'}: eos_token_id={wrong[0]!r} is not in the vocabulary of "
            f"{config.vocab_size}"
        )
    ends = (*config.eos_token_ids, *named, *padding)
    return replace(
        config,
        eos_token_ids=tuple(i for i in dict.fromkeys(ends) if i != config.mask_token_id),
        defaults=_request_defaults(generation, directory / "generation_config.json"),
    )


_DRAW = ("temperature", "top_p", "top_k", "min_p")
_DEFAULTS = (
    *_DRAW, "block_length", "canvas_length", "unmasking", "confidence_threshold", "factor", "steps_per_block",
    "quota_schedule", "remask_below", "cache_policy", "cache_refresh_interval", "cache_window",
)  # fmt: skip
# Dream's names for rules of unmasking. Its `origin` unmasks by chance, and is in its files only because
# nobody chose anything: its own examples all ask for another.
_DREAM_RULES = {
    "entropy": {"unmasking": "entropy", "quota_schedule": "timesteps"},
    "topk_margin": {"unmasking": "margin", "quota_schedule": "timesteps"},
    "maskgit_plus": {"unmasking": "maskgit_plus", "quota_schedule": "timesteps"},
    "confidence_threshold": {"unmasking": "threshold"},
}


def _request_defaults(generation: dict[str, Any], path: Path) -> dict[str, Any]:
    """What `generation_config.json` says, by Hugging Face's names, Dream's `alg` and our own."""
    defaults: dict[str, Any] = dict(_DREAM_RULES.get(str(generation.get("alg")), {}))
    defaults |= {
        key: generation[key]
        for key in _DEFAULTS
        if generation.get(key) is not None and generation[key] != getattr(SamplingParams, key, None)
    }
    if generation.get("do_sample") is False:
        defaults = {key: value for key, value in defaults.items() if key not in _DRAW}
    try:
        block_length = defaults.get("block_length", SamplingParams.block_length)
        trial = {"canvas_length": block_length, "steps_per_block": block_length, **defaults}
        SamplingParams(max_tokens=1, **trial)
    except InvalidRequestError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return defaults


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)
