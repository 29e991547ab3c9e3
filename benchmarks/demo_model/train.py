"""Trains a demonstration model: `python -m benchmarks.demo_model.train OUT_DIR --minutes 97`.

Every task starts short and grows once its loss is low; it is drawn the more often, the more it still
has to learn. The learning rate decays to zero over the time given. Stop and start again at will: it resumes from
OUT_DIR/training.pt. Masking: see `batch.py`.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from backend.models.layers import Transformer
from backend.models.loader import load_model, new_model
from benchmarks.demo_model.batch import Batch, make_batch
from benchmarks.demo_model.checkpoint import ARCHITECTURES, demo_config, save_checkpoint, take_weights
from benchmarks.demo_model.dense import dense_forward
from benchmarks.demo_model.evaluate import exact_match, fresh_examples, plain_answers
from benchmarks.demo_model.muon import Muon
from benchmarks.demo_model.tasks import MIN_SIZE, TASKS
from benchmarks.demo_model.tokenizer import WordTokenizer

WARM_UP_STEPS = 300
LEARNED = 0.25  # loss below which a task grows, by a tenth every hundred steps
SIZE_STARTED_FROM = 0.3  # of the tasks when the weights are another checkpoint's
EMBEDDING_RATE = 0.35  # share of the learning rate: the tied embeddings of rare tokens stay sharp


class Trainer:
    """The model, its optimizers and how far each task has come."""

    def __init__(self, seed: int, architecture: str = "llada") -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.tokenizer = WordTokenizer()
        self.model = new_model(demo_config(self.tokenizer, architecture))
        _initialize(self.model)
        named = dict(self.model.named_parameters())
        matrices = [p for n, p in named.items() if p.dim() == 2 and "embedding" not in n]
        others = [p for n, p in named.items() if p.dim() != 2 or "embedding" in n]
        config = self.model.config
        kv_rows = config.num_kv_heads * config.head_dim
        self.optimizers = [
            Muon(matrices, lr=0.0, fused_rows=(config.hidden_size, kv_rows, kv_rows)),
            torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        ]
        self.step = 0
        self.spent_s = 0.0
        self.task_loss = dict.fromkeys(TASKS, 3.0)
        self.sizes = dict.fromkeys(TASKS, MIN_SIZE)

    def start_from(self, checkpoint: Path) -> None:
        """Takes over another model's weights, and with them what it has learned of the tasks."""
        take_weights(self.model, load_model(checkpoint, torch.float32, torch.device("cpu")))
        self.sizes = dict.fromkeys(TASKS, SIZE_STARTED_FROM)

    def save(self, path: Path) -> None:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self.model.state_dict(), "optimizers": optimizers, "step": self.step, "sizes": self.sizes}
        torch.save(state | {"spent": self.spent_s, "task_loss": self.task_loss}, path)

    def resume(self, path: Path) -> None:
        saved = torch.load(path)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.step, self.spent_s = saved["step"], saved["spent"]
        self.task_loss, self.sizes = saved["task_loss"], saved["sizes"]

    def train_step(self, rate: float) -> None:
        shares = {name: min(max(loss, 0.05), 0.7) for name, loss in self.task_loss.items()}
        batch = make_batch(self.tokenizer, random.Random(f"{self.seed} {self.step}"), shares, self.sizes)
        picked = batch.weight > 0
        hidden = dense_forward(self.model, batch.masked, batch.lengths)
        losses = cross_entropy(self.model.logits(hidden[picked]), batch.target[picked], reduction="none")
        losses = losses * batch.weight[picked]
        self.model.zero_grad(set_to_none=True)
        (losses.sum() / batch.weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, share in zip(self.optimizers, (1.0, EMBEDDING_RATE), strict=True):
            optimizer.param_groups[0]["lr"] = rate * share
            optimizer.step()
        self._note(batch, losses.detach())
        self.step += 1

    def grow(self, least: float) -> None:
        """Lengthens the tasks that are learned at their length; all to `least` of their full length."""
        for name, loss in self.task_loss.items():
            size = self.sizes[name] * (1.1 if loss < LEARNED else 1.0)
            self.sizes[name] = min(max(size, least), 1.0)

    def _note(self, batch: Batch, losses: torch.Tensor) -> None:
        per_row = torch.zeros_like(batch.weight)
        per_row[batch.weight > 0] = losses
        rows = per_row.sum(1) / batch.weight.sum(1).clamp(min=1e-6)
        for name, value in zip(batch.tasks, rows.tolist(), strict=True):
            self.task_loss[name] += 0.02 * (value - self.task_loss[name])


def _initialize(model: Transformer) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            into_residual = "out_proj" in name or "down_proj" in name
            scale = 0.02 / math.sqrt(2 * model.config.num_layers) if into_residual else 0.05
            torch.nn.init.normal_(parameter, std=0.02 if "embedding" in name else scale)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(parameter)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--architecture", choices=ARCHITECTURES, default="llada")
    parser.add_argument("--start-from", type=Path, metavar="CHECKPOINT", help="whose weights to begin with")
    parser.add_argument("--minutes", type=float, default=97, help="of work")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    trainer = Trainer(args.seed, args.architecture)
    if args.start_from:
        trainer.start_from(args.start_from)
    args.out.mkdir(parents=True, exist_ok=True)
    state = args.out / "training.pt"
    if state.exists():
        trainer.resume(state)
    last = time.monotonic()
    while (done := trainer.spent_s / (args.minutes * 60)) < 1:
        rate = args.learning_rate * min(1.0, (trainer.step + 1) / WARM_UP_STEPS) * (1 - done)
        trainer.train_step(rate)
        now = time.monotonic()
        trainer.spent_s, last = trainer.spent_s + now - last, now
        if trainer.step % 100 == 0:
            trainer.grow(least=2 * done - 1)
            losses = " ".join(f"{n} {loss:.3f} ({trainer.sizes[n]:.2f})" for n, loss in trainer.task_loss.items())
            print(f"{trainer.spent_s / 60:.1f} min, step {trainer.step}: {losses}", flush=True)
        if trainer.step % 1000 == 0:
            save_checkpoint(trainer.model, trainer.tokenizer, args.out)
            trainer.save(state)
            print("  exact match " + _scores(trainer), flush=True)
            last = time.monotonic()
    save_checkpoint(trainer.model, trainer.tokenizer, args.out)


def _scores(trainer: Trainer) -> str:
    scores = []
    for task in TASKS:
        examples = fresh_examples(task, 16, trainer.sizes[task], trainer.step)
        answers = plain_answers(trainer.model, trainer.tokenizer, examples)
        scores.append(f"{task} {exact_match(answers, examples):.2f}")
    return " ".join(scores)


if __name__ == "__main__":
    main()
