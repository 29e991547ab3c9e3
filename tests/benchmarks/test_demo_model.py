from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from backend.engine.engine import Engine, EngineConfig
from backend.models.loader import load_model
from benchmarks.demo_model.batch import BLOCK, make_batch
from benchmarks.demo_model.checkpoint import save_checkpoint
from benchmarks.demo_model.evaluate import cached_answers, fresh_examples, plain_answers
from benchmarks.demo_model.tasks import TASKS, number_in_words
from benchmarks.demo_model.tokenizer import WordTokenizer
from benchmarks.demo_model.train import Trainer


@pytest.mark.parametrize(
    ("n", "words"), [(0, "zero"), (13, "thirteen"), (40, "forty"), (99, "ninety nine"), (100, "one hundred"),
                     (147, "one hundred forty seven")],
)  # fmt: skip
def test_numbers_in_words(n: int, words: str) -> None:
    assert number_in_words(n) == words


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("size", [0.06, 1.0])
def test_the_vocabulary_covers_every_task_and_answers_survive_the_round_trip(task: str, size: float) -> None:
    tokenizer = WordTokenizer()
    for example in fresh_examples(task, 20, size, 0):
        answer = tokenizer.answer(example)
        assert max(tokenizer.prompt(example) + answer) < tokenizer.vocab_size
        assert tokenizer.text([*answer, tokenizer.end, 300, 301]) == example.answer
        assert tokenizer.mask not in tokenizer.prompt(example)


def test_only_the_canvas_is_masked_and_only_masks_are_scored() -> None:
    tokenizer = WordTokenizer()
    for seed in range(20):
        batch = make_batch(tokenizer, random.Random(seed), dict.fromkeys(TASKS, 1.0), dict.fromkeys(TASKS, 0.5))
        is_masked = batch.masked == tokenizer.mask
        assert torch.equal(batch.masked[~is_masked], batch.target[~is_masked])
        assert not (batch.weight > 0)[~is_masked].any()
        assert (batch.weight.sum(1) > 0).any()
        assert set(batch.tasks) <= TASKS.keys()
        assert batch.masked.numel() <= 2 * 2400


def test_a_training_step_learns_and_its_state_resumes(tmp_path: Path) -> None:
    trainer = Trainer(seed=0)
    before = dict(trainer.task_loss)
    for _ in range(2):
        trainer.train_step(1e-3)
    assert trainer.step == 2 and trainer.task_loss != before
    trainer.save(tmp_path / "training.pt")
    other = Trainer(seed=0)
    other.resume(tmp_path / "training.pt")
    for each in (trainer, other):
        each.train_step(1e-3)
    states = (trainer.model.state_dict(), other.model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_the_saved_checkpoint_is_served_as_it_was_trained(tmp_path: Path) -> None:
    trainer = Trainer(seed=0)
    trainer.train_step(1e-2)
    save_checkpoint(trainer.model, trainer.tokenizer, tmp_path)
    loaded = load_model(tmp_path, torch.float32, torch.device("cpu"))
    state = trainer.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in loaded.state_dict().items())
    examples = fresh_examples("spell", 3, 1.0, 0)
    engine = Engine.from_config(EngineConfig(tmp_path, kv_cache_tokens=1024))
    assert len(cached_answers(engine, trainer.tokenizer, examples)) == 3
    assert len(plain_answers(loaded, trainer.tokenizer, examples)) == 3
    assert trainer.model.config.max_position >= 400 + 8 * BLOCK
