"""What tests/sanitizer.py counts."""

from tests.sanitizer import counted, portions

TESTS = """\
tests/kernels/test_append.py::test_a[1] PASSED [ 33%]
tests/kernels/test_append.py::test_b {} [ 66%]
"""


def test_each_test_is_in_one_portion_and_the_long_ones_of_a_file_are_dealt_out():
    tests = [f"a.py::long[{size}]" for size in range(3)] + [f"a.py::short[{size}]" for size in range(6)]
    parts = list(portions([*tests, "b.py::test"], together=4))
    assert sorted(test for part in parts for test in part) == sorted([*tests, "b.py::test"])
    assert [len(part) for part in parts] == [3, 3, 3, 1]
    assert all(part[0].startswith("a.py::long") for part in parts[:3])


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
