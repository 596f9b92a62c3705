"""What tests/sanitizer.py counts."""

import os
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from eval import environment
from tests import sanitizer
from tests.sanitizer import (
    FAULTS,
    TOOLS,
    Collector,
    Portion,
    check,
    check_tools,
    counted,
    kernel_tests,
    own_kernels,
    portions,
    workers,
)

TESTS = """\
tests/kernels/test_append.py::test_a[1] PASSED [ 33%]
tests/kernels/test_append.py::test_b {} [ 66%]
"""


def test_each_test_is_in_one_portion_and_the_long_ones_of_a_file_are_dealt_out():
    tests = [f"a.py::long[{size}]" for size in range(3)] + [f"a.py::short[{size}]" for size in range(6)]
    collected = Collector()
    collected.tests = [*tests, "b.py::test"]
    parts = list(portions(collected, together=4))
    assert sorted(test for part in parts for test in part.tests) == sorted(collected.tests)
    assert [len(part.tests) for part in parts] == [3, 3, 3, 1]
    assert all(part.tests[0].startswith("a.py::long") for part in parts[:3])


def test_tests_that_capture_a_graph_are_among_themselves():
    collected = kernel_tests(["decode_steps"])
    parts = list(portions(collected, together=len(collected.tests)))
    assert [part.captures for part in parts] == [False, True]
    assert {part.file for part in parts} == {"decode_steps"}
    assert all("cuda_graph" in test for test in parts[1].tests)
    assert not any("cuda_graph" in test for test in parts[0].tests)


def test_all_kernels_are_looked_at_and_no_other():
    sources = "".join(path.read_text() for path in Path("kernels").glob("*.py"))
    assert own_kernels() == sorted(re.findall(r"^def (_\w+_kernel)\(", sources, re.MULTILINE))


def test_the_faults_are_there():
    assert all(f"def {test}(" in FAULTS.read_text() for test in TOOLS.values())


def test_a_run_seen_to_the_end():
    counts = counted(TESTS.format("FAILED") + "========= ERROR SUMMARY: 7 errors\n", 2)
    assert (counts["passed"], counts["failed"], counts["not_run"]) == (1, 1, 0)
    assert (counts["found"], counts["seen_to_the_end"]) == (7, 1)


def test_a_run_cut_off_shows_what_it_found_and_what_it_did_not_run():
    race = "========= Error: Race reported between Write access at 0x90 and Read access at 0x110\n"
    counts = counted(TESTS.format("") + race, 3)
    assert (counts["passed"], counts["not_run"]) == (1, 2)
    assert (counts["found"], counts["seen_to_the_end"]) == (1, 0)


def test_a_clean_run():
    clean = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
    counts = counted(TESTS.format("SKIPPED") + clean, 2)
    assert (counts["skipped"], counts["found"], counts["seen_to_the_end"]) == (1, 0, 1)


def test_what_a_tool_prints_within_a_test_hides_neither_its_end_nor_the_finding():
    output = "t.py::test_a ========= Invalid __global__ read of size 4 bytes\n=========     at 0x10\nPASSED [ 50%]\n"
    counts = counted(output + "t.py::test_b SKIPPED (no GPU here) [100%]\n", 2)
    assert (counts["passed"], counts["skipped"], counts["not_run"], counts["found"]) == (1, 1, 0, 1)


def test_what_pytest_repeats_in_its_summary_is_not_counted_again():
    counts = counted(
        TESTS.format("FAILED") + "SKIPPED [1] t.py:6: no GPU\nFAILED t.py::test_b - 3 PASSED\n", 3
    )
    assert (counts["passed"], counts["failed"], counts["skipped"], counts["not_run"]) == (1, 1, 0, 1)


def stand_in(folder, monkeypatch, does='while [ "${1#--}" != "$1" ]; do shift 2; done\nexec "$@"'):
    """A compute-sanitizer that, if nothing else is said, finds nothing: it runs the command after its own options."""
    tool = folder / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{does}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


_BROKEN = """
import os
import pytest

@pytest.fixture
def broken():
    raise RuntimeError

def test_good(): pass
def test_error(broken): pass
def test_crash(): os._exit(139)
"""


@pytest.mark.parametrize(
    ("tests", "passed", "failed"),
    [(["good"], 1, 0), (["good", "error"], 1, 1), (["good", "crash"], 1, 1), (["unknown"], 0, 1)],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_a_fixture_that_fails_and_a_process_that_dies_are_failures(
    tmp_path, monkeypatch, tests, passed, failed
):
    stand_in(tmp_path, monkeypatch)
    file = tmp_path / "test_broken.py"
    file.write_text(_BROKEN)
    portion = Portion(tuple(f"{file}::test_{name}" for name in tests))
    counts = check("memcheck", portion, ["_resolve_kernel"], time.monotonic() + 60)
    assert (counts["passed"], counts["failed"], counts["not_run"]) == (passed, failed, 0)


def test_a_tool_that_finds_nothing_wrong_where_something_is_is_not_believed(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch)
    with pytest.raises(SystemExit, match="memcheck does not find test_a_read_past_the_end"):
        check_tools(["memcheck"], time.monotonic() + 60)


@pytest.mark.parametrize(
    "printed",
    [
        "========= Error: No attachable process found. compute-sanitizer timed-out.",
        "========= Program hit CUDA_ERROR_NOT_FOUND (error 500) on CUDA API call\n========= ERROR SUMMARY: 1 error",
    ],
    ids=["the-tool-itself-fails", "not-in-a-kernel"],
)
def test_what_is_found_elsewhere_than_in_the_kernel_does_not_count(tmp_path, monkeypatch, printed):
    stand_in(tmp_path, monkeypatch, f"echo '{printed}'")
    with pytest.raises(SystemExit, match="memcheck does not find"):
        check_tools(["memcheck"], time.monotonic() + 60)


@pytest.mark.parametrize("tool, kernel", [("memcheck", "read"), ("racecheck", "write")])
def test_a_tool_that_names_the_kernel_is_believed(tmp_path, monkeypatch, tool, kernel):
    printed = f"========= Error: something\n=========     at _faulty_{kernel}_kernel+0x90\n========= ERROR SUMMARY: 1 error"
    stand_in(tmp_path, monkeypatch, f"echo '{printed}'")
    check_tools([tool], time.monotonic() + 60)


def test_a_tool_that_has_no_time_is_not_blamed(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "sleep 60")
    with pytest.raises(SystemExit, match="--seconds are over"):
        check_tools(["memcheck"], time.monotonic() + 0.1)


def test_bytes_that_are_no_text_are_no_end(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, r"printf '\377\n========= ERROR SUMMARY: 2 errors\n'")
    counts = check("memcheck", Portion(("a.py::test",)), [], time.monotonic() + 60)
    assert counts["found"] == 2


def test_ctrl_c_ends_what_runs_and_begins_no_more(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, f"echo $$ >> {tmp_path}/started\nexec sleep 60")
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt), workers(2) as pool:
        list(pool.map(lambda _: check("memcheck", Portion(("a.py::test",)), [], began + 60), range(4)))
    pool.shutdown()
    assert time.monotonic() - began < 30
    started = (tmp_path / "started").read_text().split()
    assert len(started) == 2
    assert not any(Path(f"/proc/{process}").exists() for process in started)


@pytest.mark.parametrize("name", ["nonsense", "quiet"])
def test_kernels_that_no_test_launches_are_named(tmp_path, monkeypatch, name):
    (tmp_path / "test_quiet.py").write_text("def test_that_launches_nothing(): pass")
    monkeypatch.setattr(sanitizer, "KERNELS", tmp_path)
    with pytest.raises(SystemExit, match=f"no tests of {name}"):
        kernel_tests([name])


def prepare(monkeypatch, output: Path) -> list[tuple[str, ...]]:
    """Let one test of `append` run under no tool; what ran."""
    runs = []

    def run(tool: str, portion: Portion, *args: object) -> tuple[Counter[str], str]:
        runs.append((tool, *portion.tests))
        return counted("tests/kernels/test_append.py::test_a PASSED [100%]\n", 1), ""

    collected = Collector()
    collected.tests = ["tests/kernels/test_append.py::test_a"]
    monkeypatch.setattr(sanitizer, "run", run)
    monkeypatch.setattr(sanitizer, "kernel_tests", lambda names: collected)
    monkeypatch.setattr(sanitizer, "check_tools", lambda *args: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("shutil.which", lambda name: name)
    for name in ("link_bandwidth", "memory_bandwidth"):
        monkeypatch.setattr(environment, name, lambda: 0.0)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setattr("sys.argv", ["sanitizer", "--tools", "memcheck", "memcheck", "--output", str(output)])
    return runs


def test_a_tool_named_twice_runs_once(tmp_path, monkeypatch, capsys):
    runs = prepare(monkeypatch, tmp_path / "all.csv")
    sanitizer.main()
    assert runs == [("memcheck", "tests/kernels/test_append.py::test_a")]
    assert "'tests': 1, 'passed': 1" in capsys.readouterr().out


def test_rows_of_what_does_not_run_again_stay(tmp_path, monkeypatch):
    output = tmp_path / "all.csv"
    rows = [("memcheck", "fetch", "5"), ("racecheck", "append", "6"), ("memcheck", "append", "7")]
    output.write_text("tool,kernel,passed,failed\n" + "".join(f"{','.join(row)},1\n" for row in rows))
    prepare(monkeypatch, output)
    sanitizer.main()  # ends well: that something failed in an earlier run is that run's
    found = [(row["tool"], row["kernel"], row["passed"]) for row in environment.read_csv(output)]
    assert found == [*rows[:2], ("memcheck", "append", "1")]


@pytest.mark.parametrize("option", ["--jobs", "--together"])
@pytest.mark.parametrize("number", ["0", "-1"])
def test_fewer_than_one_is_named(monkeypatch, capsys, option, number):
    monkeypatch.setattr("sys.argv", ["sanitizer", option, number])
    with pytest.raises(SystemExit):
        sanitizer.main()
    assert f"{option}: must be at least 1, got {number}" in capsys.readouterr().err
