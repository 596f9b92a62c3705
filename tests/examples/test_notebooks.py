"""The notebooks run from top to bottom, and are committed as they ran."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
NAMES = [
    f"{path.stem}-cpu" for path in NOTEBOOKS
]  # what runs on a GPU machine leaves out: they compute on the CPU

nbformat = pytest.importorskip("nbformat", reason='notebooks need: pip install -e ".[test]"')
nbclient = pytest.importorskip("nbclient", reason='notebooks need: pip install -e ".[test]"')


@pytest.fixture(scope="module")
def cache_folder() -> Path:
    """Where the small model is. With HF_HISPARSE_CACHE set it has to be there, or be fetched."""
    given = os.environ.get("HF_HISPARSE_CACHE")
    folder = Path(given or "~/.cache/hf_hisparse").expanduser()
    if not given and not (folder / "SmolLM2-135M-Instruct").is_dir():
        pytest.skip("the small model is not here: python examples/quickstart.py fetches it")
    return folder


def test_there_are_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["one_prefill_many_questions", "quickstart", "what_is_hot"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_runs_from_top_to_bottom(path, cache_folder):
    notebook = nbformat.read(path, as_version=4)
    path_list = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path_list, "HF_HISPARSE_CACHE": str(cache_folder)}
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute(env=environment)  # raises with the cell and its traceback


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_is_committed_as_it_ran(path):
    """Every cell ran, in order and without an error; nothing is large, nothing says where it ran."""
    assert path.stat().st_size < 200_000
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream")
    assert str(Path.home()) not in path.read_text()
