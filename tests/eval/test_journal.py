"""A journal loses no line, repeats none, and says when it cannot be trusted."""

from __future__ import annotations

import pytest

from eval.journal import Journal, claim, read_journals


def write(path, *names):
    with Journal(path) as journal:
        for name in names:
            journal.append({"key": name, "text": "Zeile\n二"})


def test_lines_come_back_from_all_files(tmp_path):
    write(tmp_path / "a.0.jsonl", "x", "y")
    write(tmp_path / "a.1.jsonl", "z")
    write(tmp_path / "a.0.jsonl", "w")
    entries = read_journals(tmp_path.glob("a.*.jsonl"))
    assert list(entries) == ["x", "y", "w", "z"]
    assert entries["z"]["text"] == "Zeile\n二"


@pytest.mark.parametrize("torn", [b'{"key": "z", "te', b'{"key": "z", "text": "\xe4\xba', b'{"key": "z"}'])
def test_a_torn_last_line_is_not_read_and_is_cut_off(tmp_path, torn):
    path = tmp_path / "a.0.jsonl"
    write(path, "x", "y")
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert list(read_journals([path])) == ["x", "y"]
    write(path)
    assert path.read_bytes() == whole


def test_a_file_that_was_only_begun_is_empty(tmp_path):
    path = tmp_path / "a.0.jsonl"
    path.write_bytes(b'{"key"')
    assert read_journals([path]) == {}
    write(path, "x")
    assert list(read_journals([path])) == ["x"]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "a.0.jsonl"
    path.write_bytes(b'{"key": "x"}\n{"ke\n{"key": "y"}\n')
    with pytest.raises(ValueError, match=r"a\.0\.jsonl, line 2 is not JSON"):
        read_journals([path])


def test_two_processes_do_not_write_one_journal(tmp_path):
    with Journal(tmp_path / "a.0.jsonl"), pytest.raises(RuntimeError, match="written by another process"):
        Journal(tmp_path / "a.0.jsonl")
    write(tmp_path / "a.0.jsonl", "x")


def test_results_of_other_settings_are_not_mixed(tmp_path):
    claim(tmp_path / "run", {"method": "hisparse", "max_length": 100, "folder": None})
    claim(tmp_path / "run", {"method": "hisparse", "max_length": 100, "folder": None})
    with pytest.raises(ValueError, match="max_length=100 there, 200 asked"):
        claim(tmp_path / "run", {"method": "hisparse", "max_length": 200, "folder": None})


def test_broken_settings_name_file_and_line(tmp_path):
    claim(tmp_path, {"method": "hisparse"})
    (tmp_path / "settings.json").write_text('{\n"method": "hisp')
    with pytest.raises(ValueError, match=r"settings\.json, line 2 is not JSON"):
        claim(tmp_path, {"method": "hisparse"})
    (tmp_path / "settings.json").write_text("[]")
    with pytest.raises(ValueError, match=r"settings\.json is list, must be a JSON object"):
        claim(tmp_path, {"method": "hisparse"})
