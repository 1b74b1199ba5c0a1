"""Models of transformers on a GPU: patched, and through a kernel repository, they run Wyfold's kernels."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.hybrids import FAMILIES, ROUTED, hybrid, skip_older
from torch import Tensor, nn

from wyfold.integrations.transformers import families, kernel_mapping, patch, write_kernel_repository

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

DEVICE = "cuda"
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
IDS = torch.randint(64, (2, 70), generator=torch.Generator().manual_seed(1))
Results = tuple[Tensor, Tensor, Tensor, set[str]]


def results(model: Any, around: Callable[[Any], Any] = contextlib.nullcontext) -> Results:
    """Logits, gradients of the next-token loss, greedy tokens of left-padded prompts, and names of kernels."""
    ids, padding = IDS.to(DEVICE), torch.ones(2, 9, dtype=torch.int64, device=DEVICE)
    padding[1, :4] = 0
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with around(model), torch.profiler.profile(activities=activities) as profile:
        model.zero_grad()
        out = model(ids, labels=ids, use_cache=False)
        out.loss.backward()
        gradients = torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])
        options = {"attention_mask": padding, "max_new_tokens": 5, "do_sample": False}
        tokens = model.generate(ids[:, :9], **options)
    names = {event.key for event in profile.key_averages()}
    return out.logits.detach().float(), gradients, tokens, {name for name in names if name.startswith("wyfold_")}


def errors(found: Results, exact: Results) -> list[float]:
    """Relative RMS errors of logits and gradients."""
    return [float((a - b).norm() / b.norm()) for a, b in zip(found[:2], exact[:2])]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_patched_model_runs_kernels_with_the_stock_error(name: str):
    """bfloat16, against the stock model in float32 on the CPU's parameters, with a factor of 1.5.

    All experts are used: a router that selects others after a rounding makes errors that are not the mixers'.
    """
    model = hybrid(name, **({"num_experts_per_tok": 4} if name in ROUTED else {})).to(DEVICE)
    exact = results(model)
    model.bfloat16()
    stock, ours = results(model), results(model, lambda model: patch(model, norm=True))
    assert all(a < 1.5 * b for a, b in zip(errors(ours, exact), errors(stock, exact)))
    assert not stock[3] and {"scan", "recurrent", "conv"} <= {part for name in ours[3] for part in name.split("_")}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mapped_model_runs_the_patched_models_kernels(name: str, tmp_path: Path):
    """`use_kernels=True` by a local folder; the same logits and tokens as a patch gives."""
    kernels = pytest.importorskip("kernels", reason="kernels is not installed")
    from transformers.utils import import_utils

    if not import_utils.is_kernels_available():
        bounds = f"{import_utils.KERNELS_MIN_VERSION} <= kernels < {import_utils.KERNELS_MAX_VERSION}"
        pytest.skip(f"transformers {transformers.__version__} takes {bounds}, installed is {kernels.__version__}")
    skip_older(name)
    model = hybrid(name).to(DEVICE).bfloat16()
    ours = results(model, patch)
    mapping = kernel_mapping(write_kernel_repository(tmp_path / "hub"), name)
    try:
        model.set_use_kernels(True, transformers.KernelConfig(mapping, use_local_kernel=True))
        mapped = results(model)
    finally:  # kernels leaves the functions of a modelling file replaced
        for function in families.FAMILIES[name].functions.values():
            replaced = getattr(families.FAMILIES[name].module, function)
            if isinstance(replaced, nn.Module):
                replaced.__dict__.pop("forward", None)
    assert torch.equal(mapped[0], ours[0]) and torch.equal(mapped[2], ours[2]) and mapped[3] == ours[3]
