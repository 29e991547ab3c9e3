"""The same checkpoint in this process: one request at a time through the engine, no serving around it."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from backend.core.logprobs import TokenLogprobs
from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import SamplingParams
from backend.engine.engine import Engine, EngineConfig
from components.config import DEMO_MODELS
from components.text import TextStream

MODEL = DEMO_MODELS["demo"]
END, BLOCK = 1, 32
FINISH_REASONS = {RequestStatus.FINISHED_STOP: "stop", RequestStatus.FINISHED_LENGTH: "length"}


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: list[int]
    finish_reason: str
    num_prompt_tokens: int
    num_steps: int
    logprobs: tuple[TokenLogprobs, ...] = ()


class Reference:
    """Serial runs through `Engine`; equal questions are answered from memory."""

    def __init__(self, model: Path) -> None:
        self._engine = Engine.from_config(EngineConfig(model, kv_cache_tokens=4096))
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._answers: dict[tuple[Any, ...], Answer] = {}

    def chat(self, prompt: str, max_tokens: int = 128, *, ignore_eos: bool = False, **params: Any) -> Answer:
        """The answer to one user message."""
        return self.complete(f"<|user|>{prompt}<|assistant|>", max_tokens, ignore_eos=ignore_eos, **params)

    def complete(self, prompt: str, max_tokens: int = 128, *, ignore_eos: bool = False, **params: Any) -> Answer:
        """What follows `prompt`; `params` are fields of `SamplingParams`."""
        key = (prompt, max_tokens, ignore_eos, *sorted(params.items()))
        if key not in self._answers:
            self._answers[key] = self._run(prompt, max_tokens, ignore_eos, params)
        return self._answers[key]

    def _run(self, prompt: str, max_tokens: int, ignore_eos: bool, params: dict[str, Any]) -> Answer:
        canvas = -(-max_tokens // BLOCK) * BLOCK
        stop = () if ignore_eos else (END,)
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        request = Request("reference", ids, SamplingParams(max_tokens, canvas, stop_token_ids=stop, **params), 0.0)
        num_steps = 0
        logprobs: tuple[TokenLogprobs, ...] = ()
        while True:
            self._engine.scheduler.add(request)
            while (output := self._engine.step()) is not None:
                assert not output.errors, output.errors
                num_steps += 1
            tokens, end = request.answer()
            logprobs += request.block.logprobs_at(range(request.block.frontier))
            if end is not None:
                reason, told = FINISH_REASONS[end], logprobs[: len(tokens)]
                return Answer(self._text(tokens), tokens, reason, len(ids), num_steps, told)
            request.next_block()

    def _text(self, tokens: list[int]) -> str:
        """As it can be streamed: `Tokenizer.decode` makes bytes unreadable that are read before a broken one.

        And half a character at the end is left out.
        """
        stream = TextStream(self.tokenizer, ())
        return stream.push(tokens)[1] + stream.finish()


def write_chaotic_model(directory: Path) -> None:
    """A checkpoint with large random weights and the demonstration model's tokenizer.

    It never ends its text, hardly repeats itself, and a change anywhere changes everything after it:
    whatever goes wrong with a request's state shows in its words.
    """
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / file, directory / file)
    config = json.loads((MODEL / "config.json").read_text()) | {"weight_tying": False}
    config |= {"d_model": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 384}
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * gain * columns**-0.5

    width, inner, root = 128, 384, "model.transformer"
    tensors = {f"{root}.ln_f.weight": torch.ones(width)}
    for block in (f"{root}.blocks.{i}" for i in range(4)):
        tensors |= {f"{block}.{name}_norm.weight": torch.ones(width) for name in ("attn", "ff")}
        tensors |= {f"{block}.{name}.weight": matrix(width, width, 3.0) for name in ("q_proj", "k_proj", "v_proj")}
        tensors |= {f"{block}.{name}.weight": matrix(inner, width, 3.0) for name in ("ff_proj", "up_proj")}
        tensors[f"{block}.attn_out.weight"] = matrix(width, width, 3.0)
        tensors[f"{block}.ff_out.weight"] = matrix(width, inner, 3.0)
    tensors[f"{root}.wte.weight"] = matrix(config["embedding_size"], width, 10.0)
    head = tensors[f"{root}.ff_out.weight"] = matrix(config["embedding_size"], width, 1.0)
    for token, index in Tokenizer.from_file(str(MODEL / "tokenizer.json")).get_vocab().items():
        if token.startswith("<"):  # special tokens and single bytes
            head[index] *= 0.02
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
