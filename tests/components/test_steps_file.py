from __future__ import annotations

import csv
from pathlib import Path

import pytest

from components.steps_file import StepsFile


def test_answers_are_added_to_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    for number in (1, 2):
        steps = StepsFile(path)
        steps.add(f'a, "client\'s" name#{number}', [4, 9 + number])
    with path.open(newline="") as file:
        rows = [(row["request"], int(row["num_steps"])) for row in csv.DictReader(file)]
    names = [f'a, "client\'s" name#{number}' for number in (1, 2)]
    assert rows == [(names[0], 4), (names[0], 10), (names[1], 4), (names[1], 11)]


def test_an_answer_is_there_at_once(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    steps = StepsFile(path)
    assert path.read_text().split() == ["request,num_steps"]
    steps.add("r", [3])
    assert path.read_text().split() == ["request,num_steps", "r,3"]


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        StepsFile(tmp_path / "nowhere" / "steps.csv")
