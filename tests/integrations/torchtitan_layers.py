"""Script: the overrides for torchtitan, applied by torchtitan to its own configurations, against `wyfold.layers`.

The configurations, the override mechanism, the modules and the metadata of packed documents are those of the installed
torchtitan, which needs fla to be imported. Exits with 77 and a reason where torchtitan cannot be imported.
"""

import dataclasses
import sys
from typing import Any

import torch
from tests.integrations.engines import assert_same
from torch import Tensor

from wyfold import SequenceLayout
from wyfold.layers import GatedDeltaNet, KimiDeltaAttention

try:
    from torchtitan.config.override import OverrideConfig, apply_overrides
    from torchtitan.models import qwen3_5
    from torchtitan.models.common.attention import VarlenMetadata
    from torchtitan.protocols.module import Module
except ImportError as missing:
    print(f"torchtitan cannot be imported: {missing}")
    sys.exit(77)

WIDTH, H, HV, K, V = 16, 2, 4, 16, 16  # the width is K: a low-rank decay then has full rank
LENGTHS = [37, 1, 26]
OVERRIDES = "wyfold.integrations.torchtitan"


class Parent(Module):
    """Stands for a block: torchtitan overrides the nodes of a tree of configurations."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        deltanet: Any


def built(name: str, **options: Any) -> Any:
    stock = qwen3_5._qwen35_deltanet_config(
        dim=WIDTH, n_key_heads=H, n_value_heads=HV, key_head_dim=K, value_head_dim=V, layer_id=0
    )
    root = Parent.Config(deltanet=stock)
    target = f"{OVERRIDES}.{name}"
    lines = apply_overrides(OverrideConfig(imports=[(target, options) if options else target]), root)
    assert len(lines) == 1 and type(root.deltanet) is not type(stock)
    layer = root.deltanet.build()
    with torch.no_grad():
        layer.init_states()
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    return layer.double()


def names(layer: Any, ours: Any) -> dict[str, list[tuple[str, Any]]]:
    """Name in Wyfold's layer -> the parameters of torchtitan's that are its rows."""
    channels = isinstance(ours, KimiDeltaAttention)
    parts = {
        "qkv.weight": ["in_proj_q.weight", "in_proj_k.weight", "in_proj_v.weight"],
        "conv.weight": ["conv_q.weight", "conv_k.weight", "conv_v.weight"],
        "beta.weight": ["in_proj_b.weight"],
        "decay_up.weight" if channels else "decay.weight": ["in_proj_a.weight"],
        "gate_up.weight" if channels else "gate.weight": ["in_proj_z.weight"],
        "decay_parameters.A_log": ["A_log"], "decay_parameters.dt_bias": ["dt_bias"], "norm.weight": ["norm.weight"],
        "out.weight": ["out_proj.weight"],
    }  # fmt: skip
    given = dict(layer.named_parameters())
    assert sorted(given) == sorted(name for part in parts.values() for name in part)
    return {name: [(x, given[x]) for x in part] for name, part in parts.items()}


def joined(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.squeeze(1) if x.ndim == 3 else x for x in tensors])


def check_layer(layer: Any, ours: Any) -> None:
    parts = names(layer, ours)
    state = {name: joined([x.detach() for _, x in part]) for name, part in parts.items()}
    if isinstance(ours, KimiDeltaAttention):
        state |= {"decay_down.weight": torch.eye(K), "gate_down.weight": torch.eye(V)}
        state["gate_up.bias"] = torch.zeros(HV * V)
    ours.double().load_state_dict(state)
    T = sum(LENGTHS)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    packed = VarlenMetadata(cu, cu, max(LENGTHS), max(LENGTHS), tuple(cu.tolist()))
    for masks, layout in ((None, None), (packed, SequenceLayout.from_lengths(LENGTHS))):
        x, do = torch.randn(2, 1, T, WIDTH, dtype=torch.float64)
        results = []
        for _ in range(2):
            layer.zero_grad()
            given = x.clone().requires_grad_()
            y = layer(given, masks)
            y.backward(do)
            results.append((y.detach(), given.grad, *(parameter.grad.clone() for parameter in layer.parameters())))
        assert all(torch.equal(a, b) for a, b in zip(*results))  # deterministic
        ours.zero_grad()
        other = x.clone().requires_grad_()
        expected = ours(other, layout=layout)
        expected.backward(do)
        assert_same("y", results[0][0], expected)
        assert_same("dx", results[0][1], other.grad)
        theirs = dict(ours.named_parameters())
        for name, part in parts.items():
            assert_same(name, joined([p.grad for _, p in part]), theirs[name].grad)


def main() -> None:
    torch.manual_seed(0)
    check_layer(built("gated_delta_net"), GatedDeltaNet(WIDTH, H, HV, K, V))
    check_layer(built("kimi_delta_attention"), KimiDeltaAttention(WIDTH, H, HV, K, V))
    bounded = KimiDeltaAttention(WIDTH, H, HV, K, V, lower_bound=-5.0)
    check_layer(built("kimi_delta_attention", lower_bound=-5.0), bounded)
    try:
        built("kimi_delta_attention", lower_bound=5.0)
    except ValueError as refusal:
        assert "below 0" in str(refusal)
    else:
        raise AssertionError("a bound above 0 must be refused")

    # a whole model's configuration: its GDN layers are replaced, and nothing else
    config = qwen3_5.qwen3_5_configs["debugmodel"]("flex")
    lines = apply_overrides(OverrideConfig(imports=[f"{OVERRIDES}.gated_delta_net"]), config)
    assert len(lines) == 6, lines
    print("GDN and KDA agree with wyfold.layers")


main()
