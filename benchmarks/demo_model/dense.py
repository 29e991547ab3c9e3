"""The model without cache and pages: what training runs and what cached decoding is compared with.

Shapes: R rows (left-padded sequences) of S tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from backend.models.layers import Transformer


class DenseAttention:
    """Attention over R rows, `mask` [R, 1, 1, S] true where a key is a real token."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows = len(self._mask)
        q, k, v = (x.unflatten(0, (rows, -1)).transpose(1, 2) for x in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, attn_mask=self._mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


def dense_forward(model: Transformer, ids: Tensor, lengths: Tensor) -> Tensor:
    """Hidden states [R, S, D] of left-padded rows `ids` [R, S] that hold `lengths` [R] tokens each.

    Each at the position that it predicts (`ModelConfig.logits_shift`); nothing predicts a row's first token.
    """
    rows, size = ids.shape
    columns = torch.arange(size)
    starts = (size - lengths)[:, None]
    positions = (columns[None, :] - starts).clamp(min=0)
    attention = DenseAttention((columns[None, :] >= starts)[:, None, None, :])
    hidden = model(ids.flatten(), positions.flatten(), attention).view(rows, size, -1)
    return hidden.roll(model.config.logits_shift, dims=1)


@torch.inference_mode()
def decode(
    model: Transformer, prompts: Sequence[Sequence[int]], canvas_length: int, block_length: int, threshold: float
) -> list[list[int]]:
    """Plain (uncached) blockwise decoding by confidence threshold: the canvas of each prompt.

    Stops after the block in which the last row's text ends; what follows stays masked.
    """
    mask, pad = model.config.mask_token_id, model.config.eos_token_ids[0]
    longest = max(map(len, prompts))
    ids = torch.full((len(prompts), longest + canvas_length), mask)
    for row, prompt in enumerate(prompts):
        ids[row, :longest] = pad
        ids[row, longest - len(prompt) : longest] = torch.tensor(prompt)
    lengths = torch.tensor([len(prompt) + canvas_length for prompt in prompts])
    every_row = torch.arange(len(prompts))
    for start in range(longest, longest + canvas_length, block_length):
        window = ids[:, start : start + block_length]
        while bool((masked := window == mask).any()):
            logits = model.logits(dense_forward(model, ids, lengths)[:, start : start + block_length])
            logits[..., mask] = -math.inf
            confidence, best = logits.softmax(-1).max(-1)
            confidence.masked_fill_(~masked, -1.0)
            take = confidence >= threshold
            take[every_row, confidence.argmax(-1)] = True
            window.copy_(torch.where(take & masked, best, window))
        if bool((ids[:, longest : start + block_length] == pad).any(dim=1).all()):
            break
    return ids[:, longest:].tolist()
