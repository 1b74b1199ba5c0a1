"""Script: the layers for Megatron-LM against `wyfold.layers`, built from Megatron's own specs, on the CPU.

Specs, parallel state, projections, norms and the forward are those of the installed megatron-core. A stub replaces the
device that Megatron asks CUDA for. Exits with 77 and a reason where megatron-core cannot be imported.
"""

import sys
import tempfile
from typing import Any

import torch
from tests.integrations.engines import assert_same
from torch import Tensor, nn

from wyfold import SequenceLayout
from wyfold.integrations import megatron
from wyfold.layers import GatedDeltaNet, KimiDeltaAttention

sys.modules["fla"] = None  # type: ignore[assignment]  # the layers do not need it
try:
    import megatron.core.ssm.gated_delta_net.common as common
    from megatron.core import parallel_state
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec, build_module
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
except ImportError as missing:
    print(f"megatron-core cannot be imported: {missing}")
    sys.exit(77)

WIDTH, H, HV, K, V = 16, 2, 4, 16, 16  # the width is K: a low-rank decay then has full rank
LENGTHS = [37, 1, 26]


class Backend(LocalSpecProvider):
    """Megatron's projections without TransformerEngine, which fuses a norm into the first one."""

    def column_parallel_layer_norm_linear(self) -> type:
        return ColumnParallelLinear


def built(spec: ModuleSpec, config: TransformerConfig) -> Any:
    groups = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
    layer = build_module(spec, config=config, layer_number=1, pg_collection=groups)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.double()


def copy_parameters(layer: Any, ours: Any) -> None:
    """Give Wyfold's layer the parameters of Megatron's."""
    q, z, beta, alpha = layer.in_proj.weight.split(
        [2 * H * K + HV * V, HV * V, HV, layer.in_proj.weight.shape[0] - 2 * H * K - 2 * HV * V - HV]
    )
    channels = isinstance(ours, KimiDeltaAttention)
    decay, gate = ("decay_up", "gate_up") if channels else ("decay", "gate")
    weights = {
        "qkv.weight": q, "conv.weight": layer.conv1d.weight.squeeze(1), "beta.weight": beta, f"{decay}.weight": alpha,
        "decay_parameters.A_log": layer.A_log, f"{gate}.weight": z, "norm.weight": layer.out_norm.weight,
        "decay_parameters.dt_bias": layer.dt_bias.view(HV, K) if channels else layer.dt_bias,
        "out.weight": layer.out_proj.weight,
    }  # fmt: skip
    if channels:
        identity = {"decay_down.weight": torch.eye(K), "gate_down.weight": torch.eye(V)}
        weights |= {**identity, "gate_up.bias": torch.zeros(HV * V)}
    ours.load_state_dict({name: tensor.detach().clone() for name, tensor in weights.items()})


def gradients(layer: Any) -> dict[str, Tensor]:
    """The gradients of Megatron's parameters under the names of Wyfold's layer."""
    rows = layer.in_proj.weight.grad
    q, z, beta, alpha = rows.split([2 * H * K + HV * V, HV * V, HV, len(rows) - 2 * H * K - 2 * HV * V - HV])
    return {
        "qkv.weight": q, "conv.weight": layer.conv1d.weight.grad.squeeze(1), "beta.weight": beta,
        "decay": alpha, "decay_parameters.A_log": layer.A_log.grad, "gate": z,
        "norm.weight": layer.out_norm.weight.grad,
        "decay_parameters.dt_bias": layer.dt_bias.grad, "out.weight": layer.out_proj.weight.grad,
    }  # fmt: skip


def of_name(ours: Any, name: str) -> Tensor:
    """Parameter of Wyfold's layer: the decay and the gate are one matrix in GDN, the second of two in KDA."""
    theirs = dict(ours.named_parameters())
    (found,) = (theirs[key] for key in (name, f"{name}_up.weight", f"{name}.weight") if key in theirs)
    return found


def run(layer: Any, x: Tensor, do: Tensor, lengths: list[int] | None) -> tuple[Tensor, Tensor]:
    """Output and gradient of x of Megatron's layer, which takes [T, B, width]. Lengths of packed sequences, or None."""
    params = None
    if lengths is not None:
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu)
    layer.zero_grad()
    x = x.transpose(0, 1).contiguous().requires_grad_()
    y, bias = layer(x, None, packed_seq_params=params)
    assert bias is None
    y.backward(do.transpose(0, 1))
    return y.transpose(0, 1).detach(), x.grad.transpose(0, 1)


def check_layer(layer: Any, ours: Any) -> None:
    ours.double()
    copy_parameters(layer, ours)
    for lengths in (None, LENGTHS):
        x, do = torch.randn(2, 1, sum(LENGTHS), WIDTH, dtype=torch.float64)
        y, dx = run(layer, x, do, lengths)
        again, dx_again = run(layer, x, do, lengths)
        assert torch.equal(y, again) and torch.equal(dx, dx_again)
        ours.zero_grad()
        other = x.clone().requires_grad_()
        expected = ours(other, layout=SequenceLayout.from_lengths(lengths) if lengths else None)
        expected.backward(do)
        assert_same("y", y, expected)
        assert_same("dx", dx, other.grad)
        for name, gradient in gradients(layer).items():
            found = of_name(ours, name)
            assert_same(name, gradient.reshape(found.shape), found.grad)


def check_rule(layer: Any) -> None:
    """Megatron's own Python form of the rule, with its gate, on expanded and normalised heads."""
    q, k, v = torch.randn(2, 70, H, K), torch.randn(2, 70, H, K), torch.randn(2, 70, HV, V)
    raw, beta = torch.randn(2, 70, HV), torch.randn(2, 70, HV)
    g, beta_ours = layer._compute_g_and_beta(layer.A_log, layer.dt_bias, raw, beta)
    o, state = layer.gated_delta_rule(q, k, v, g=g, beta=beta_ours, output_final_state=True)
    computed = -layer.A_log.exp() * nn.functional.softplus(raw + layer.dt_bias)
    q, k = (nn.functional.normalize(x, dim=-1).repeat_interleave(HV // H, 2) for x in (q, k))
    theirs, state_theirs = common.torch_chunk_gated_delta_rule(
        q, k, v, g=computed, beta=beta.sigmoid(), output_final_state=True
    )  # fmt: skip
    assert_same("o", o, theirs)
    assert_same("state", state, state_theirs)


def check_replacement(config: TransformerConfig) -> None:
    """In a block's spec, Megatron's GDN layers are replaced and nothing else."""
    stock = common_spec(config)
    layer = ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=stock))
    other = ModuleSpec(
        module=TransformerLayer, submodules=TransformerLayerSubmodules(self_attention=ModuleSpec(nn.Linear))
    )
    block = TransformerBlockSubmodules(layer_specs=[layer, other, layer])
    replaced = megatron.replace_gated_delta_net(block, "KimiDeltaAttention", lower_bound=-5.0)
    modules = [spec.submodules.self_attention.module for spec in replaced.layer_specs]
    assert modules == [megatron.KimiDeltaAttention, nn.Linear, megatron.KimiDeltaAttention]
    assert replaced.layer_specs[0].submodules.self_attention.params == {"lower_bound": -5.0}
    assert layer.submodules.self_attention is stock and stock.params == {}
    built(replaced.layer_specs[0].submodules.self_attention, config)
    for bad in (
        lambda: megatron.replace_gated_delta_net(other),
        lambda: megatron.replace_gated_delta_net(block, "GDN"),
    ):
        try:
            bad()
        except ValueError:
            continue
        raise AssertionError("a spec without a GDN layer, or an unknown name, must be refused")


def common_spec(config: TransformerConfig) -> ModuleSpec:
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import get_gated_delta_net_module_spec

    return get_gated_delta_net_module_spec(config, Backend())


def configuration(**parallel: int) -> TransformerConfig:
    return TransformerConfig(
        num_layers=1, hidden_size=WIDTH, num_attention_heads=2, linear_num_key_heads=H, linear_num_value_heads=HV,
        linear_key_head_dim=K, linear_value_head_dim=V, use_cpu_initialization=True, perform_initialization=False,
        activation_func=nn.functional.silu, normalization="RMSNorm", deterministic_mode=True, **parallel,
    )  # fmt: skip


def pairs(config: TransformerConfig) -> list[tuple[Any, Any]]:
    """Megatron's layers of each rule and gate, beside Wyfold's."""
    sizes, eps = (WIDTH, H, HV, K, V), config.layernorm_epsilon
    found = [(built(megatron.gated_delta_net_spec(config, Backend()), config), GatedDeltaNet(*sizes, norm_eps=eps))]
    for bound in (None, -5.0):
        layer = built(megatron.kda_spec(config, Backend(), lower_bound=bound), config)
        found.append((layer, KimiDeltaAttention(*sizes, lower_bound=bound, norm_eps=eps)))
    return found


def check_context_parallel(rank: int, folder: str) -> None:
    """One of two ranks, which hold a sequence's quarters 0 and 3, and 1 and 2: Megatron's balanced shards."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # stub
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    torch.manual_seed(0)
    for layer, ours in pairs(configuration(context_parallel_size=2)):
        ours.double()
        copy_parameters(layer, ours)
        for lengths in ([64], [40, 24]):
            x, do = torch.randn(2, 1, 64, WIDTH, dtype=torch.float64)
            mine, start = [], 0
            for length in lengths:
                quarters = torch.arange(start, start + length).view(4, -1)
                mine += [quarters[rank], quarters[3 - rank]]
                start += length
            index = torch.cat(mine)
            y, dx = run(layer, x[:, index], do[:, index], lengths if len(lengths) > 1 else None)
            ours.zero_grad()
            other = x.clone().requires_grad_()
            expected = ours(other, layout=SequenceLayout.from_lengths(lengths))
            expected.backward(do)
            assert_same("y", y, expected[:, index])
            assert_same("dx", dx, other.grad[:, index])
            for name, gradient in gradients(layer).items():
                total = gradient.contiguous()
                torch.distributed.all_reduce(total)
                found = of_name(ours, name)
                assert_same(name, total.reshape(found.shape), found.grad)
    torch.distributed.destroy_process_group()


def main() -> None:
    torch.manual_seed(0)
    torch.cuda.current_device = lambda: torch.device("cpu")  # stub: Megatron creates parameters there
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    config = configuration()
    assert not common.HAVE_FLA
    for layer, ours in pairs(config):
        check_layer(layer, ours)
        assert "in_proj.weight" in layer.sharded_state_dict()
    check_rule(built(megatron.gated_delta_net_spec(config, Backend()), config))
    check_replacement(config)
    assert config.deterministic_mode and not common.HAVE_FLA  # neither was changed
    torch.distributed.destroy_process_group()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(check_context_parallel, args=(folder,), nprocs=2)
    print("GDN and KDA agree with wyfold.layers")


if __name__ == "__main__":
    main()
