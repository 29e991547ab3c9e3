"""The results of `run_all` as a page that a person reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.roofline import decode_s, prefill_s
from benchmarks.gpu.shapes import shapes
from benchmarks.simulator.hardware import GPU, gpus

_OF_GPU = {"H200": "h200", "H100": "h100", "A100": "a100", "L40S": "l40s", "B200": "b200"}


def document(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    lines = ["# One GPU", "", ", ".join(f"{key} {value}" for key, value in machine.items()), ""]
    gpu = next((gpus()[name] for part, name in _OF_GPU.items() if part in machine.get("gpu", "")), None)
    if "checks" in results:
        checks = results["checks"]
        code = checks.get("exit_code")
        ended = "cut off" if code is None else f"exit code {code}"
        lines += [f"Checks (`pytest -m gpu`): {ended}", "", "```", checks.get("output", ""), "```", ""]
    for name, found in results.items():
        if name in shapes():
            lines += _of_model(name, found, gpu)
    return "\n".join(lines) + "\n"


def _of_model(name: str, found: Mapping[str, Any], gpu: GPU | None) -> list[str]:
    lines = [f"## {name}, random weights", ""]
    if "start_s" in found:
        lines += [f"Weights made, graphs recorded, ready in {found['start_s']:.0f} s.", ""]
    if "step_times" in found:
        lines += _step_times(name, found["step_times"], gpu)
        for what in ("graphs, each step waited for", "no graphs either"):
            if what in found:
                lines += [_beside(what, found[what], found["step_times"]), ""]
    for batch, share in found.get("busy_shares", {}).items():
        said = (
            "nothing seen by the profiler"
            if share is None
            else f"{share:.1%} busy or more (gaps between a graph's kernels count as idle)"
        )
        lines += [f"GPU while {batch} blocks are denoised: {said}.", ""]
    for failure in found.get("failures", ()):
        lines += ["A part failed:", "", "```", failure.rstrip(), "```", ""]
    if "serving" in found:
        lines += _serving(found["serving"], found["service_s"])
    return lines


def _step_times(name: str, times: Sequence[Mapping[str, Any]], gpu: GPU | None) -> list[str]:
    lines = ["| step | tokens of KV or prefill | ms | roofline ms | ratio |", "|---|---|---|---|---|"]
    model = shapes()[name]
    for of in times:
        batch, length, seconds = of["num_decodes"], of["context"] or of["prefill_tokens"], of["seconds"]
        step = f"decode, {batch}" if batch else "prefill"
        least = None
        if gpu is not None:
            least = decode_s(model, gpu, batch, length) if batch else prefill_s(model, gpu, length)
        compared = f"{least * 1e3:.2f} | {seconds / least:.2f}" if least else "- | -"
        lines.append(f"| {step} | {length} | {seconds * 1e3:.2f} | {compared} |")
    return [*lines, ""]


def _beside(what: str, times: Sequence[Mapping[str, Any]], best: Sequence[Mapping[str, Any]]) -> str:
    """Step times of another way to run decodes, and how much longer they are."""
    known = {(of["num_decodes"], of["context"]): of["seconds"] for of in best}
    said = []
    for of in times:
        batch, seconds = of["num_decodes"], of["seconds"]
        if (batch, of["context"]) in known:
            said.append(f"{batch}: {seconds * 1e3:.2f} ms ({seconds / known[batch, of['context']]:.2f}x)")
    return f"Decodes with {what}: {', '.join(said)}."


def _serving(runs: Sequence[Mapping[str, Any]], services: Sequence[float]) -> list[str]:
    lines = [
        f"One request at a time takes {sum(services) / len(services):.2f} s in the mean. Under a Poisson load:",
        "",
        "| requests/s | token budget | mean s | worst s | one at a time has that mean at | ratio |",
        "|---|---|---|---|---|---|",
    ]
    for of in runs:
        rate, alone = of["rate"], of["one_at_a_time_rate"]
        ratio = f"{rate / alone:.1f}" if alone else "never"
        latencies = f"{of['mean_s']:.2f} | {of['worst_s']:.2f}"
        lines.append(f"| {rate:g} | {of['token_budget']} | {latencies} | {alone:.2f}/s | {ratio} |")
    return [*lines, ""]
