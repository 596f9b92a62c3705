"""Scores of hand-made predictions are the official ones; the numbers were worked out by hand from the official code."""

from __future__ import annotations

import pytest

from eval.longbench import metrics
from eval.longbench.scores import extract_choice, score, score_e, score_v2
from eval.longbench.tasks import TASKS

CLASSES = ["Food", "Food other", "Animal", "City", "Other city"]

# metric, prediction, answer, score
CASES = [
    ("qa_f1", "The Cat sat.", "a cat", 2 / 3),  # cat, sat against cat
    ("qa_f1", "an apple, an apple", "apple", 2 / 3),
    ("qa_f1", "nothing", "else", 0),
    ("qa_f1", "", "a cat", 0),
    ("qa_f1", "the", "the", 0),  # articles are all there is
    ("qa_f1_zh", "厦门大学", "厦门大学。", 1),
    ("qa_f1_zh", "我来到北京", "我来到北京清华大学", 6 / 7),  # 3 words of 4
    ("rouge", "the cat sat on the mat", "the cat was on the mat", 0.8),  # 4 different words of 5 in sequence
    ("rouge", "", "the cat", 0),
    ("rouge", "dog", "the cat", 0),
    ("rouge_zh", "我来到北京", "我来到北京清华大学", 6 / 7),
    ("classification", "It is Animal", "Animal", 1),
    ("classification", "Animal or City", "City", 1 / 2),
    ("classification", "Food other", "Food other", 1),  # "Food" is part of the right name and does not count
    ("classification", "Food other", "Food", 1 / 2),
    ("classification", "neither", "Food", 0),
    ("retrieval", "Paragraph 3", "Paragraph 3", 1),
    ("retrieval", "Paragraph 3 or 4", "Paragraph 3", 1 / 2),
    ("retrieval", "Paragraph 31", "Paragraph 3", 0),
    ("retrieval_zh", "段落27和段落2", "段落27", 1 / 2),
    ("count", "There are 5 of 12, so 5", "5", 2 / 3),
    ("count", "none", "5", 0),
    ("code_similarity", "    return x\nmore", "return x", 0.8),  # 2 x 8 of 20 characters
    ("code_similarity", "\n\n# a comment\n`x`\nreturn x", "return x", 1),
    ("code_similarity", "// only comments", "return x", 0),
    (
        "code_similarity",
        "\n  \nreturn x",
        "return x",
        0.2,
    ),  # officially a line of blanks is a line: 2 x 1 of 10
]


def ready(metric: str) -> None:
    try:
        metrics.check_installed(metric)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("metric", "prediction", "answer", "expected"), CASES)
def test_a_metric(metric, prediction, answer, expected):
    ready(metric)
    assert metrics.METRICS[metric](prediction, answer, CLASSES) == pytest.approx(expected, abs=1e-6)


def test_every_metric_of_the_tasks_has_a_case():
    assert {task.metric for task in TASKS.values()} == {case[0] for case in CASES} == set(metrics.METRICS)


def test_classification_keeps_the_official_slip():
    # The official loop removes while it iterates, so the name after a removed one is not looked at and stays.
    classes = ["a", "a b", "a b c"]
    assert metrics.classification("a b c", "a b c", classes) == 1 / 2


def test_a_sentence_too_long_for_the_rouge_package_counts_zero():
    ready("rouge")
    words = " ".join(f"w{i}" for i in range(1200))
    assert metrics.rouge(words, words) == 0


def line(pred: str, *answers: str, length: int = 100) -> dict[str, object]:
    return {"pred": pred, "answers": list(answers), "all_classes": CLASSES, "length": length}


def test_a_sample_scores_its_best_answer_and_a_file_the_mean_in_percent():
    assert (
        score("hotpotqa", [line("Paris", "London", "paris"), line("Rome", "Paris"), line("x", "x")]) == 66.67
    )


@pytest.mark.parametrize("task", ["trec", "lsht"])
def test_only_the_first_line_counts(task):
    assert score(task, [line("\nAnimal\nCity", "Animal")]) == 100
    assert score(task, [line("City\nAnimal", "Animal")]) == 0


def test_elsewhere_all_lines_count():
    assert score("hotpotqa", [line("one\ntwo", "one two")]) == 100


def test_e_scores_by_length():
    lines = [line("x", "x", length=3999), line("y", "x", length=4000), line("x", "x", length=7999)]
    assert score_e("qasper", lines) == {"0-4k": 100, "4-8k": 50, "8k+": None}


@pytest.mark.parametrize(
    ("response", "choice"),
    [
        ("The correct answer is (B).", "B"),
        ("**The correct answer is (C)**", "C"),
        ("The correct answer is D", "D"),
        ("The correct answer is A, no: The correct answer is (B)", "B"),  # brackets are looked for first
        ("The correct answer is (E)", None),
        ("B", None),
    ],
)
def test_the_choice_of_v2(response, choice):
    assert extract_choice(response) == choice


def test_v2_scores_by_difficulty_and_length():
    def line(judge: bool, difficulty: str, length: str) -> dict[str, object]:
        return {"judge": judge, "difficulty": difficulty, "length": length}

    lines = [line(True, "easy", "short"), line(False, "hard", "short"), line(True, "hard", "medium")]
    assert score_v2(lines) == {
        "Overall": 66.7,
        "Easy": 100,
        "Hard": 50,
        "Short": 50,
        "Medium": 100,
        "Long": None,
    }
