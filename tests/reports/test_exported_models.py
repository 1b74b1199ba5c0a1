"""`torch.export` of a patched model ended in PyTorch's internals where positions were given.

Whether documents begin in `position_ids` has to be read, which no exported program can ("Could not extract specialized
integer from data-dependent expression").
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
