"""Context parallelism: one buffer of tokens over the ranks of a group."""

from wyfold.context_parallel.build_context import build_cp_context
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.watchdog import RankLost, Watch

__all__ = ["ContextParallel", "RankLost", "Watch", "build_cp_context"]
