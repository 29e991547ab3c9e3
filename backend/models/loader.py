"""Reads a Hugging Face checkpoint directory into a model, tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.overrides import TorchFunctionMode

from backend.models import dream, llada
from backend.models.config import CheckpointError, ModelConfig, load_config
from backend.models.layers import Transformer

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def load_model(directory: Path, dtype: torch.dtype, device: torch.device) -> Transformer:
    """The model of `directory` with its weights in `dtype` on `device`, ready for inference.

    One file or sharded. Each tensor goes from the file's mapping in memory to the device, converted there
    and put into its rows of the model: nothing but the model and one tensor is held, and nothing of it by the host.

    Raises:
        CheckpointError: names the first missing, unexpected or misshapen tensor, or the broken file.
    """
    model = empty_model(load_config(directory), dtype, device)
    targets = checkpoint_tensors(model)
    files = _files(directory)
    found = {name for names in files.values() for name in names}
    if missing := sorted(targets.keys() - found):
        raise CheckpointError(f"{directory}: tensor {missing[0]!r} is missing ({len(missing)} missing in all)")
    if extra := sorted(found - targets.keys()):
        raise CheckpointError(f"{directory}: tensor {extra[0]!r} is not part of the model ({len(extra)} in all)")
    for path, names in files.items():
        with safe_open(path, framework="pt", device=str(device)) as shard:
            for name in names:
                _copy(shard.get_tensor(name), targets[name], name, path)
    return model


def new_model(config: ModelConfig) -> Transformer:
    """The model that `config` describes, its weights not yet any checkpoint's."""
    return dream.Dream(config) if config.architecture == "dream" else llada.Llada(config)


def empty_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Transformer:
    """As `new_model`, for inference in `dtype` on `device`: nobody has written to its matrices."""
    with device, _ForInference(dtype):
        return new_model(config).eval().requires_grad_(False)


class _ForInference(TorchFunctionMode):
    """Allocates parameters in `dtype` and leaves them as they were allocated.

    The default dtype is that of all threads: another one may be loading a model, or running one.
    Modules on the meta device would stay as they are, too, but there initialising them imports torch's
    compiler: 2 s.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        if func in (torch.empty, torch.ones):
            kwargs = {**kwargs, "dtype": kwargs.get("dtype") or self._dtype}
        return func(*args, **kwargs)


def checkpoint_tensors(model: Transformer) -> dict[str, torch.Tensor]:
    """Checkpoint tensor name -> the rows of our parameter that it fills: views, not copies."""
    parameters = dict(model.named_parameters())
    config = model.config
    kv_rows = config.num_kv_heads * config.head_dim
    targets: dict[str, torch.Tensor] = {}
    names = dream.official_names(config) if config.architecture == "dream" else llada.official_names(config)
    for ours, theirs in names.items():
        parameter = parameters[ours]
        if len(theirs) == 3:
            parts = parameter.split([config.hidden_size, kv_rows, kv_rows])
        else:
            parts = parameter.chunk(len(theirs))
        targets |= dict(zip(theirs, parts, strict=True))
    return targets


def _files(directory: Path) -> dict[Path, list[str]]:
    """The safetensors files of `directory` and the tensors that lie in each."""
    index = directory / _INDEX
    try:
        shards = [directory / _SINGLE]
        if index.exists():
            shards = sorted({directory / shard for shard in json.loads(index.read_bytes())["weight_map"].values()})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is broken: {error!r}") from None
    files = {}
    try:
        for shard in shards:
            with safe_open(shard, framework="pt") as handle:
                files[shard] = list(handle.keys())
    except FileNotFoundError as error:
        raise CheckpointError(f"{directory}: weights are missing ({_SINGLE} or {_INDEX}): {error}") from None
    except OSError as error:
        raise CheckpointError(f"{directory}: weights cannot be read: {error}") from None
    except SafetensorError as error:
        raise CheckpointError(f"{directory}: a safetensors file is broken: {error}") from None
    return files


def _copy(source: torch.Tensor, target: torch.Tensor, name: str, path: Path) -> None:
    if source.shape != target.shape:
        raise CheckpointError(
            f"{path}: tensor {name!r} has shape {list(source.shape)}, the model expects {list(target.shape)}"
        )
    if not source.is_floating_point():
        raise CheckpointError(f"{path}: tensor {name!r} has dtype {source.dtype}; only floating point is supported")
    target.copy_(source)
