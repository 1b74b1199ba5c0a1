"""Default settings of `train`, for text and for each known task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHORTEST = 8
"""Factor by which the first rows of a curriculum are shorter."""
LEAST_WHOLE = 4 * SHORTEST
"""Least --length with a curriculum: a pair and its query take four tokens."""

CHOICES = {"pairs": ("mqar",), "vocabulary": ("mqar", "s_niah")}
"""Option -> tasks whose definition has it as a free parameter."""

TEXT: dict[str, Any] = {
    "layers": "gdn*3 attention",
    "depth": 4,
    "width": 128,
    "heads": 4,
    "head_dim": 32,
    "window": 256,
    "steps": 1000,
    "batch": 8,
    "length": 256,
    "lr": 3e-3,
    "warmup": 50,
    "lr_end": 0.1,
    "weight_decay": 0.1,
    "eval_every": 100,
    "eval_bytes": 65536,
    "pairs": 0,
    "vocabulary": 0,
    "curriculum": 0,
    "eval_lengths": (),
    "stop_at": None,
    "packed": False,
    "neg_eigval": False,
    "kda_lower_bound": None,
    "gla_conv": False,
    "grad_accum": 1,
    "held_out": 0.1,
    "clip": 1.0,
    "seed": 0,
    "dtype": "float32",
}

RECALL = {"layers": "gdn", "depth": 2, "lr_end": 0.02, "warmup": 200, "eval_every": 250, "stop_at": 0.999}
TRACKING = {"layers": "delta_net", "depth": 1, "batch": 64, "lr_end": 0.02, "eval_every": 100, "eval_bytes": 32768}

TASKS: dict[str, dict[str, Any]] = {
    # The largest size of Zoology's figures. An untrained model writes to its state at every token, and overwrites pairs
    # that are queried later. Heads of 128 start to learn where heads of 64 do not. Short rows start reliably, full rows
    # do not (docs/tasks.md).
    "mqar": RECALL
    | {"pairs": 64, "vocabulary": 8192, "length": 512, "batch": 64, "width": 128, "heads": 4, "head_dim": 128}
    | {"steps": 4000, "curriculum": 1200, "lr": 2e-3, "eval_bytes": 131072},
    "s_niah": RECALL
    | {"vocabulary": 256, "length": 512, "batch": 64, "width": 128, "heads": 2, "head_dim": 64}
    | {"steps": 4000, "lr": 3e-3, "eval_bytes": 262144, "eval_lengths": (2048,)},
    "parity": TRACKING | {"length": 32, "width": 64, "heads": 2, "steps": 400, "eval_lengths": (128, 512)},
    "s5": TRACKING | {"length": 24, "width": 96, "head_dim": 16, "lr": 5e-3, "steps": 1500, "eval_lengths": (48, 96)},
}
"""Task -> settings that differ from TEXT. `defaults` adapts mqar's to other steps, lengths and vocabularies."""

SETTINGS: dict[str | None, dict[str, Any]] = {None: TEXT}
SETTINGS |= {name: TEXT | settings for name, settings in TASKS.items()}


def defaults(task: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a new run. Defaults of mqar are adapted to the given options, so that small runs are accepted.

    Args:
        task: Known task, or None for text.
        given: Setting -> value; None if it was left out.
    """
    found = dict(SETTINGS[task])
    length, vocabulary, steps = (given.get(name) or found[name] for name in ("length", "vocabulary", "steps"))
    if task == "mqar":
        # As many pairs as fit into a row and into the vocabulary, up to the number that is known to be learned.
        found["pairs"] = max(1, min(found["pairs"], length // 4, vocabulary // 2 - 1))
        # The same fraction of a shorter run; a longer run needs no more steps than are known to suffice.
        found["curriculum"] = min(found["curriculum"], steps * found["curriculum"] // found["steps"])
        if length < LEAST_WHOLE:
            found["curriculum"] = 0
    return found
