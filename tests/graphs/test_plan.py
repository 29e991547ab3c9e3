from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from graphs import plan
from graphs.__main__ import main

ARGUMENTS = ["plan", "--trace=sharegpt", "--model=llada-8b", "--gpu=h100", "--num-gpus=1"]


def test_an_installed_sangam_finds_the_checkout(tmp_path: Path) -> None:
    # As the console script, which has no folder of the project on its path.
    code = (
        f"import sys; sys.path.insert(0, {str(plan.CHECKOUT)!r}); import graphs.__main__ as sangam; del sys.path[0]\n"
    )
    code += f"sys.exit(sangam.main({[*ARGUMENTS, '--slo=p99<20']!r}))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "sangam plan: 'p99<20' is no bound" in ran.stderr


def test_without_a_checkout_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan, "CHECKOUT", tmp_path)
    monkeypatch.setattr(plan, "MODULE", "benchmarks.not_installed.command")
    assert main([*ARGUMENTS, "--slo=p99<20s"]) == 2
    assert capsys.readouterr().err == (
        "sangam plan: the simulator is not in the installed package; run it from a checkout\n"
    )


def test_help_loads_no_simulator() -> None:
    code = "import sys; from graphs.__main__ import main\n"
    code += "try: main(['plan', '--help'])\nfinally: print('loaded', sorted(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=plan.CHECKOUT, capture_output=True, text=True, check=False)
    assert "--num-gpus" in ran.stdout
    loaded = ran.stdout.split("loaded", 1)[1]
    assert "'numpy'" not in loaded and "'benchmarks'" not in loaded
