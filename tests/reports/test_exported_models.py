"""`torch.export` of a patched model with positions ended in an error inside PyTorch.

An exported program cannot read whether documents begin in `position_ids` ("Could not extract specialized integer from
data-dependent expression"). Without them and with `cu_seq_lens_q`, a program exported with gradients enabled failed
when it ran ("functions with out=... don't support automatic differentiation").
"""

import pytest
import torch
from tests.integrations.hybrids import hybrid
from torch import Tensor

from wyfold.integrations.transformers import patch

pytest.importorskip("transformers", reason="transformers is not installed")

IDS = torch.randint(64, (1, 20), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("positions", [torch.arange(20)[None], torch.arange(10).repeat(2)[None]])
def test_positions_are_refused_in_one_sentence(positions: Tensor):
    model, message = (
        hybrid("qwen3_5"),
        r"^patch\(qwen3_5\): position_ids must be left out of an exported call, .*packing=False",
    )
    with torch.no_grad(), patch(model), pytest.raises(ValueError, match=message):
        torch.export.export(model, (IDS,), {"position_ids": positions, "use_cache": False}, strict=False)


@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_a_program_has_the_models_numbers_and_gradients(family: str):
    """With boundaries other than those at export, and after the patch is undone."""
    model = hybrid(family)
    first, other = (
        {"cu_seq_lens_q": torch.tensor(bounds, dtype=torch.int32), "use_cache": False}
        for bounds in ([0, 8, 20], [0, 3, 20])
    )
    with patch(model):
        program = torch.export.export(model, (IDS,), first, strict=False).module()
        expected = model(IDS, **other).logits
        expected.square().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    logits = program(IDS, **other).logits
    logits.square().sum().backward()
    assert torch.equal(logits, expected)
    for name, parameter in program.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name
