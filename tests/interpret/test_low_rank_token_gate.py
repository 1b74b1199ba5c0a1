"""Comba, and DPLR and GDN-2 without a gate, on the kernels for a gate of one number a token."""

import contextlib
from collections import Counter

import pytest
import torch
from tests.interpret.test_delta_ops import moved
from tests.interpret.test_low_rank import PACKED, PER_TOKEN, drawn, require_accurate

import wyfold
from wyfold.kernels.low_rank_gradients.triton import launch as gradients
from wyfold.kernels.low_rank_prepare.triton import launch as prepare
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import kernel_configs, kernel_launch
from wyfold.runtime.kernel_configs import Config

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(autouse=True)
def token_gate(device):
    config = Config(4, 1, {"BK": 64, "BE": 64, "TOKEN_GATE": 1}, None)
    with contextlib.ExitStack() as stack:
        for kind in ("scalar", "none"):
            stack.enter_context(kernel_configs.override_row("sm_90", "low_rank_prepare.triton", kind, config))
        yield


@pytest.fixture
def launched(monkeypatch):
    """Number of launches of each kernel for a gate of one number a token."""
    counts: Counter[str] = Counter()
    for stage, module in (("low_rank_prepare", prepare), ("low_rank_gradients", gradients)):
        kernel, launch = getattr(module, f"wyfold_{stage}_token_gate_triton"), module.launch_kernel

        def counting(given, *arguments, stage=stage, kernel=kernel, launch=launch, **options):
            # On a GPU, a first call passes here once more, to compile its kernels at once.
            counts[stage] += given is kernel and getattr(kernel_launch._thread, "collector", None) is None
            return launch(given, *arguments, **options)

        monkeypatch.setattr(module, "launch_kernel", counting)
    return counts


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "gate"),
    [
        ("chunk_comba", FP32, Shape(1, 71, 1, 2, 72, 16), "any"),
        ("chunk_comba", BF16, Shape(1, 71, 2, 2, 40, 24), "weak"),
        ("chunk_comba", FP16, Shape(1, 40, 2, 2, 16, 24), "reset one"),
        ("chunk_comba", FP32, Shape(1, 71, 1, 1, 16, 16), "-20"),
        ("chunk_iplr_delta_rule", FP32, Shape(1, 71, 1, 2, 24, 16), "any"),
        ("chunk_iplr_delta_rule", BF16, Shape(1, 71, 1, 1, 16, 16), "any"),
    ],
    ids=str,
)
def test_every_rule_and_dtype(name, dtype, shape, gate, device, guarded, results, launched):
    require_accurate(name, drawn(name, shape, gate, dtype=dtype), device, guarded, results, chunk_size=32)
    assert launched == {"low_rank_prepare": 2, "low_rank_gradients": 1}


def test_erase_gates_without_a_decay(device, guarded, results, launched):
    """The erasing rows of GDN-2 are products of two tokens."""
    a = drawn("chunk_gdn2", Shape(1, 71, 1, 2, 24, 16), dtype=BF16)
    del a["g"]
    require_accurate("chunk_gdn2", a, device, guarded, results, chunk_size=32)
    assert launched == {"low_rank_prepare": 2, "low_rank_gradients": 1}


def test_packed_with_norms(device, guarded, results):
    """With grouped heads, an empty sequence and one token, and tokens past the last boundary."""
    a = drawn("chunk_comba", Shape(1, 71, 1, 2, 8, 16), sequences=4)
    a["p"] = a["p"] * (1 + torch.arange(71.0))[:, None, None]
    for part in PER_TOKEN:
        if part in a:
            a[part][:, PACKED[-1] :] = torch.nan
    a["cu_seqlens"] = torch.tensor(PACKED)
    require_accurate("chunk_comba", a, device, guarded, results, chunk_size=16, use_qk_l2norm_in_kernel=True)


def test_bits(device, results):
    """Packed sequences are separate ones, a split at a chunk is the whole, and tokens do not read later ones."""
    op = wyfold.chunk_comba
    a = {part: moved(x, device) for part, x in drawn("chunk_comba", Shape(1, 70, 1, 2, 16, 16), dtype=BF16).items()}
    a |= {"backend": "triton", "chunk_size": 16}
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    whole, again, kept = (results(op, a, None, fed, disable_recompute=keep) for keep in (False, False, True))
    assert all(torch.equal(again[part], x) and torch.equal(kept[part], x) for part, x in whole.items())
    outputs, state = [], a["initial_state"]
    for begin, end in ((0, 32), (32, 70)):
        o, state = op(
            **{part: x[:, begin:end] if part in PER_TOKEN else x for part, x in a.items()} | {"initial_state": state}
        )
        outputs.append(o)
    assert torch.equal(torch.cat(outputs, 1), whole["o"]) and torch.equal(state, whole["state"])
    packed = op(
        **{part: x if part != "initial_state" else x.repeat(2, 1, 1, 1) for part, x in a.items()},
        cu_seqlens=torch.tensor([0, 37, 70], device=device),
    )[0]
    alone = [
        op(**{part: x[:, begin:end] if part in PER_TOKEN else x for part, x in a.items()})[0]
        for begin, end in ((0, 37), (37, 70))
    ]
    assert torch.equal(packed, torch.cat(alone, 1))
    later = {part: x.clone() if part in PER_TOKEN else x for part, x in a.items()}
    for part in PER_TOKEN:
        if part in later:
            later[part][:, 40:] *= 3
    assert torch.equal(op(**later)[0][:, :40], whole["o"][:, :40])


def test_the_plan_names_the_kernels(device):
    q, g = torch.randn(1, 20, 1, 8, device=device), -torch.rand(1, 20, 1, device=device)
    plan = wyfold.explain(wyfold.chunk_comba, q, q, q, p=q, g=g, chunk_size=16, backend="triton")
    rows = {launch.stage: launch.row for launch in plan.rows}
    assert rows["low_rank_prepare"] == "scalar"
