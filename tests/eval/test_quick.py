"""Every measurement runs through at toy size, and writes its rows with the conditions beside them."""

from __future__ import annotations

import csv
import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the measurements themselves run where there is a GPU"
)


@pytest.mark.parametrize(
    "name",
    [
        "kernels",
        "throughput",
        "prefetch",
        "long_prompt",
        "prefill",
        "capacity",
        "small_card",
        "growth",
        "msa",
        "policies",
        "pinning",
    ],
)
def test_quick(name, tmp_path):
    if name == "policies":
        pytest.importorskip("matplotlib", reason='the picture needs matplotlib: pip install -e ".[test]"')
    output = tmp_path / "rows.csv"
    command = [sys.executable, "-m", f"eval.{name}", "--quick", "--output", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    rows = list(csv.DictReader(output.open()))
    assert len(rows) >= 3
    assert all(row["torch"] == torch.__version__ for row in rows)
    assert rows[0]["command"] == f"python -m eval.{name} --quick"
    if name == "policies":
        assert output.with_suffix(".png").stat().st_size > 20_000
