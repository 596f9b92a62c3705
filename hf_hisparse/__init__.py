"""HiSparse for transformers: the full KV in host memory, the hot part on the GPU, exactly the same output."""

from .cache import HiSparseCache
from .enable import disable, enable
from .layer_history import LayerHistory
from .models.quest import Quest
from .plan_report import Plan
from .planner import plan
from .selector import LayerShape, Selector, SelectorState
from .stats import LayerStats, Memory, Stats

__all__ = [
    "HiSparseCache",
    "LayerHistory",
    "LayerShape",
    "LayerStats",
    "Memory",
    "Plan",
    "Quest",
    "Selector",
    "SelectorState",
    "Stats",
    "disable",
    "enable",
    "plan",
]
