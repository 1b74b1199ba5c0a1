"""`Decoder.recompute("blocks")` under `torch.compile` ended in an InternalTorchDynamoError.

If it was set after blocks had been wrapped, it changed an attribute of the wrapper, and nothing was recomputed.
"""

import copy

import pytest
import torch
from torch import nn

from wyfold import SequenceLayout
from wyfold.autograd import delta as pipeline
from wyfold.models import Decoder, DecoderConfig
from wyfold.models.block import Block

# The compiler of PyTorch 2.11 keeps the results of a recurrence even if the whole block is recomputed.
COMPILED_BLOCKS = 1 if torch.__version__.startswith("2.11.") else 2

IDS = torch.arange(20)[None] * 37 % 256


def decoder(pattern: str = "gdn") -> Decoder:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_heads": 2, "head_dim": 16, "num_layers": len(pattern.split())}
    return Decoder(DecoderConfig(pattern=pattern, **sizes)).double()


def gradients(model: nn.Module, **where) -> list[torch.Tensor]:
    model.zero_grad()
    model(IDS, IDS, **where)[1].backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.fixture
def runs(monkeypatch) -> list[int]:
    """A list that grows by one with each forward of a recurrence."""
    forward, found = pipeline.delta_eager.forward, []
    monkeypatch.setattr(pipeline.delta_eager, "forward", lambda *given: found.append(1) or forward(*given))
    return found


# Dynamo instantiates each autograd.Function it traces, which PyTorch deprecates.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("what", "packed"),
    [pytest.param("blocks", False, marks=pytest.mark.release), ("selective", True)],
    ids=["blocks", "selective, packed"],
)
def test_recomputing_is_compiled(what, packed, runs):
    where = {"layout": SequenceLayout.from_lengths([9, 11])} if packed else {}
    plain = decoder()
    truth = gradients(plain, **where)
    assert len(runs) == 1
    ours = copy.deepcopy(plain)
    ours.recompute(what)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    found = gradients(compiled, **where)
    assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
    assert len(runs) == 1 + (COMPILED_BLOCKS if what == "blocks" else 1)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "pattern",
    [
        "rwkv7 rwkv7",
        *(pytest.param(x, marks=pytest.mark.release) for x in ("attention", "ttt_linear", "gla gdp", "path_attention")),
    ],
)
def test_recomputing_is_compiled_for_every_mixer(pattern):
    plain = decoder(pattern)
    ours = copy.deepcopy(plain)
    ours.recompute("blocks")
    torch._dynamo.reset()
    found = gradients(torch.compile(ours, fullgraph=True, backend="aot_eager"))
    assert all(torch.equal(a, b) for a, b in zip(found, gradients(plain), strict=True))


def compiled(block: nn.Module) -> nn.Module:
    return torch.compile(block, backend="eager")


def compiled_in_place(block: nn.Module) -> nn.Module:
    block.compile(backend="eager")
    return block


def checkpointed(block: nn.Module) -> nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    return checkpoint_wrapper(block, checkpoint_fn=lambda run, *given, **named: run(*given, **named))


class Wrapper(nn.Module):
    """A wrapper around a block as trainers write it."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, *given, **named):
        return self.inner(*given, **named)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # read by Dynamo
@pytest.mark.parametrize(
    "wrapped",
    [*(pytest.param(x, marks=pytest.mark.release) for x in (compiled, Wrapper)), compiled_in_place, checkpointed],
)
def test_wrapped_blocks_recompute_when_set(wrapped, runs):
    model = decoder()
    truth = gradients(model)
    torch._dynamo.reset()
    model.blocks[0] = wrapped(model.blocks[0])
    blocks = COMPILED_BLOCKS if wrapped in (compiled, compiled_in_place) else 2
    for what, expected in ((None, 1), ("blocks", blocks), ("selective", 1), (None, 1)):
        model.recompute(what)
        runs.clear()
        found = gradients(model)
        assert all(torch.equal(a, b) for a, b in zip(found, truth, strict=True))
        assert len(runs) == expected, what


def test_a_missing_block_is_refused():
    model = decoder("gdn kda")
    model.blocks[1] = nn.Identity()
    with pytest.raises(
        ValueError, match=r"^Decoder.recompute: the decoder must hold its 2 blocks, wrapped or not, found 1"
    ):
        model.recompute("blocks")
    assert [module.recomputed for module in model.modules() if isinstance(module, Block)] == [None]
