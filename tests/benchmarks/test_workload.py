from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks.workload import Decoding, at, demo_tasks, traced

IDS = range(300, 600)


def test_tasks_come_in_turn_with_their_answers() -> None:
    questions = list(itertools.islice(demo_tasks(["add", "count"], 1), 6))
    assert [question.task for question in questions] == ["add", "count"] * 3
    for question in questions[::2]:
        assert isinstance(question.prompt, str)
        first, second = (int(word) for word in question.prompt.strip("?").split() if word.isdigit())
        assert question.answer == str(first + second)


def test_long_lists_change_the_prompt_and_not_the_answer() -> None:
    short = next(demo_tasks(["first"], 5))
    long = next(demo_tasks(["first"], 5, list_words=400))
    assert isinstance(short.prompt, str) and isinstance(long.prompt, str)
    assert long.prompt.startswith(short.prompt)
    assert len(long.prompt.partition(":")[2].split()) == 400
    assert long.answer == short.answer


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(ValueError, match="poem"):
        next(demo_tasks(["add", "poem"], 1))


def test_a_trace_gives_prompts_of_its_lengths() -> None:
    questions = list(itertools.islice(traced("sharegpt", 1, IDS, scale=0.25), 200))
    assert all(set(question.prompt) <= set(IDS) for question in questions)  # type: ignore[arg-type]
    lengths = sorted(len(question.prompt) for question in questions)
    assert 2 <= lengths[0] and lengths[-1] <= 512
    assert max(question.max_tokens for question in questions) <= 256
    assert {question.task for question in questions} == {"sharegpt"}


def test_what_is_asked_depends_on_seed_and_number_alone() -> None:
    one = at([0.0, 1.0, 2.0], traced("arxiv", 1, IDS))
    other = at([0.0, 0.1], traced("arxiv", 1, IDS))
    assert [(q.prompt, q.max_tokens) for q in one[:2]] == [(q.prompt, q.max_tokens) for q in other]
    assert [q.arrival_s for q in one] == [0.0, 1.0, 2.0]
    assert next(traced("arxiv", 2, IDS)).prompt != one[0].prompt


def test_a_csv_trace_leaves_out_what_is_too_long(tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text("num_prompt_tokens,num_output_tokens\n4,5\n400,500\n")
    questions = list(itertools.islice(traced(str(file), 1, IDS, max_total=100), 5))
    assert {(len(question.prompt), question.max_tokens, question.task) for question in questions} == {(4, 5, "mine")}
    with pytest.raises(ValueError, match="every row"):
        traced(str(file), 1, IDS, max_total=5)


def test_decoding_says_its_mode_and_travels_as_annotations() -> None:
    assert Decoding().mode == "end of text"
    assert Decoding().annotations() == []
    fixed = Decoding(ignore_eos=True, canvas_length=256, steps_per_block=16)
    assert fixed.mode == "fixed length"
    assert fixed.annotations() == ["dllm.canvas_length:256", "dllm.steps_per_block:16", "dllm.unmasking:quota"]
