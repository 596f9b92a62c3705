"""Flags of several words are taken with `-` and with `_`; a usage line names the command as it is typed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from eval.longbench.__main__ import parse_args as longbench
from eval.needle.__main__ import parse_args as needle


@pytest.mark.parametrize("parse", [longbench, needle])
def test_both_spellings_mean_the_same(parse):
    names = ("--token_budget", "--device_buffer_tokens", "--output_dir")
    flags = [part for name in names for part in (name, "7")] + ["--question_as_decode"]
    found = parse(flags)
    assert parse([flag.replace("_", "-") for flag in flags]) == found != parse([])
    assert found.token_budget == found.device_buffer_tokens == 7 and found.question_as_decode


SOURCES = {path: path.read_text() for path in Path("eval").rglob("*.py")}
PROGRAMS = [path for path, source in SOURCES.items() if "= command_line(" in source]


@pytest.mark.parametrize("path", PROGRAMS, ids=str)
def test_usage_names_the_command(path, monkeypatch, capsys):
    if path.parent.name in ("plots", "policies"):
        pytest.importorskip("matplotlib", reason='the picture needs matplotlib: pip install -e ".[test]"')
    module = ".".join(path.with_suffix("").parts)
    program = importlib.import_module(module)
    monkeypatch.setitem(sys.modules, "__main__", program)
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    with pytest.raises(SystemExit):
        program.main()
    assert capsys.readouterr().out.startswith(f"usage: python -m {module.removesuffix('.__main__')} ")


def test_no_program_has_another_parser():
    assert [path.name for path, source in SOURCES.items() if "ArgumentParser(" in source] == ["flags.py"]
    programs = {path for path, source in SOURCES.items() if '__name__ == "__main__"' in source}
    assert programs - set(PROGRAMS) == {Path("eval/lm_eval.py")}  # lm_eval reads its own
