from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from benchmarks.lengths import MAX_TOTAL, TRACES, Length, generate, read, shuffled

# Table 1 of the paper: median, p99 and standard deviation of prompt and output tokens.
TABLE_1 = {"sharegpt": ((795, 2007, 596), (266, 874, 206)), "arxiv": ((2827, 3923, 890), (162, 360, 73))}
# Mean output blocks of 32 tokens per request, of the same generators by another implementation.
MEAN_BLOCKS = {"sharegpt": 9.88, "arxiv": 5.73}


@pytest.mark.parametrize("name", TRACES)
def test_generators_reproduce_table_1(name: str) -> None:
    drawn = list(itertools.islice(generate(TRACES[name], 1), 40_000))
    prompts = np.array([length.num_prompt_tokens for length in drawn])
    outputs = np.array([length.num_output_tokens for length in drawn])
    for values, expected in zip((prompts, outputs), TABLE_1[name], strict=True):
        got = (np.median(values), np.percentile(values, 99), values.std())
        assert got == pytest.approx(expected, rel=0.025)
    assert (prompts + outputs).max() <= MAX_TOTAL
    assert outputs.max() <= TRACES[name].canvas_length
    assert np.ceil(outputs / 32).mean() == pytest.approx(MEAN_BLOCKS[name], rel=0.01)


def test_a_seed_draws_the_same_lengths() -> None:
    def first(seed: int) -> list[Length]:
        return list(itertools.islice(generate(TRACES["sharegpt"], seed), 20))

    assert first(1) == first(1) != first(2)


def test_scaled_lengths_are_never_empty() -> None:
    assert Length(100, 1).scaled(0.25) == Length(25, 1)


def test_a_recorded_trace_is_drawn_whole_before_it_repeats(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("num_prompt_tokens,num_output_tokens\n" + "".join(f"{n},{n + 1}\n" for n in range(1, 11)))
    recorded = read(file)
    assert recorded[0] == Length(1, 2)
    drawn = list(itertools.islice(shuffled(recorded, 1), 20))
    assert sorted(drawn[:10], key=lambda length: length.num_prompt_tokens) == recorded
    assert set(drawn[10:]) == set(recorded)
    assert drawn[:10] != drawn[10:]


@pytest.mark.parametrize("columns", ["prompt_len,gen_len", "PromptTokenCount,CompletionTokenCount"])
def test_traces_of_the_papers_prototype_are_read(tmp_path: Path, columns: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(f"session_id,messages,{columns}\n7,{'word ' * 40_000},5,6\n")
    assert read(file) == [Length(5, 6)]


@pytest.mark.parametrize("rows", ["", "a,b\n1,2\n", "num_prompt_tokens,num_output_tokens\n", None, "bad"])
def test_a_file_without_lengths_is_refused(tmp_path: Path, rows: str | None) -> None:
    file = tmp_path / "trace.csv"
    head = "num_prompt_tokens,num_output_tokens\n"
    file.write_text(head + "0,4\n" if rows is None else head + "x,4\n" if rows == "bad" else rows)
    with pytest.raises(ValueError, match=r"trace\.csv: expected"):
        read(file)
