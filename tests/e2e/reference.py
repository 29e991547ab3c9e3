"""The same checkpoint in this process: one request at a time through the engine, no serving around it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from backend.core.request import Request, RequestStatus
from backend.core.sampling_params import SamplingParams
from backend.engine.engine import Engine, EngineConfig
from components.config import DEMO_MODEL

MODEL = Path(os.environ.get("SANGAM_TEST_MODEL") or DEMO_MODEL)
END, BLOCK = 1, 32
FINISH_REASONS = {RequestStatus.FINISHED_STOP: "stop", RequestStatus.FINISHED_LENGTH: "length"}


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: list[int]
    finish_reason: str
    num_prompt_tokens: int
    num_steps: int


class Reference:
    """Serial runs through `Engine`; equal questions are answered from memory."""

    def __init__(self) -> None:
        self._engine = Engine.from_config(EngineConfig(MODEL, kv_cache_tokens=4096))
        self.tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
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
        while True:
            self._engine.scheduler.add(request)
            while (output := self._engine.step()) is not None:
                assert not output.errors, output.errors
                num_steps += 1
            tokens, end = request.answer()
            if end is not None:
                return Answer(self.tokenizer.decode(tokens), tokens, FINISH_REASONS[end], len(ids), num_steps)
            request.next_block()
