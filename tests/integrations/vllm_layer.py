"""Script: vLLM's own GDN and KDA layers, on the CPU, call the plug-in; results against a float64 token loop.

The loader of plug-ins, the layers' core methods, their metadata, operator classes and registry are those of the
installed vLLM. Stubs replace what needs a GPU: the short convolution (here the identity), the launch that prepares
prompts, and the forward context.
Exits with 77 and a reason where vLLM cannot be imported.
"""

import importlib.metadata
import sys
import types
from typing import Any

import torch
from tests.integrations.engines import Gates, assert_near, token_loop
from torch import Tensor, nn

try:
    import vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn as kimi
    import vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn as olmo
    import vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn as qwen
    from vllm import plugins
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
except ImportError as missing:
    print(f"vLLM cannot be imported: {missing}")
    sys.exit(77)

from wyfold.integrations import vllm as plugin

H, HV, K, V, SLOTS = 2, 4, 16, 16, 14
metadata: Any = None


class StubEntryPoint:
    name, value = "wyfold", "wyfold.integrations.vllm:register"

    def load(self) -> Any:
        return plugin.register


def stub_context() -> Any:
    return types.SimpleNamespace(attn_metadata={"layer": metadata})


def stub_convolution(x: Tensor, *args: object, out: Tensor | None = None, **kwargs: object) -> Tensor:
    return x if out is None else out.copy_(x)


def stub_prepare(
    conv_output: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, num_k_heads: int, head_k_dim: int,
    head_v_dim: int, apply_l2norm: bool, output_g_exp: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = split(conv_output, num_k_heads)
    q, k = (nn.functional.normalize(x.float(), dim=-1).to(x.dtype) for x in (q, k))
    return q, k, v, Gates(A_log, dt_bias).decay(a).log().float(), torch.sigmoid(b.float())


def stub_gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, negative: bool) -> tuple[Tensor, Tensor]:
    return Gates(A_log, dt_bias).decay(a).log().float()[None], torch.sigmoid(b.float())[None] * (1 + negative)


def split(mixed: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = mixed.split([heads * K, heads * K, HV * V], 1)
    return q.unflatten(1, (heads, K)), k.unflatten(1, (heads, K)), v.unflatten(1, (HV, V))


def bare(cls: Any, **attributes: object) -> Any:
    """An instance of a layer's class without the projections that its constructor makes."""
    layer = cls.__new__(cls)
    nn.Module.__init__(layer)
    for name, value in {"prefix": "layer", "tp_size": 1, "num_spec": 2, **attributes}.items():
        setattr(layer, name, value)
    layer.conv1d = types.SimpleNamespace(weight=torch.zeros(3 * HV * K, 1, 4), bias=None)
    layer.A_log.requires_grad_(False)
    return layer


class Requests:
    """Requests of a server: the float64 state of each, and one step of any of them."""

    def __init__(self, gate: Gates, heads: int):
        self.gate, self.heads = gate, heads
        self.states: dict[str, Tensor] = {}

    def check(
        self, name: str, mixed: Tensor, a: Tensor, b: Tensor, actual: Tensor, accepted: int | None = None
    ) -> None:
        """Run one request's tokens in float64 and compare; the first `accepted` tokens stay."""
        q, k, v = split(mixed, self.heads)
        start = self.states.get(name, torch.zeros(HV, V, K, dtype=torch.float64))
        o, states = token_loop(q, k, v, self.gate.decay(a), torch.sigmoid(b.double()), start)
        assert_near(actual, o, torch.bfloat16)
        self.states[name] = states[(len(q) if accepted is None else accepted) - 1]


def cu(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def slots(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def batch(**fields: Any) -> GDNAttentionMetadata:
    """vLLM's metadata of a batch; counts that are not given are 0."""
    counts = ("prefills", "prefill_tokens", "decodes", "decode_tokens", "spec_decodes", "spec_decode_tokens")
    return GDNAttentionMetadata(**{**{f"num_{name}": 0 for name in counts}, **fields})


def steps() -> list[tuple[GDNAttentionMetadata, list[tuple[str, int, int | None]]]]:
    """Batches of a server: vLLM's metadata, and (request, tokens, accepted) in the order of the rows."""
    return [
        # two prompts
        (
            batch(
                num_prefills=2, num_prefill_tokens=75,
                num_actual_tokens=75, has_initial_state=torch.tensor([False, False]),
                non_spec_query_start_loc=cu(70, 5), non_spec_state_indices_tensor=slots(1, 4),
                prefill_query_start_loc=cu(70, 5), prefill_state_indices=slots(1, 4),
                prefill_has_initial_state=torch.tensor([False, False]),
            ),
            [("A", 70, None), ("B", 5, None)],
        ),
        # a token each, with a padding row
        (
            batch(
                num_decodes=3, num_decode_tokens=3,
                num_actual_tokens=3, non_spec_query_start_loc=cu(1, 1, 1),
                non_spec_state_indices_tensor=slots(4, 1, 0),
            ),
            [("B", 1, None), ("A", 1, None), ("padding", 1, None)],
        ),
        # a token of A beside the prompt of C and the next part of B's
        (
            batch(
                num_prefills=2, num_prefill_tokens=20, num_decodes=1, num_decode_tokens=1,
                num_actual_tokens=21, has_initial_state=torch.tensor([True, False, True]),
                non_spec_query_start_loc=cu(1, 13, 7), non_spec_state_indices_tensor=slots(1, 7, 4),
                prefill_query_start_loc=cu(13, 7), prefill_state_indices=slots(7, 4),
                prefill_has_initial_state=torch.tensor([False, True]),
            ),
            [("A", 1, None), ("C", 13, None), ("B", 7, None)],
        ),
        # drafts of A and B: of A's three tokens two are accepted, of B's two one
        (
            batch(
                num_spec_decodes=2,
                num_spec_decode_tokens=5, num_actual_tokens=5, spec_query_start_loc=cu(3, 2),
                spec_state_indices_tensor=torch.tensor([[1, 2, 3], [4, 5, 6]]), num_accepted_tokens=slots(1, 1),
                spec_sequence_masks=torch.tensor([True, True]), spec_token_indx=torch.arange(5),
                non_spec_token_indx=torch.arange(0),
            ),
            [("A", 3, 2), ("B", 2, 1)],
        ),
        # A's next drafts start from its second column
        (
            batch(
                num_spec_decodes=2,
                num_spec_decode_tokens=4, num_actual_tokens=4, spec_query_start_loc=cu(2, 2),
                spec_state_indices_tensor=torch.tensor([[1, 2, 3], [4, 5, 6]]), num_accepted_tokens=slots(2, 1),
                spec_sequence_masks=torch.tensor([True, True]), spec_token_indx=torch.arange(4),
                non_spec_token_indx=torch.arange(0),
            ),
            [("A", 2, 1), ("B", 2, 2)],
        ),
    ]  # fmt: skip


def serve(requests: Requests, run: Any) -> None:
    """Give each batch to a layer and compare each request's rows."""
    global metadata
    for metadata, rows in steps():
        T = metadata.num_actual_tokens
        mixed = torch.randn(T, 2 * requests.heads * K + HV * V).bfloat16()
        channels = requests.gate.dt_bias.numel() // HV
        a, b = torch.randn(T, HV, channels).bfloat16(), torch.randn(T, HV).bfloat16()
        a = a[..., 0] if channels == 1 else a
        out = torch.zeros(T + 2, HV, V, dtype=torch.bfloat16)  # vLLM pads the tokens of a batch
        run(mixed, a, b, out)
        first = 0
        for name, length, accepted in rows:
            last = first + length
            if name != "padding":
                requests.check(name, mixed[first:last], a[first:last], b[first:last], out[first:last], accepted)
            first = last


def padded(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(2, *x.shape[1:])])


def main() -> None:
    torch.manual_seed(0)
    qwen.current_platform = olmo.current_platform = types.SimpleNamespace(
        is_cuda=lambda: True, is_cpu=lambda: False, is_xpu=lambda: False, is_rocm=lambda: False,
        is_device_capability=lambda version: version == 90, is_device_capability_family=lambda version: False,
    )  # fmt: skip
    importlib.metadata.entry_points = lambda group: [StubEntryPoint()] if group == "vllm.general_plugins" else []
    plugins.load_general_plugins()
    gate = Gates(torch.rand(HV).log(), torch.randn(HV))
    pools = torch.zeros(SLOTS, 3, 2 * H * K + HV * V), torch.randn(SLOTS, HV, V, K)
    model = types.SimpleNamespace(hf_text_config=types.SimpleNamespace(linear_key_head_dim=K, linear_value_head_dim=V))
    config = types.SimpleNamespace(additional_config={}, model_config=model)
    qwen.get_current_vllm_config = lambda: config
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        operator = qwen.ChunkGatedDeltaRule()
    assert type(operator).__name__ == "WyfoldChunkGatedDeltaRule" and operator.gdn_prefill_backend == "triton"
    qwen.get_forward_context, qwen.fused_post_conv_prep = stub_context, stub_prepare
    qwen.causal_conv1d_fn = qwen.causal_conv1d_update = stub_convolution
    layer = bare(
        qwen.QwenGatedDeltaNetAttention, kv_cache=pools, A_log=gate.A_log, dt_bias=gate.dt_bias, key_dim=H * K,
        value_dim=HV * V, num_k_heads=H, num_v_heads=HV, head_k_dim=K, head_v_dim=V, activation="silu",
        chunk_gated_delta_rule=operator, enable_packed_recurrent_decode=True,
    )  # fmt: skip
    with torch.inference_mode():
        for packed in (True, False):  # vLLM has two decode functions
            layer.enable_packed_recurrent_decode = packed
            serve(Requests(gate, H), lambda m, a, b, out: layer._forward_core(padded(m), padded(b), padded(a), out))

    olmo.get_forward_context, olmo.fused_olmo_hybrid_gdn_gating = stub_context, stub_gates
    olmo.causal_conv1d_fn = olmo.causal_conv1d_update = stub_convolution
    layer = bare(
        olmo.OlmoHybridGatedDeltaNetAttention, kv_cache=pools, A_log=gate.A_log, dt_bias=gate.dt_bias, key_dim=H * K,
        value_dim=HV * V, num_k_heads=H, num_v_heads=HV, head_k_dim=K, head_v_dim=V, activation="silu",
        allow_neg_eigval=False,
    )  # fmt: skip
    with torch.inference_mode():
        serve(Requests(gate, H), lambda m, a, b, out: layer._forward_core(padded(m), padded(b), padded(a), out))

    gate = Gates(torch.rand(HV).log(), torch.randn(HV * K))
    kimi.get_forward_context = stub_context
    kimi.causal_conv1d_fn = kimi.causal_conv1d_update = stub_convolution
    kimi.gather_initial_states = lambda pool, index, given: pool[index.long()] * given[:, None, None, None]
    pools = torch.zeros(SLOTS, 3, 3 * HV * K), torch.randn(SLOTS, HV, V, K)
    layer = bare(
        kimi.KimiGatedDeltaNetAttention, kv_cache=pools, A_log=gate.A_log, dt_bias=gate.dt_bias, head_dim=K,
        local_num_heads=HV, local_projection_size=HV * K, gate_lower_bound=None, o_norm=lambda x, gate: x,
    )  # fmt: skip
    with torch.inference_mode():
        serve(
            Requests(gate, HV),
            lambda m, a, b, out: layer._forward(padded(m), padded(a)[None], None, padded(b)[None], out[None]),
        )
    print("served 5 batches each of Qwen, Qwen unpacked, OLMo and Kimi")


main()
