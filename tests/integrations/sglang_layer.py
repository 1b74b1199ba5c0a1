"""Script: SGLang loads the plug-in with its own loader, and its own GDN backend and KDA dispatcher call it on the CPU.

The loader, the hook registry, the kernel classes, the dispatchers and the methods `forward_extend` and `forward_decode`
of the GDN backend are those of the installed SGLang. Stubs replace torchvision, which the check of GDN does not need,
and what needs a GPU: the short convolution (here the identity), the gates of prompts, and the scheduler's batch.
Exits with 77 and a reason where SGLang cannot be imported.
"""

import importlib.machinery
import logging
import sys
import types
from typing import Any
from unittest.mock import MagicMock

import torch
from tests.integrations.engines import Gates, assert_near, token_loop
from torch import Tensor

from wyfold.integrations import sglang as plugin


def stub_torchvision() -> None:
    for name in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        module = MagicMock(__spec__=importlib.machinery.ModuleSpec(f"torchvision{name}", None), __path__=[])
        module.__version__ = "0.28.0"
        sys.modules[f"torchvision{name}"] = module


try:
    stub_torchvision()
    import sglang.srt.layers.attention.linear.gdn_backend as gdn
    import sglang.srt.layers.attention.linear.kda_backend as kda
    import sglang.srt.plugins as plugins
    import sglang.srt.utils as utils
    from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
    from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata
except ImportError as missing:
    print(f"SGLang cannot be imported: {missing}")
    sys.exit(77)

H, HV, K, V, SLOTS, STEPS = 2, 4, 16, 16, 10, 3
TRITON = LinearAttnKernelBackend.TRITON


class StubEntryPoint:
    name, value = "wyfold", "wyfold.integrations.sglang:register"
    dist = types.SimpleNamespace(name="wyfold")

    def load(self) -> Any:
        return plugin.register


def stub_gates(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    return Gates(A_log, dt_bias).decay(a).log().float()[None], torch.sigmoid(b.float())[None]


def stub_mode(*, verify: bool) -> Any:
    return types.SimpleNamespace(is_target_verify=lambda: verify)


class Server:
    """SGLang's GDN backend over a pool, and the float64 state of each slot."""

    def __init__(self, gate: Gates):
        self.gate, self.pool = gate, torch.randn(SLOTS, HV, V, K)
        self.states = self.pool.double()
        self.snapshots = torch.zeros(SLOTS, STEPS, HV, V, K)
        cache = gdn.MambaPool.SpeculativeState(
            conv=[torch.zeros(SLOTS, 2 * H * K + HV * V, 3).bfloat16()], temporal=self.pool,
            intermediate_ssm=self.snapshots, intermediate_conv_window=[None],
        )  # fmt: skip
        self.backend = gdn.GDNAttnBackend.__new__(gdn.GDNAttnBackend)
        self.backend.kernel_dispatcher = gdn.GDNKernelDispatcher(TRITON, TRITON, TRITON)
        self.backend.mis_metadata, self.backend._use_strided_target_verify_qkv = None, True
        self.backend.verify_intermediate_state_indices = torch.arange(SLOTS, dtype=torch.int32)
        self.backend.req_to_token_pool = types.SimpleNamespace(
            mamba2_layer_cache=lambda layer_id: cache, mamba_pool=types.SimpleNamespace(), size=SLOTS
        )
        self.layer = types.SimpleNamespace(
            layer_id=0, num_q_heads=H, num_k_heads=H, num_v_heads=HV, head_q_dim=K, head_k_dim=K, head_v_dim=V,
            q_dim=H * K, k_dim=H * K, v_dim=HV * V, A_log=gate.A_log, dt_bias=gate.dt_bias, conv_weights=None,
            bias=None, activation="silu",
        )  # fmt: skip

    def tokens(self, T: int) -> tuple[Tensor, Tensor, Tensor]:
        return (
            torch.randn(T, 2 * H * K + HV * V).bfloat16(),
            torch.randn(T, HV).bfloat16(),
            torch.randn(T, HV).bfloat16(),
        )

    def expected(self, given: tuple[Tensor, Tensor, Tensor], slot: int) -> tuple[Tensor, Tensor]:
        mixed, a, b = given
        q, k, v = mixed.split([H * K, H * K, HV * V], 1)
        return token_loop(
            q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V)), self.gate.decay(a),
            torch.sigmoid(b.double()), self.states[slot],
        )  # fmt: skip

    def run(self, lengths: list[int], slots: list[int], *, form: str, **track: Any) -> None:
        """Give one batch to the backend and compare outputs and states of every row that is not padding."""
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        given = self.tokens(sum(lengths))
        self.backend.forward_metadata = ForwardMetadata(
            query_start_loc=cu, mamba_cache_indices=torch.tensor(slots, dtype=torch.int32), **track
        )
        batch = types.SimpleNamespace(
            forward_mode=stub_mode(verify=form == "verify"), batch_size=len(slots), mamba_track_mask=None,
            req_pool_indices=torch.tensor(slots), extend_prefix_lens=torch.ones(len(slots)),
            extend_seq_lens_cpu=lengths, spec_info=types.SimpleNamespace(draft_token_num=STEPS),
            tbo_parent_token_range=None,
        )  # fmt: skip
        method = self.backend.forward_decode if form == "decode" else self.backend.forward_extend
        o = method(self.layer, batch, *given)
        for n, slot in enumerate(slots):
            first, last = int(cu[n]), int(cu[n + 1])
            if slot < 0:
                continue
            outputs, states = self.expected(tuple(x[first:last] for x in given), slot)  # type: ignore[arg-type]
            assert_near(o[0, first:last], outputs, torch.bfloat16)
            if form == "verify":
                assert_near(self.snapshots[n, : last - first], states, torch.float32)
                continue
            self.states[slot] = states[-1]
            assert_near(self.pool[slot], states[-1], torch.bfloat16 if form == "extend" else torch.float32)
            if track and slot == 7:
                assert_near(self.pool[9], states[63], torch.bfloat16)


def main() -> None:
    torch.manual_seed(0)
    logging.basicConfig(level=logging.ERROR)
    utils.is_cuda = lambda: True  # read by the plug-in alone, because SGLang's modules are imported
    plugins.entry_points = lambda group: [StubEntryPoint()]
    plugins.load_plugins()
    assert gdn.TritonGDNKernel.__name__ == "WyfoldGDNKernel" and kda.TritonKDAKernel.__name__ == "WyfoldKDAKernel"
    assert gdn.flashinfer_gdn_prefill_default(None) is None
    gdn.fused_gdn_gating = stub_gates
    gdn.causal_conv1d_fn = gdn.causal_conv1d_update = lambda x, *args, **kwargs: x
    gdn.is_cpu = lambda: True  # pools need no copy
    server = Server(Gates(torch.rand(HV).log(), torch.randn(HV)))
    with torch.inference_mode():
        server.run([70, 5], [1, 4], form="extend")
        server.run([1, 1, 1], [4, -1, 1], form="decode")
        # the state after 64 of 100 tokens of slot 7 is kept in slot 9
        server.run(
            [30, 100], [4, 7], form="extend", has_mamba_track_mask=True, track_conv_indices=torch.zeros(1, 3).long(),
            conv_states_mask_indices=torch.tensor([9]), track_ssm_h_src=torch.tensor([2]),
            track_ssm_h_dst=torch.tensor([9]), track_ssm_h_batch_src=torch.tensor([1]),
            track_ssm_final_src=torch.tensor([], dtype=torch.int64), track_chunk_idx=torch.tensor([-1, 1]),
        )  # fmt: skip
        server.backend.kernel_dispatcher.supports_packed_decode = False  # SGLang has two decode functions
        server.run([1, 1], [7, 1], form="decode")
        server.run([STEPS, STEPS], [4, 1], form="verify")
    dispatcher = kda.KDAKernelDispatcher(TRITON, TRITON, TRITON)
    assert {type(x) for x in (dispatcher.decode_kernel, dispatcher.extend_kernel, dispatcher.verify_kernel)} == {
        kda.TritonKDAKernel
    }
    print("loaded by SGLang, served 5 batches of GDN")


main()
