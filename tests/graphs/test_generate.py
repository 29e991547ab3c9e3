"""The arguments of `sangam generate`; what it does with them is in tests/components."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from components.config import DEMO_MODELS
from graphs import generate
from graphs.__main__ import main


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the engine's side would have been given."""
    calls: list[tuple[Any, ...]] = []

    def run(*arguments: Any) -> int:
        calls.append(arguments)
        return 7

    monkeypatch.setattr(generate.importlib, "import_module", lambda name: SimpleNamespace(run=run))
    return calls


def test_defaults(seen: list[tuple[Any, ...]]) -> None:
    assert main(["generate", "in.jsonl", "out.jsonl"]) == 7
    source, target, worker, router, options = seen[0]
    assert (source, target, options) == ("in.jsonl", "out.jsonl", {})
    assert (worker.model, worker.token_budget, router.default_canvas_length) == (DEMO_MODELS["demo"], 2048, 128)
    assert (worker.kv_cache_tokens, worker.max_num_seqs) == ("auto", sys.maxsize)  # pages are the only bound


def test_on_a_gpu_the_largest_step_has_a_size(seen: list[tuple[Any, ...]]) -> None:
    main(["generate", "in.jsonl", "out.jsonl", "--device", "cuda", "--dtype", "float16"])
    main(["generate", "in.jsonl", "out.jsonl", "--device", "cuda", "--kv-cache-tokens", "4096"])
    assert [worker.max_num_seqs for _, _, worker, _, _ in seen] == [256, 4096]


def test_flags(seen: list[tuple[Any, ...]]) -> None:
    engine = [
        "--model",
        "m",
        "--max-num-seqs",
        "3",
        "--kv-cache-tokens",
        "512",
        "--device",
        "cuda",
        "--context-length=99",
    ]
    options = ["--max-tokens", "9", "--stop", "a", "--stop", "b", "--ignore-eos", "--block-length", "8", "--seed", "1"]
    main(["generate", "-", "-", *engine, *options])
    _, _, worker, router, given = seen[0]
    assert (worker.model, worker.max_num_seqs, worker.kv_cache_tokens) == (Path("m"), 3, 512)
    assert (worker.device, router.context_length) == ("cuda", 99)
    assert given == {"max_tokens": 9, "stop": ["a", "b"], "ignore_eos": True, "block_length": 8, "seed": 1}


def test_a_wrong_value_is_one_line_and_2(seen: list[tuple[Any, ...]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "in", "out", "--token-budget", "0"]) == 2
    assert capsys.readouterr().err.startswith("sangam generate: colocated_worker.token_budget: ") and not seen


def test_help_imports_no_engine() -> None:
    code = (
        "import contextlib, io, sys\nfrom graphs.__main__ import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    main(['generate', '--help'])\n"
        "assert '--confidence-threshold' in out.getvalue()\n"
        "bad = {'torch', 'backend', 'components.generate'} & set(sys.modules)\nassert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_dllm_option_is_a_flag() -> None:
    from components.request_parser import DLLM_OPTIONS
    from graphs.sampling_flags import DLLM_FLAGS

    assert set(DLLM_FLAGS) == set(DLLM_OPTIONS)
