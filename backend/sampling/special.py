"""Rows whose token is drawn, or whose rank is something else than the probability of the arg max."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from backend.core.counter_random import ORDER
from backend.core.request import Request
from backend.core.sampling_params import SamplingParams
from backend.sampling.draw import sample, tempered, token_probability, truncated
from backend.sampling.measure import MEASURES
from backend.sampling.seeds import uniform


def is_special(params: SamplingParams) -> bool:
    return params.temperature > 0 or params.unmasking == "random" or params.unmasking in MEASURES


class SpecialRows:
    """The options of B requests that go beyond arg max and its probability.

    entropy, margin and maskgit_plus judge the distribution that the token is drawn from, as Dream does:
    after temperature and truncation, and plain where the temperature is 0. The other rules judge a
    drawn token by its plain probability, as LLaDA and Fast-dLLM do.
    """

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        params = [request.params for request in requests]
        self._requests = requests
        self._device = device
        self._rules = np.array([p.unmasking for p in params])
        self._is_drawn = np.array([p.temperature > 0 for p in params])
        self._is_shaped = np.array([p.temperature > 0 or p.unmasking in MEASURES for p in params])
        self._is_truncated = np.array([p.temperature > 0 and _truncates(p) for p in params])
        self._in_use = {p.unmasking for p in params}

        def tensor(values: list[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self._temperature = tensor([p.temperature or 1.0 for p in params], torch.float64)
        self._top_k = tensor([p.top_k if p.top_k > 0 else torch.iinfo(torch.int64).max for p in params], torch.int64)
        self._top_p = tensor([p.top_p for p in params], torch.float64)
        self._min_p = tensor([p.min_p for p in params], torch.float64)
        self._seed = tensor([p.seed for p in params], torch.int64)
        self._block = tensor([request.block.index for request in requests], torch.int64)

    def judge(
        self, logits: Tensor, confidence: Tensor, rows: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """The score of every masked position, [N], and the tokens [N] that were drawn, -1 elsewhere.

        Args:
            logits: float32 [N, V].
            confidence: [N], the probability of the arg max: the score of all rows that are not special.
            rows, offsets: [N], request and offset in its block of each masked position.
        """
        score = confidence.clone()
        tokens = np.full(len(rows), -1)
        row, offset = (torch.from_numpy(index).to(self._device) for index in (rows, offsets))
        step = torch.tensor([request.block.step for request in self._requests], device=self._device)
        counters = (self._seed[row], self._block[row], step[row], offset)
        rules = self._rules[rows]
        shaped = self._is_shaped[rows].nonzero()[0]
        if len(shaped):
            probabilities = self._probabilities(logits, rows, shaped)
            for rule in MEASURES.keys() & self._in_use:
                within = (rules[shaped] == rule).nonzero()[0]
                score[shaped[within]] = MEASURES[rule](probabilities[within]).to(score.dtype)
            is_drawn = self._is_drawn[rows[shaped]]
            if is_drawn.any():
                drawn = shaped[is_drawn]
                source = probabilities[torch.from_numpy(is_drawn).to(self._device)]
                token = sample(source, (counters[0][drawn], counters[1][drawn], counters[2][drawn], counters[3][drawn]))
                tokens[drawn] = token.numpy(force=True)
                self._score_drawn(score, logits, source, token, drawn, rules[drawn])
        if "random" in self._in_use:
            score_random = uniform(*counters, stream=ORDER).to(score.dtype)
            is_random = torch.from_numpy(rules == "random").to(self._device)
            score = torch.where(is_random, score_random, score)
        return score, tokens

    def _probabilities(self, logits: Tensor, rows: NDArray[np.int64], shaped: NDArray[np.int64]) -> Tensor:
        """float64 [len(shaped), V]: what the token is drawn from, or would be at temperature 1."""
        row = torch.from_numpy(rows[shaped]).to(self._device)
        probabilities = tempered(logits[shaped], self._temperature[row])
        cut = self._is_truncated[rows[shaped]].nonzero()[0]
        if len(cut):
            index = row[cut]
            probabilities[cut] = truncated(
                probabilities[cut], self._top_k[index], self._top_p[index], self._min_p[index]
            )
        return probabilities

    def _score_drawn(
        self,
        score: Tensor,
        logits: Tensor,
        source: Tensor,
        token: Tensor,
        drawn: NDArray[np.int64],
        rules: NDArray[np.str_],
    ) -> None:
        """Scores drawn tokens by their probability, plain or as drawn from `source`, by each one's rule."""
        plain = ~np.isin(rules, [*MEASURES, "maskgit_plus"])
        if plain.any():
            index = torch.from_numpy(plain).to(self._device)
            score[drawn[plain]] = token_probability(logits[drawn[plain]], token[index])
        noised = rules == "maskgit_plus"
        if noised.any():
            index = torch.from_numpy(noised).to(self._device)
            chances = source[index].gather(1, token[index][:, None]).squeeze(1)
            score[drawn[noised]] = chances.to(score.dtype)


def _truncates(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0
