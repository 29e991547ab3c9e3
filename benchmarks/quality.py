"""What a cache policy and a rule of unmasking cost and gain: `python -m benchmarks.quality --out OUT`.

Exact match per task of the demonstration models, beside tokens returned per forward and positions
computed per token returned. OUT gets report.md, results.csv and quality.png.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from backend.core.cache_policy import CACHE_POLICIES
from backend.core.sampling_params import InvalidRequestError, SamplingParams
from backend.core.scheduler import SchedulerConfig
from backend.engine.engine import Engine, EngineConfig
from benchmarks.demo_model.evaluate import engine_answers, exact_match, fresh_examples
from benchmarks.demo_model.tasks import TASKS
from benchmarks.demo_model.tokenizer import WordTokenizer
from benchmarks.report import markdown
from components.config import DEMO_MODELS

RULES: Mapping[str, Mapping[str, object]] = {
    "threshold 0.9": {"unmasking": "threshold", "confidence_threshold": 0.9},
    "threshold 0.5": {"unmasking": "threshold", "confidence_threshold": 0.5},
    "threshold 0.5, remask 0.9": {"unmasking": "threshold", "confidence_threshold": 0.5, "remask_below": 0.9},
    "factor 1": {"unmasking": "factor", "factor": 1.0},
    "quota, 16 steps": {"unmasking": "quota", "steps_per_block": 16},
    "quota, 1 step": {"unmasking": "quota", "steps_per_block": 1},
    **{
        f"{rule}, 4 steps": {"unmasking": rule, "steps_per_block": 4}
        for rule in ("paced_threshold", "quota", "entropy", "margin", "maskgit_plus", "random")
    },
}


@dataclass(frozen=True)
class Cell:
    """One model, policy and rule.

    Attributes:
        exact: exact match by task, 0 to 1.
        tokens_per_forward: returned; a forward counts once for each request in it.
        positions_per_token: computed by forwards, over tokens returned.
        answers: by task.
    """

    model: str
    policy: str
    rule: str
    exact: Mapping[str, float]
    tokens_per_forward: float
    positions_per_token: float
    answers: Mapping[str, Sequence[str]]

    def same_as(self, other: Cell) -> float:
        """The share of answers that are the other's, right or wrong, 0 to 1."""
        pairs = [pair for task in self.answers for pair in zip(self.answers[task], other.answers[task], strict=True)]
        return sum(ours == theirs for ours, theirs in pairs) / len(pairs)

    @property
    def overall(self) -> float:
        return sum(self.exact.values()) / len(self.exact)


def combinations() -> Iterator[tuple[str, str, Mapping[str, object]]]:
    """Every cache policy with every rule that it allows."""
    for policy in CACHE_POLICIES:
        for rule, options in RULES.items():
            try:
                SamplingParams(32, 32, cache_policy=policy, **options)  # type: ignore[arg-type]
            except InvalidRequestError:
                continue
            yield policy, rule, {**options, "cache_policy": policy}


def measure(engine: Engine, model: str, policy: str, rule: str, options: Mapping[str, object], each: int) -> Cell:
    """`each` fresh prompts of every task."""
    tokenizer = WordTokenizer()
    exact: dict[str, float] = {}
    texts: dict[str, Sequence[str]] = {}
    num_tokens = num_forwards = num_positions = 0
    for task in TASKS:
        examples = fresh_examples(task, each, 1.0, seed=1)
        answers = engine_answers(engine, tokenizer, examples, **options)
        texts[task] = answers.texts
        exact[task] = exact_match(answers.texts, examples)
        num_tokens += answers.num_tokens
        num_forwards += answers.num_forwards
        num_positions += answers.num_positions
    return Cell(
        model, policy, rule, exact, num_tokens / max(num_forwards, 1), num_positions / max(num_tokens, 1), texts
    )


def report(cells: Sequence[Cell], each: int) -> str:
    """One table per model."""
    parts = [
        f"Exact match on {each} fresh prompts per task, in percent. Tokens per forward: returned ones, a forward\n"
        "counted once for each request in it. Positions per token: what was computed, over the tokens returned.\n"
        "Uncached: answers that are those of the same rule without a cache, right or wrong.\n",
    ]
    for model in dict.fromkeys(cell.model for cell in cells):
        rows = [["cache policy", "unmasking", "overall", *TASKS, "uncached", "tokens/forward", "positions/token"]]
        uncached = {cell.rule: cell for cell in cells if cell.model == model and cell.policy == "none"}
        for cell in cells:
            if cell.model == model:
                exact = (
                    f"{100 * value:.0f}"
                    for value in (cell.overall, *cell.exact.values(), cell.same_as(uncached[cell.rule]))
                )
                costs = f"{cell.tokens_per_forward:.2f}", f"{cell.positions_per_token:.0f}"
                rows.append([cell.policy, cell.rule, *exact, *costs])
        parts.append(f"## {model}\n\n{markdown(rows)}")
    return "\n".join(parts)


def write_csv(cells: Sequence[Cell], path: Path) -> None:
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("model", "cache_policy", "unmasking", *TASKS, "tokens_per_forward", "positions_per_token"))
        for cell in cells:
            exact = (round(value, 4) for value in cell.exact.values())
            costs = round(cell.tokens_per_forward, 4), round(cell.positions_per_token, 2)
            table.writerow((cell.model, cell.policy, cell.rule, *exact, *costs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=DEMO_MODELS, default=list(DEMO_MODELS))
    parser.add_argument("--each", type=int, default=20, help="prompts per task")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cells = []
    for model in args.models:
        engine = Engine.from_config(EngineConfig(DEMO_MODELS[model], SchedulerConfig(8192, 64)))
        todo = list(combinations())
        for policy, rule, options in track(todo, model, console=Console(stderr=True), transient=True):
            cells.append(measure(engine, model, policy, rule, options, args.each))
    (args.out / "report.md").write_text(report(cells, args.each))
    write_csv(cells, args.out / "results.csv")
    from benchmarks.quality_plot import trade_off  # matplotlib is an extra

    trade_off(cells, args.out / "quality.png")
    print(report(cells, args.each))


if __name__ == "__main__":
    main()
