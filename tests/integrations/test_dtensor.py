"""Tensor parallelism of a decoder: logits, every gradient and cached decoding equal the unsharded decoder's."""

import copy

import pytest
import torch
import torch.distributed as dist
from tests.context_parallel.ranks import Case, failures_on_ranks
from torch.distributed.device_mesh import DeviceMesh

from wyfold import SequenceLayout
from wyfold.integrations import dtensor
from wyfold.models import Decoder, DecoderConfig
from wyfold.reference.error import judge, require

CONFIG = DecoderConfig(
    hidden_size=24,
    num_layers=4,
    pattern="gdn kda delta_net attention",
    num_heads=2,
    num_v_heads=4,
    head_dim=8,
    head_v_dim=16,
    options={"attention": {"num_heads": 4, "num_kv_heads": 2, "window": 6, "head_dim": 8}},
)
BOUND = 1e-10


def reference():
    """Model, tokens, logits, gradients and continuation of one process."""
    torch.manual_seed(0)
    model = Decoder(CONFIG).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    ids = torch.randint(256, (1, 30))
    logits, loss = model(ids, ids, layout=SequenceLayout.from_lengths([13, 0, 17]))
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return model, ids, logits.detach(), gradients, model.generate(ids, 5, temperature=0)


def sharded(given, group):
    whole, ids, truth, gradients, tokens = given
    for recompute in (None, "selective"):
        model = copy.deepcopy(whole)
        model.zero_grad()
        dtensor.parallelize(model, DeviceMesh("cpu", list(range(dist.get_world_size()))))
        held = sum(getattr(x, "_local_tensor", x).numel() for x in model.blocks.parameters())
        assert held < 0.6 * sum(x.numel() for x in whole.blocks.parameters())
        assert all(torch.equal(x, whole.state_dict()[name]) for name, x in dtensor.whole(model).items())
        assert torch.equal(model.generate(ids, 5, temperature=0), tokens)
        model.recompute(recompute)
        logits, loss = model(ids, ids, layout=SequenceLayout.from_lengths([13, 0, 17]))
        require(judge(logits.detach(), truth, name="logits", target=BOUND))
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.grad)
        found = dtensor.whole(model)
        assert found.keys() == gradients.keys()
        for name, x in found.items():
            require(judge(x, gradients[name], name=name, target=BOUND))


CASES = {"divided": Case(reference, sharded)}


@pytest.mark.long
def test_a_sharded_decoder_equals_the_decoder(tmp_path):
    assert not failures_on_ranks([2], tmp_path, __name__, "CASES")


class Mesh:
    """A mesh with the attributes read before sharding."""

    ndim = 1

    def __init__(self, ranks):
        self.ranks = ranks

    def size(self):
        return self.ranks


@pytest.mark.parametrize(
    ("config", "ranks", "message"),
    [
        (
            {"pattern": "gdn", "num_heads": 3},
            2,
            "num_heads must be a multiple of the 2 ranks, got 3 in gated_delta_net",
        ),
        ({"pattern": "ttt_linear"}, 2, "layers must be of the delta family or attention, got ttt_linear"),
        ({"pattern": "gdn", "num_heads": 3, "mlp_size": 32}, 3, "mlp_size must be a multiple of the 3 ranks, got 32"),
    ],
)
def test_unsupported_models_are_refused(config, ranks, message):
    model = Decoder(DecoderConfig(hidden_size=16, num_layers=1, head_dim=8, **config))
    with pytest.raises(ValueError, match=message):
        dtensor.parallelize(model, Mesh(ranks))
