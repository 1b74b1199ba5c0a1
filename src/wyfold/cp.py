"""Context parallelism: one buffer of tokens over the ranks of a group."""

from wyfold.parallel.context import ContextParallel, build_cp_context

__all__ = ["ContextParallel", "build_cp_context"]
