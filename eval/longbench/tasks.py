"""The 21 tasks of LongBench v1: how long an answer may be, how it is scored, how it is asked for.

Numbers and lists are those of the official `pred.py`, `eval.py` and `dataset2maxlen.json`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes
    ----------
    max_new_tokens : int
    metric : str
        A key of `eval.longbench.metrics.METRICS`.
    in_e : bool
        Whether LongBench-E has it too.
    chat : bool
        Whether the prompt goes through the model's chat template.
    first_line : bool
        Whether only the answer's first line is scored.
    stop_at_newline : bool
        Whether a newline ends the answer.
    """

    max_new_tokens: int
    metric: str
    in_e: bool = False
    chat: bool = True
    first_line: bool = False
    stop_at_newline: bool = False


TASKS = {
    "narrativeqa": Task(128, "qa_f1"),
    "qasper": Task(128, "qa_f1", in_e=True),
    "multifieldqa_en": Task(64, "qa_f1", in_e=True),
    "multifieldqa_zh": Task(64, "qa_f1_zh"),
    "hotpotqa": Task(32, "qa_f1", in_e=True),
    "2wikimqa": Task(32, "qa_f1", in_e=True),
    "musique": Task(32, "qa_f1"),
    "dureader": Task(128, "rouge_zh"),
    "gov_report": Task(512, "rouge", in_e=True),
    "qmsum": Task(512, "rouge"),
    "multi_news": Task(512, "rouge", in_e=True),
    "vcsum": Task(512, "rouge_zh"),
    "trec": Task(64, "classification", in_e=True, chat=False, first_line=True),
    "triviaqa": Task(32, "qa_f1", in_e=True, chat=False, first_line=True),
    "samsum": Task(128, "rouge", in_e=True, chat=False, first_line=True, stop_at_newline=True),
    "lsht": Task(64, "classification", chat=False, first_line=True),
    "passage_count": Task(32, "count", in_e=True),
    "passage_retrieval_en": Task(32, "retrieval", in_e=True),
    "passage_retrieval_zh": Task(32, "retrieval_zh"),
    "lcc": Task(64, "code_similarity", in_e=True, chat=False),
    "repobench-p": Task(64, "code_similarity", in_e=True, chat=False),
}
