"""Questions that ask for everything that can be asked for, and the ways to put them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from backend.core.cache_policy import CACHE_POLICIES
from tests.e2e.kserve import Kserve
from tests.e2e.reference import Answer, Reference
from tests.e2e.served import MODEL_NAME, Served

WORDS = ("moon", "river", "stone", "pear", "key", "milk", "oak", "lily")
FIELDS = ("temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "min_tokens")

RULES: dict[str, dict[str, Any]] = {
    "threshold": {"confidence_threshold": 0.03},
    "paced_threshold": {"confidence_threshold": 0.02, "steps_per_block": 16},
    "factor": {"factor": 3.93},
    "quota": {"steps_per_block": 8},
    "entropy": {"steps_per_block": 8, "quota_schedule": "timesteps"},
    "margin": {"steps_per_block": 5},
    "maskgit_plus": {"steps_per_block": 8, "temperature": 0.75, "seed": 3},
    "random": {"steps_per_block": 8, "seed": 5},
}
"""Each rule of unmasking with options that show where probabilities are small, as in `write_chaotic_model`."""


@dataclass(frozen=True)
class Question:
    """`params` are fields of `SamplingParams`, and `ignore_eos`."""

    prompt: str
    max_tokens: int
    params: dict[str, Any]

    def expected(self, reference: Reference) -> str:
        return reference.chat(self.prompt, self.max_tokens, **self.params).text

    def by_http(self, graph: Served) -> Callable[[], str]:
        return lambda: graph.chat(self.prompt, self.max_tokens, **self._fields())["text"]

    def by_openai(self, graph: Served) -> Callable[[], str]:
        return lambda: graph.openai.chat.completions.create(**self._chat()).choices[0].message.content or ""

    def by_openai_stream(self, graph: Served) -> Callable[[], str]:
        def ask() -> str:
            chunks = graph.openai.chat.completions.create(**self._chat(), stream=True)
            return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)

        return ask

    def by_kserve(self, graph: Served) -> Callable[[], str]:
        return lambda: self.over_kserve(graph).text

    def by_kserve_stream(self, graph: Served) -> Callable[[], str]:
        return lambda: self.streamed_over_kserve(graph)[0].text

    def over_kserve(self, graph: Served) -> Answer:
        with Kserve(graph.grpc) as kserve:
            return kserve.infer(self.prompt, max_tokens=self.max_tokens, **self.params)

    def streamed_over_kserve(self, graph: Served) -> tuple[Answer, int]:
        """The answer and in how many responses it came."""
        with Kserve(graph.grpc) as kserve:
            return kserve.stream(self.prompt, max_tokens=self.max_tokens, **self.params)

    def _fields(self) -> dict[str, Any]:
        """What is a field of its own, and the others as annotations."""
        own = {key: value for key, value in self.params.items() if key in FIELDS}
        annotations = [f"dllm.{key}:{value}" for key, value in self.params.items() if key not in own]
        return {**own, "nvext": {"annotations": annotations}}

    def _chat(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.prompt}]
        return {
            "model": MODEL_NAME, "messages": messages, "max_tokens": self.max_tokens, "extra_body": self._fields(),
        }  # fmt: skip


WAYS = (Question.by_openai, Question.by_openai_stream, Question.by_kserve, Question.by_kserve_stream)


def mixed(count: int) -> list[Question]:
    """Short and long, fast and slow, greedy and drawn, by every cache policy and rule, with and without remasking."""
    rng = random.Random("mixed")
    found = []
    for i in range(count):
        prompt = rng.choice(("count from {0} to {1}", "spell {2}", "what is {0} plus {1}?", "{2} {3}"))
        words = " ".join(rng.choice(WORDS) for _ in range(rng.choice((1, 1, 10, 80))))
        prompt = prompt.format(i, rng.randrange(100), rng.choice(WORDS), words)
        policy = (*CACHE_POLICIES, "dual", "dual")[i % (len(CACHE_POLICIES) + 2)]
        rule = "random" if policy == "dkv-greedy" else rng.choice(list(RULES))
        params = {"unmasking": rule, **RULES[rule], "cache_policy": policy}
        if rng.random() < 0.25:
            params["cache_refresh_interval"] = rng.choice((0, 3))
        if rng.random() < 0.25:
            params["remask_below"] = 0.03
        if rng.random() < 0.25:
            params |= {"temperature": 0.75, "seed": i}
        found.append(Question(prompt, rng.choice((1, 20, 32, 70, 96)), params))
    return found
