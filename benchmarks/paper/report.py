"""What was compared, as a Markdown document."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import get_args

from benchmarks.paper import knees, table
from benchmarks.paper.figures import HEADLINES, WAYS
from benchmarks.paper.orderings import FURTHER, SATURATED, TIE, Ordering, under
from benchmarks.paper.points import LLADA_SHAREGPT, PAIRS, Calibration
from benchmarks.paper.quantities import NotRun, Seeded
from benchmarks.paper.table import number
from benchmarks.simulator import hardware
from benchmarks.simulator.config import calibrated

CAPTIONS = {
    3: "A decode iteration against the batch, at 1024 tokens; the text gives no numbers.",
    5: "Three static splits. Bars: medians over requests; whiskers: range over seeds.",
    8: "One GPU: one request at a time (Fast-dLLM) and colocated.",
    9: "Three ways to serve on eight GPUs.",
    10: "Of each request, summed over its blocks; one line per seed.",
    11: "Token budgets. Below: the request nearest to p50 and to p99 of every budget, of the first seed.",
    12: "Hybrid with a low and a high budget, LLaDA-8B on ShareGPT.",
}

_KINDS: dict[table.Kind, str] = {
    "number": "results",
    "percent": "differences in percent",
    "ordering": "orderings",
    "bound": "bounds",
    "trace": "lengths of traces",
    "setting": "settings",
    "not simulated": "not simulated",
    "not run": "not run",
}

LEFT_OUT = """\
- Forwards per block, prefill time, decode time against batch: all absolute numbers rest on them. Ours are a roofline
  and the constants above.
- The prompt cap of its ShareGPT trace (about 2048 by its Table 1; no public ShareGPT trace fits).
- Figure 8's run length, the loads of Figure 11's breakdowns and of the KV transfers; which of 2.5 s and 2.7 s is which
  (Figure 10b).
- What a hand-over costs a prefill worker: see what the calibration decides.
- Whether prefill tokens or all tokens count as outstanding, and how many prefills a prefill worker takes in one step.
- How one GPU sustains 1.0 requests/s (Figure 8) when eight take 7.1 s at 7.5 (Figure 9). Ours is past its knee at both.
- Its curves: what the text does not name is in images only, so that there are few crosses.
"""


def document(seededs: Sequence[Seeded], drawn: Sequence[int], command: str) -> str:
    """Args:
    drawn: the figures beside it.
    command: that made it.
    """
    rows = table.rows(seededs)
    return f"""# The paper's figures and claims, simulated

`{command}`

{seededs[0].num_requests} requests per point (the paper: 4000), seeds {", ".join(str(s.seed) for s in seededs)}; the
calibration saw seeds 1 to 4. Ours is the median over seeds, their range in brackets. Nothing here was
measured on a GPU. Near saturation absolute values say little (3% more load double them); orderings, loads at equal
latency and same-seed ratios say more.

## In short

{_counts(rows, seededs)}
## Orderings

{_orderings(rows, seededs)}
## Loads

The load at which our curve has the latency that the paper states: within {knees.TOLERANCE:.0%} is the goal. Between two
loads a latency's logarithm is taken as linear. Loads of ours are here what the arrivals of a seed really were:
{_achieved(seededs)} of what was asked for.

{knees.markdown(knees.at_same_latency(seededs))}
Our own knees: the load at which the mean is {SATURATED:g} times that of colocated at the lowest load. The paper's text
has no latency at low load, so that its knees by this definition are not known.

{knees.own_knees(seededs)}
## What is calibrated

Two constants for each model and GPU: the part of the compute rates that is reached, and by how much a hand-over keeps a
prefill worker. Forwards per block are a fact of a model on a trace; the paper does not tell them.

{_constants()}
Forwards, and an efficiency for each trace, were fitted to the paper's latencies on seeds 1 to 4; the efficiency is the
geometric mean of a model's two. The hand-over's 4 ms were chosen by hand, see below.

## What the calibration decides

Mean latency in seconds, {" / ".join(way.label for way in WAYS)};
in brackets how many seeds have them in the same order as the medians.

{_calibrations(seededs)}
{_plots(drawn)}## What the paper's text leaves out

{LEFT_OUT}
## Every claim

Ratio: ours over the paper's. Percentages: how much better one of two configurations is on the same seed.

{table.markdown(rows)}"""


def _counts(rows: Sequence[table.Row], seededs: Sequence[Seeded]) -> str:
    kinds = [row.kind for row in rows]
    latencies = [row for row in rows if row.claim.unit in ("s", "ms")]
    percents = [row for row in rows if row.kind == "percent" and row.claim.number is not None]
    num_close = sum(abs(row.median - (row.claim.number or 0)) <= 5 for row in percents)
    loads = knees.at_same_latency(seededs)
    counts = ", ".join(f"{kinds.count(kind)} {name}" for kind, name in _KINDS.items() if kind in kinds)
    lines = [
        f"{len(rows)} claims: {counts}.",
        f"Results: {_within(rows)}. Latencies alone: {_within(latencies)}.",
        f"Differences: {sum(row.median > 0 for row in percents)} of {len(percents)} with a number have the paper's "
        f"sign, {num_close} are within 5 points of it.",
        f"Orderings: {_held([row for row in rows if row.kind == 'ordering'])}.",
        f"Loads at equal latency: {sum(row.is_within for row in loads)} of {len(loads)} within {knees.TOLERANCE:.0%}.",
    ]
    return "".join(f"- {line}\n" for line in lines)


def _within(rows: Sequence[table.Row]) -> str:
    (in_10, total), (in_25, _) = (table.within(rows, tolerance) for tolerance in (0.10, 0.25))
    return f"{in_10} of {total} within 10%, {in_25} within 25%"


def _achieved(seededs: Sequence[Seeded]) -> str:
    return ", ".join(f"{seeded.achieved(LLADA_SHAREGPT):.1%}" for seeded in seededs)


def _held(orderings: Sequence[table.Row]) -> str:
    always = sum(row.num_held == len(row.values) for row in orderings)
    never = sum(row.num_held == 0 for row in orderings)
    return (
        f"{always} of {len(orderings)} hold in every seed, {never} in none, {len(orderings) - always - never} in some"
    )


def _orderings(rows: Sequence[table.Row], seededs: Sequence[Seeded]) -> str:
    lines = ["| | as tested | holds |", "|---|---|---|"]
    for row in rows:
        if row.kind == "ordering":
            claim = row.claim
            of = ", ".join(part for part in (claim.model, claim.trace) if part)
            lines.append(f"| {claim.id} | {of}: {row.note} | {row.num_held} of {len(row.values)} |")
    lines += [f"| | {ordering.says} | {_times(ordering, seededs)} |" for ordering in FURTHER]
    return "\n".join(lines) + f'\n\nA tie ("at most", ≤) is within {TIE:.0%}.\n'


def _times(ordering: Ordering, seededs: Sequence[Seeded]) -> str:
    try:
        return f"{sum(ordering.holds(seeded) for seeded in seededs)} of {len(seededs)}"
    except NotRun:
        return "not run"


def _constants() -> str:
    lines = ["| | efficiency | hand-over, ms | forwards per block |", "|---|---|---|---|"]
    for model in dict.fromkeys(pair.model for pair in PAIRS):
        pairs = [pair for pair in PAIRS if pair.model == model]
        config = calibrated(model, pairs[0].trace)
        steps = hardware.read("calibration.yaml")[model]["steps_per_block"]
        forwards = ", ".join(f"{pair.label.partition(', ')[2]} {steps[pair.trace]:g}" for pair in pairs)
        name = pairs[0].label.partition(",")[0]
        lines.append(f"| {name} | {config.rates.overall:g} | {1e3 * config.hand_over_s:g} | {forwards} |")
    return "\n".join(lines) + "\n"


def _calibrations(seededs: Sequence[Seeded]) -> str:
    lines = ["| | " + " | ".join(get_args(Calibration)) + " |", "|---" * (1 + len(get_args(Calibration))) + "|"]
    for pair, load in HEADLINES:
        cells = []
        for calibration in get_args(Calibration):
            try:
                per_seed = [under(calibration, pair, load)(seeded) for seeded in seededs]
            except NotRun:
                cells.append("not run")
                continue
            middles = [statistics.median(values) for values in zip(*per_seed, strict=True)]
            order = sorted(range(len(WAYS)), key=middles.__getitem__)
            num_same = sum(sorted(range(len(WAYS)), key=means.__getitem__) == order for means in per_seed)
            cells.append(f"{' / '.join(map(number, middles))} ({num_same} of {len(per_seed)})")
        lines.append(f"| {pair.label} at {load:g} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _plots(drawn: Sequence[int]) -> str:
    return "".join(f"## Figure {at}\n\n{CAPTIONS[at]}\n\n![Figure {at}](figure{at}.png)\n\n" for at in drawn)
