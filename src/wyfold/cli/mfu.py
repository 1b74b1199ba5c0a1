"""How fast a run is, as a share of what its device could do.

    MFU = operations of a step / (seconds of a step x processes x peak of one device)

Operations are those that the model needs, forward and backward, counted by PyTorch's counter on a copy of the model
that has shapes and no numbers (`wyfold.integrations.flops` has the operators' formulas): 2 a multiply-add of every
matrix product, softmax attention without regard to its mask, nothing for what is recomputed. Packed rows are counted
as rows of full length. The peak is the data sheet's, dense, in the dtype that products are computed in.
"""

from __future__ import annotations

import torch

from wyfold.cli.recipe import Recipe, build

PEAKS = {
    "B200": {"bfloat16": 2250e12},
    "H200": {"bfloat16": 989e12, "float32": 67e12},
    "H100 PCIe": {"bfloat16": 756e12, "float32": 51e12},
    "H100 NVL": {"bfloat16": 835e12, "float32": 60e12},
    "H100": {"bfloat16": 989e12, "float32": 67e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12},
}
"""Part of a GPU's name -> operations per second by dtype; the first that fits holds."""


def step_flops(recipe: Recipe, vocabulary: int, answers: int | None = None) -> int:
    """Operations of one optimizer step over all replicas, where all places of a row are asked for, or so many."""
    from torch.utils.flop_counter import FlopCounterMode

    from wyfold.integrations import flops

    flops.register()
    with torch.device("meta"):
        model = build(recipe, vocabulary=vocabulary)
        ids = torch.zeros(recipe.batch, recipe.length, dtype=torch.int64)
        places = None if answers is None else torch.zeros(recipe.batch, answers, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        _, loss = model(ids, ids if places is None else places, places=places)
        loss.backward()
    return counter.get_total_flops() * recipe.grad_accum * recipe.replicas


def peak(device: torch.device, dtype: str) -> float | None:
    """Operations per second that a device is sold for; None where that is not known here."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peaks.get(dtype) for part, peaks in PEAKS.items() if part in name), None)
