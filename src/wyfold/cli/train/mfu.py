"""Model FLOPs utilisation (MFU) of a training run.

    MFU = operations of a step / (seconds of a step x processes x peak of one device)

Operations are those of the model's definition, forward and backward. PyTorch's counter counts them on a copy of the
model on the meta device; `wyfold.integrations.flops` has the formulas of the operators. A multiply-add of a matrix
product counts 2, softmax attention ignores its mask, and recomputation counts nothing. Packed rows count as rows of
full length. The peak is the dense peak of the data sheet, in the dtype of the matrix products.
"""

from __future__ import annotations

import torch

from wyfold.cli.train.recipe import Recipe, build

PEAKS = {
    "B200": {"bfloat16": 2250e12},
    "H200": {"bfloat16": 989e12, "float32": 67e12},
    "H100 PCIe": {"bfloat16": 756e12, "float32": 51e12},
    "H100 NVL": {"bfloat16": 835e12, "float32": 60e12},
    "H100": {"bfloat16": 989e12, "float32": 67e12},
    "A100": {"bfloat16": 312e12, "float32": 19.5e12},
}
"""Part of a GPU's name -> dtype -> operations per second. The first entry that matches is used."""


def step_flops(recipe: Recipe, vocabulary: int, answers: int | None = None) -> int:
    """Operations of one optimizer step over all replicas.

    Args:
        recipe: Recipe of the run.
        vocabulary: Number of tokens of the model.
        answers: Positions per row whose logits are computed; None for all positions.
    """
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
    """Peak operations per second of a device in a dtype, by its data sheet; None if unknown."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peaks.get(dtype) for part, peaks in PEAKS.items() if part in name), None)
