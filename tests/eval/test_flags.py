"""Flags of several words are taken with `-` and with `_`; a usage line names the command as it is typed."""

from __future__ import annotations

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


PROGRAMS = [path for path in Path("eval").rglob("*.py") if "ArgumentParser(" in path.read_text()]


@pytest.mark.parametrize("path", PROGRAMS, ids=str)
def test_usage_names_the_command(path):
    module = ".".join(path.with_suffix("").parts).removesuffix(".__main__")
    assert f'prog="python -m {module}"' in path.read_text()
