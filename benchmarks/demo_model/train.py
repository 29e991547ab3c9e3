"""Trains the demonstration model: `python -m benchmarks.demo_model.train --minutes 75 OUT_DIR`.

A masked diffusion loss on whole answers: the part of the canvas before a random block is clean, the
block is masked at a random ratio and all after it is masked, which is what blockwise decoding shows
the model; a quarter of the samples are masked uniformly over the whole canvas instead (LLaDA, eq. 3).
Short tasks come first and grow; a task is drawn the more often, the more it still has to learn. The learning
rate is held, then decays to zero over the last third of the time given. Stop and resume at will.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from backend.models.config import ModelConfig
from backend.models.llada import Llada, official_names
from benchmarks.demo_model import tokenizer as words
from benchmarks.demo_model.tasks import TASKS, Example

BLOCK = 32
WIDTH, LAYERS, HEADS, MLP = 128, 4, 4, 384
ROPE_THETA, EPS, CONTEXT = 10000.0, 1e-5, 2048
TOKENS_PER_STEP = 2400
END_WEIGHT = 0.15  # of the padding after the first end-of-text


class DenseAttention:
    """Attention over left-padded rows, without a cache."""

    def __init__(self, rows: int, mask: Tensor) -> None:
        self.rows, self.mask = rows, mask

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (self.rows, -1)).transpose(1, 2) for x in (query, key, value))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return out.transpose(1, 2).flatten(0, 1)


def dense_forward(model: Llada, ids: Tensor, lengths: Tensor) -> Tensor:
    """Hidden states [R, S, D] of left-padded rows `ids` [R, S] that hold `lengths` [R] tokens each."""
    rows, size = ids.shape
    columns = torch.arange(size)
    real = columns[None, :] >= size - lengths[:, None]
    positions = (columns[None, :] - (size - lengths)[:, None]).clamp(min=0)
    attention = DenseAttention(rows, real[:, None, None, :])
    return model(ids.flatten(), positions.flatten(), attention).view(rows, size, -1)


class Muon(torch.optim.Optimizer):
    """Orthogonalized momentum (Jordan et al., 2024) in float32: torch's own computes in bfloat16,
    which a CPU without bfloat16 units runs ten times slower. Steps are scaled to AdamW's size.
    """

    def __init__(self, params: list[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for parameter in group["params"]:
            gradient = parameter.grad
            buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
            buffer.lerp_(gradient, 0.05)
            update = gradient.lerp(buffer, 0.95)
            # Fused projections are orthogonalized each on its own.
            parts = update.unflatten(0, (-1, WIDTH)) if update.shape[0] == 3 * WIDTH else update[None]
            parameter.mul_(1 - group["lr"] * 0.01)
            scale = 0.2 * max(parts.shape[-2:]) ** 0.5
            parameter.add_(orthogonalized(parts).reshape(parameter.shape), alpha=-group["lr"] * scale)


def orthogonalized(x: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrices of `x` [..., R, C], by five Newton-Schulz iterations."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Encoder:
    def __init__(self) -> None:
        self.tokenizer = words.build()
        self.end = self.tokenizer.token_to_id(words.END)
        self.mask = self.tokenizer.token_to_id(words.MASK)
        self.vocab_size = -(-self.tokenizer.get_vocab_size() // 8) * 8

    def prompt(self, example: Example) -> list[int]:
        return self.tokenizer.encode(f"{words.USER}{example.prompt}{words.ASSISTANT}").ids

    def answer(self, example: Example) -> list[int]:
        return self.tokenizer.encode(example.answer).ids


def make_batch(
    encoder: Encoder, rng: random.Random, weights: dict[str, float], size: float, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, list[str]]:
    """ids with masks, targets, loss weights [R, S]; lengths [R]; canvas size; task of each row."""
    canvas_blocks = rng.choices((1, 2, 3, 4, 8), (10, 3, 2, 2, 0.3 * size))[0]
    canvas = canvas_blocks * BLOCK
    samples: list[tuple[list[int], list[int], str]] = []
    names = list(weights)
    longest = 0
    while True:
        name = rng.choices(names, [weights[n] for n in names])[0]
        example = TASKS[name](rng, max(size * rng.random(), 0.06))
        prompt, answer = encoder.prompt(example), encoder.answer(example)
        if len(answer) >= canvas:
            continue
        if (max(longest, len(prompt)) + canvas) * (len(samples) + 1) > TOKENS_PER_STEP and len(samples) >= 8:
            break
        longest = max(longest, len(prompt))
        samples.append((prompt, answer, name))
    total = longest + canvas
    ids = torch.full((len(samples), total), encoder.end)
    loss_weight = torch.zeros(len(samples), total)
    lengths = torch.tensor([len(prompt) + canvas for prompt, _, _ in samples])
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(len(samples), canvas, generator=generator)
    offset = rng.random()
    hidden = torch.zeros(len(samples), total, dtype=torch.bool)
    for row, (prompt, answer, _) in enumerate(samples):
        ids[row, longest - len(prompt) : longest] = torch.tensor(prompt)
        ids[row, longest : longest + len(answer)] = torch.tensor(answer)
        ratio = (offset + row / len(samples)) % 1.0
        ratio = 1.0 if rng.random() < 0.25 else ratio
        if rng.random() < 0.25:
            drop = noise[row] < ratio
            scored = drop
        else:
            first = rng.randrange(len(answer) // BLOCK + 1) * BLOCK
            drop = torch.zeros(canvas, dtype=torch.bool)
            drop[first + BLOCK :] = True
            drop[first : first + BLOCK] = noise[row, first : first + BLOCK] < ratio
            scored = drop.clone()
            scored[first + BLOCK :] = False
        hidden[row, longest:] = drop
        loss_weight[row, longest:] = scored.float()
        loss_weight[row, longest + len(answer) + 1 :] *= END_WEIGHT
    masked = ids.masked_fill(hidden, encoder.mask)
    return masked, ids, loss_weight, lengths, torch.tensor(canvas), [task for _, _, task in samples]


@torch.no_grad()
def decode(model: Llada, encoder: Encoder, examples: list[Example], threshold: float) -> list[str]:
    """Plain (uncached) blockwise decoding by confidence threshold: the answers' texts."""
    prompts = [encoder.prompt(e) for e in examples]
    blocks = [len(encoder.answer(e)) // BLOCK + 1 for e in examples]
    canvas, longest = max(blocks) * BLOCK, max(map(len, prompts))
    ids = torch.full((len(prompts), longest + canvas), encoder.mask)
    for row, prompt in enumerate(prompts):
        ids[row, :longest] = encoder.end
        ids[row, longest - len(prompt) : longest] = torch.tensor(prompt)
    lengths = torch.tensor([len(p) + canvas for p in prompts])
    for start in range(longest, longest + canvas, BLOCK):
        window = ids[:, start : start + BLOCK]
        while (window == encoder.mask).any():
            logits = model.logits(dense_forward(model, ids, lengths)[:, start : start + BLOCK])
            logits[..., encoder.mask] = -math.inf
            confidence, best = logits.softmax(-1).max(-1)
            confidence[window != encoder.mask] = -1.0
            take = confidence >= threshold
            take[torch.arange(len(prompts)), confidence.argmax(-1)] = True
            take &= window == encoder.mask
            window[take] = best[take]
    texts = []
    for row in ids[:, longest:].tolist():
        kept = row[: row.index(encoder.end)] if encoder.end in row else row
        texts.append(encoder.tokenizer.decode(kept))
    return texts


def evaluate(model: Llada, encoder: Encoder, each: int, size: float, seed: int) -> dict[str, float]:
    """Exact match per task on fresh prompts, drawn uniformly over sizes up to `size`."""
    rng = random.Random(f"evaluation {seed}")
    scores = {}
    for name, task in TASKS.items():
        examples = [task(rng, max(size * rng.random(), 0.06)) for _ in range(each)]
        examples.sort(key=lambda e: len(e.prompt) + len(e.answer))
        right = 0
        for i in range(0, each, 16):
            part = examples[i : i + 16]
            texts = decode(model, encoder, part, 0.9)
            right += sum(text == example.answer for text, example in zip(texts, part, strict=True))
        scores[name] = right / each
    return scores


def save_checkpoint(model: Llada, encoder: Encoder, directory: Path) -> None:
    """Hugging Face layout with the official LLaDA names: config.json, model.safetensors, tokenizer."""
    config = model.config
    words.save(directory)
    state = model.state_dict()
    tensors = {}
    for ours, theirs in official_names(config).items():
        if "qkv" in ours:
            parts = state[ours].split([WIDTH, WIDTH, WIDTH])
        else:
            parts = state[ours].chunk(len(theirs))
        tensors |= {name: part.contiguous().clone() for name, part in zip(theirs, parts, strict=True)}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    raw = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "block_type": "llama",
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "rope": True,
        "d_model": WIDTH,
        "n_layers": LAYERS,
        "n_heads": HEADS,
        "n_kv_heads": HEADS,
        "mlp_hidden_size": MLP,
        "vocab_size": encoder.vocab_size,
        "embedding_size": encoder.vocab_size,
        "max_sequence_length": CONTEXT,
        "rms_norm_eps": EPS,
        "rope_theta": ROPE_THETA,
        "mask_token_id": encoder.mask,
        "eos_token_id": encoder.end,
        "pad_token_id": encoder.end,
        "weight_tying": True,
        "include_bias": False,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(raw, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float, default=75)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    encoder = Encoder()
    config = ModelConfig(
        "llada", encoder.vocab_size, encoder.vocab_size, WIDTH, MLP, LAYERS, HEADS, HEADS, CONTEXT, EPS, ROPE_THETA,
        encoder.mask, (encoder.end,), tie_embeddings=True,
    )  # fmt: skip
    model = Llada(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            scale = 0.02 / math.sqrt(2 * LAYERS) if "out_proj" in name or "down_proj" in name else 0.02
            torch.nn.init.normal_(parameter, std=scale if "embedding" in name or scale < 0.02 else 0.05)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embedding" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embedding" in n]
    optimizers = [
        Muon(matrices, lr=args.learning_rate),
        torch.optim.AdamW(others, lr=args.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    resume = args.out / "training.pt"
    step, spent = 0, 0.0
    task_loss = dict.fromkeys(TASKS, 3.0)
    if resume.exists():
        saved = torch.load(resume)
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        step, spent, task_loss = saved["step"], saved["spent"], saved["task_loss"]
    last, saved_at = time.monotonic(), spent
    while spent < args.minutes * 60:
        done = spent / (args.minutes * 60)
        size = min(1.0, 0.05 + 1.6 * max(0.0, done - 0.1))
        rate = args.learning_rate * min(1.0, (step + 1) / 300) * min(1.0, max((1 - done) / 0.35, 0.0))
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = rate
        weights = {name: min(max(loss, 0.08), 1.5) for name, loss in task_loss.items()}
        rng = random.Random(f"{args.seed} {step}")
        masked, target, loss_weight, lengths, canvas, tasks = make_batch(encoder, rng, weights, size, step)
        hidden = dense_forward(model, masked, lengths)
        picked = loss_weight > 0
        logits = model.logits(hidden[picked])
        losses = functional.cross_entropy(logits, target[picked], reduction="none")
        w = loss_weight[picked]
        loss = (losses * w).sum() / w.sum()
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            per_row = torch.zeros_like(loss_weight)
            per_row[picked] = losses * w
            row_loss = (per_row.sum(1) / loss_weight.sum(1).clamp(min=1e-6)).tolist()
        for name, value in zip(tasks, row_loss, strict=True):
            task_loss[name] += 0.02 * (value - task_loss[name])
        step += 1
        now = time.monotonic()
        spent, last = spent + now - last, now
        if step % 100 == 0:
            shown = " ".join(f"{name} {value:.3f}" for name, value in task_loss.items())
            print(f"{spent / 60:.1f} min step {step} size {size:.2f} lr {rate:.1e} | {shown}", flush=True)
        if step % 1000 == 0:
            scores = evaluate(model, encoder, 16, size, step)
            save_checkpoint(model, encoder, args.out)
            print("  exact match " + " ".join(f"{n} {s:.2f}" for n, s in scores.items()), flush=True)
            last = time.monotonic()
        if spent - saved_at > 120:
            state = {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            torch.save(state | {"step": step, "spent": spent, "task_loss": task_loss}, resume)
            saved_at = spent
    save_checkpoint(model, encoder, args.out)
    scores = evaluate(model, encoder, 200, 1.0, 10**9)
    print(f"exact match, plain decoding: {scores}, overall {sum(scores.values()) / len(scores):.4f}")


if __name__ == "__main__":
    main()
