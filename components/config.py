"""One YAML file per graph: a `common:` section and one section per component, every key also a flag.

The sections' keys are the fields below. `common:` keys are merged under each component that knows
them; a component's own section wins over `common:`, a flag wins over both.
"""

from __future__ import annotations

import argparse
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from components.yaml_file import read_yaml

DEMO_MODELS = {
    "demo": Path(__file__).resolve().parent / "demo_model",  # LLaDA
    "demo-dream": Path(__file__).resolve().parent / "demo_model_dream",
}


class ConfigError(ValueError):
    """A key or value that cannot be used; the message names it and what would be right."""


def model_directory(model: str | Path) -> Path:
    """`model` as a path, or where the demonstration model of that name is. A directory so called comes first."""
    path = Path(model)
    return path if path.is_dir() else DEMO_MODELS.get(str(model), path)


class CommonConfig(BaseModel):
    """What every process of a graph has to agree on."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: Annotated[Path, AfterValidator(model_directory)] = Field(
        DEMO_MODELS["demo"],
        description="checkpoint directory (config.json, safetensors, tokenizer), or `demo` or `demo-dream`",
    )
    served_model_name: str = Field("", description="name in the APIs; the directory's name if empty")
    namespace: str = Field("sangam", pattern=r"^[a-z][a-z0-9_]*$", description="Dynamo namespace")
    nats: str = Field("", description="URL of a NATS server; `sangam serve` starts a private one if empty")
    request_plane: Literal["nats", "tcp"] = Field("nats", description="how requests reach workers")
    discovery: Literal["file", "etcd", "kubernetes"] = Field("file", description="how processes find each other")
    discovery_dir: str = Field("", description="directory of file discovery; private to this graph if empty")
    etcd: str = Field("", description="etcd endpoints, with discovery: etcd")

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model.resolve().name


class FrontendConfig(CommonConfig):
    """Dynamo's own frontend: OpenAI over HTTP and, if a port is given, KServe over gRPC."""

    http_host: str = Field("127.0.0.1", description="address the OpenAI API listens on")
    http_port: int = Field(8000, ge=1, le=65535, description="port of the OpenAI API")
    grpc_port: int | None = Field(None, ge=1, le=65535, description="port of the KServe gRPC API; off if absent")


class _ContextConfig(CommonConfig):
    context_length: int | None = Field(None, ge=1, description="cap on prompt + canvas; the model's own if absent")


class RouterConfig(_ContextConfig):
    """The router: validates requests, places every block, streams the answer."""

    max_queued_tokens: int = Field(262_144, ge=1, description="prompt + canvas tokens in flight before 429")
    max_attempts: int = Field(5, ge=1, description="workers one block may be lost with before the request fails")
    worker_timeout_s: float = Field(10.0, gt=0, description="silence after which a worker counts as lost")
    placement_timeout_s: float = Field(120.0, gt=0, description="how long a block waits while no worker is there")
    routing: Literal["hybrid", "conditional"] = Field(
        "hybrid", description="Algorithm 2, or Dynamo's conditional disaggregation (a baseline)"
    )
    overflow_threshold: Annotated[float, Field(gt=0)] | Literal["auto"] = Field(
        8192.0,
        description="theta of Algorithm 2 in tokens; inf: prefills never overflow (disaggregated); "
        "auto: by what an overflow costs",
    )
    max_local_prefill_length: int = Field(
        512, ge=0, description="conditional: prompts up to this many tokens are prefilled where they are denoised"
    )
    max_prefill_queue_size: int = Field(
        16, ge=1, description="conditional: no more remote prefills while this many wait in the prefill pool"
    )
    default_canvas_length: int = Field(128, ge=1, description="canvas when a request names no length")
    steps_file: Path | None = Field(
        None, description="CSV file that every answer's forwards per block are added to (request,num_steps)"
    )


class WorkerConfig(_ContextConfig):
    """What both kinds of workers have: their model, their KV pool, their device."""

    num_workers: int = Field(1, ge=1, description="how many such processes `sangam serve` starts")
    page_size: int = Field(16, ge=1, description="tokens per KV page; the same for all workers of a graph")
    kv_cache_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        "auto", description="capacity of the KV pool in tokens; auto: 65536 on a CPU, on a GPU what its memory holds"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, lt=1, description="share of the GPU's memory that weights, activations and an auto KV pool take"
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="weights, activations and KV; auto: bfloat16 on a GPU, float32 on a CPU"
    )
    device: str = Field(
        "auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$", description="cpu, cuda or cuda:N; auto: a GPU if there is one"
    )
    attention_backend: Literal["auto", "flashinfer", "sdpa"] = Field(
        "auto", description="flashinfer needs an NVIDIA GPU and float16 or bfloat16; sdpa is torch's, for any device"
    )
    enforce_eager: bool = Field(False, description="no CUDA graphs: a shorter start, slower steps")
    num_threads: int = Field(1, ge=1, description="CPU threads of the forward")
    load_report_interval_s: float = Field(0.2, gt=0, description="how often load is published over NATS")


class ColocatedWorkerConfig(WorkerConfig):
    """A colocated worker: prefills and denoises under the token budget; reads KV that prefill workers made."""

    token_budget: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        2048, description="tau of Algorithm 1, tokens per step; auto: prefills are admitted by what steps cost"
    )
    max_num_seqs: int = Field(64, ge=1, description="requests denoised together")
    async_scheduling: bool | None = Field(
        None, description="launch the next step before the results of the one before are known; if absent, on a GPU"
    )
    kv_transfer_timeout_s: float = Field(10.0, gt=0, description="deadline of one KV transfer; then prefilled anew")


class PrefillWorkerConfig(WorkerConfig):
    """A prefill worker: prefills only, and keeps the KV until a colocated worker has read it."""

    max_prefill_tokens: int = Field(4096, ge=1, description="tokens of one step; a larger prefill runs alone")
    kv_transfer_overlap: bool = Field(False, description="let KV be read layer by layer while the prefill runs")
    kv_lease_s: float = Field(60.0, gt=0, description="how long KV is kept for a reader who does not come")


SECTIONS: dict[str, type[CommonConfig]] = {
    "frontend": FrontendConfig,
    "router": RouterConfig,
    "prefill_worker": PrefillWorkerConfig,
    "colocated_worker": ColocatedWorkerConfig,
}

ConfigT = TypeVar("ConfigT", bound=CommonConfig)


def load(section: str, path: Path | None, flags: Mapping[str, Any] | None = None) -> CommonConfig:
    """The validated configuration of one component of `SECTIONS`.

    Args:
        path: the graph's YAML file; defaults alone if None.
        flags: values that win over the file; None values are ignored.

    Raises:
        ConfigError: unreadable file, unknown section or key (naming the nearest known), bad value.
    """
    document = _read(path) if path else {}
    schema = SECTIONS[section]
    common = document.get("common", {})
    merged = {k: v for k, v in common.items() if k in schema.model_fields}
    merged |= document.get(section, {})
    merged |= {k: v for k, v in (flags or {}).items() if v is not None}
    try:
        return schema.model_validate(merged)
    except ValidationError as error:
        said: dict[str, str] = {}  # a number or a word fails as both: each field is named once
        values: dict[str, Any] = {}
        for problem in error.errors():
            field, message = f"{section}.{problem['loc'][0]}", problem["msg"]
            said[field] = f"{said[field]}, or {message[0].lower()}{message[1:]}" if field in said else message
            values[field] = problem["input"]
        raise ConfigError("; ".join(f"{field}: {said[field]} (got {values[field]!r})" for field in said)) from None


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        document = read_yaml(path) or {}
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected sections (common, {', '.join(SECTIONS)}), got {document!r}")
    everything = {key for schema in SECTIONS.values() for key in schema.model_fields}
    for section, values in document.items():
        _known(str(section), ("common", *SECTIONS), f"{path}: unknown section")
        if not isinstance(values, dict | None):
            raise ConfigError(f"{path}: section {section} must hold `key: value` lines, got {values!r}")
        keys = everything if section == "common" else SECTIONS[section].model_fields
        for key in values or {}:
            _known(str(key), sorted(keys), f"{path}: unknown key in {section}")
    return {section: values or {} for section, values in document.items()}


def _known(name: str, known: Sequence[str], problem: str) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, 1, 0.0)
        raise ConfigError(f"{problem}: {name!r}; did you mean {near[0]!r}?")


def add_flags(parser: argparse.ArgumentParser, schema: type[CommonConfig]) -> None:
    """Adds `-f/--config` and one flag per field of `schema`; absent flags parse to None."""
    parser.add_argument("-f", "--config", type=Path, metavar="FILE", help="the graph's YAML file")
    for name in schema.model_fields:
        add_flag(parser, schema, name)


def add_flag(parser: argparse._ActionsContainer, schema: type[CommonConfig], name: str) -> None:
    """Adds the flag of one field of `schema`."""
    field = schema.model_fields[name]
    default = "" if field.default in ("", None) else f" (default: {field.default})"
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        help=f"{field.description}{default}",
        **{"metavar": name.upper(), **_kind(field)},
    )


def _kind(field: FieldInfo) -> dict[str, Any]:
    annotation = field.annotation
    if typing.get_origin(annotation) is Literal:
        return {"choices": typing.get_args(annotation), "metavar": None}
    if Literal["auto"] in typing.get_args(annotation):
        return {"type": _number_or_auto}
    if isinstance(annotation, types.UnionType):
        annotation = typing.get_args(annotation)[0]
    if annotation is bool:
        return {"choices": ("true", "false"), "metavar": None}
    return {"type": annotation}


def _number_or_auto(text: str) -> float | str:
    try:
        return text if text == "auto" else int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor auto") from None


def from_command_line(section: str, schema: type[ConfigT], argv: Sequence[str] | None = None) -> ConfigT:
    """The configuration of a component started as `python -m components.<section>`.

    A mistake ends the process with status 2 and one line on stderr.
    """
    parser = argparse.ArgumentParser(prog=f"python -m components.{section}", description=schema.__doc__)
    add_flags(parser, schema)
    flags = vars(parser.parse_args(argv))
    try:
        config = load(section, flags.pop("config"), flags)
    except ConfigError as error:
        parser.error(str(error))
    assert isinstance(config, schema)
    return config
