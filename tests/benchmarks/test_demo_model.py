from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from backend.engine.engine import Engine, EngineConfig
from backend.models.config import ModelConfig
from backend.models.layers import Transformer
from backend.models.loader import load_model, new_model
from benchmarks.demo_model.batch import BLOCK, make_batch
from benchmarks.demo_model.checkpoint import ARCHITECTURES, demo_config, save_checkpoint, take_weights
from benchmarks.demo_model.dense import decode
from benchmarks.demo_model.evaluate import engine_answers, fresh_examples, plain_answers
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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_training_step_learns_and_its_state_resumes(tmp_path: Path, architecture: str) -> None:
    trainer = Trainer(0, architecture)
    before = dict(trainer.task_loss)
    for _ in range(2):
        trainer.train_step(1e-3)
    assert trainer.step == 2 and trainer.task_loss != before
    trainer.save(tmp_path / "training.pt")
    other = Trainer(0, architecture)
    other.resume(tmp_path / "training.pt")
    for each in (trainer, other):
        each.train_step(1e-3)
    states = (trainer.model.state_dict(), other.model.state_dict())
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_saved_checkpoint_is_served_as_it_was_trained(tmp_path: Path, architecture: str) -> None:
    trainer = Trainer(0, architecture)
    trainer.train_step(1e-2)
    save_checkpoint(trainer.model, trainer.tokenizer, tmp_path)
    loaded = load_model(tmp_path, torch.float32, torch.device("cpu"))
    assert loaded.config == trainer.model.config
    state = trainer.model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in loaded.state_dict().items())
    examples = fresh_examples("spell", 3, 1.0, 0)
    engine = Engine.from_config(EngineConfig(tmp_path, kv_cache_tokens=1024))
    assert len(engine_answers(engine, trainer.tokenizer, examples).texts) == 3
    assert len(plain_answers(loaded, trainer.tokenizer, examples)) == 3
    assert trainer.model.config.max_position >= 400 + 8 * BLOCK


def test_a_model_starts_from_another_with_more_kv_heads() -> None:
    tokenizer = WordTokenizer()
    source, model = (new_model(demo_config(tokenizer, name)) for name in ARCHITECTURES)
    biases = model.blocks[0].attention.qkv_proj.bias.clone()
    take_weights(model, source)
    theirs, ours = source.blocks[0].attention, model.blocks[0].attention
    query, key, value = theirs.qkv_proj.weight.split(128)
    torch.testing.assert_close(ours.qkv_proj.weight[:128], query)
    torch.testing.assert_close(ours.qkv_proj.weight[128:160], (key[:32] + key[32:64]) / 2)
    torch.testing.assert_close(ours.qkv_proj.weight[224:], (value[64:96] + value[96:]) / 2)
    assert torch.equal(ours.qkv_proj.bias, biases)
    assert torch.equal(ours.out_proj.weight, theirs.out_proj.weight)
    assert torch.equal(model.lm_head.weight, source.embedding.weight)


def successor_model(architecture: str) -> Transformer:
    """No blocks to speak of, one dimension for each token: sees token t and is sure of token t + 1."""
    config = replace(SUCCESSORS, architecture=architecture, logits_shift=int(architecture == "dream"))
    model = new_model(config).requires_grad_(False)
    for block in model.blocks:
        block.attention.out_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    model.embedding.weight.copy_(torch.eye(config.hidden_size))
    model.lm_head.weight.copy_(20 * torch.eye(config.hidden_size).roll(1, 0))
    return model


SUCCESSORS = ModelConfig(
    architecture="", vocab_size=32, embedding_size=32, hidden_size=32, intermediate_size=8, num_layers=1, num_heads=1,
    num_kv_heads=1, max_position=64, rms_norm_eps=1e-6, rope_theta=1e4, mask_token_id=9, eos_token_ids=(31,),
)  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "answers"),
    [
        ("llada", [[10, 10, 10, 10, 10, 10]] * 2),
        ("dream", [[21, 10, 10, 11, 10, 10], [8, 10, 10, 11, 10, 10]]),
    ],
)
def test_a_row_predicts_the_position_that_its_architecture_says(architecture: str, answers: list[list[int]]) -> None:
    prompts = [[20], [3, 5, 7]]
    assert decode(successor_model(architecture), prompts, canvas_length=6, block_length=3, threshold=0.9) == answers
