"""All variants of a kernel round in the same places and add in the same order.

A kernel loads rows by pointers or by TMA descriptors, aligned or not, packed or not, in full chunks or not. Each
variant is compiled separately. For a sum of two products a compiler may contract either one into a fused multiply-add,
and it may spread a reduction over other lanes. Packed and separate, or strided and contiguous calls would then differ.
Tests on a GPU compare the bits. These tests compare the compiled code: trees of float operations, and layouts of the
operands of reductions.
"""

import collections
import hashlib
import importlib.util
import re
from unittest import mock

import pytest
import torch
from tests.compile import aot

import wyfold
from wyfold.runtime import kernel_configs

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

KERNELS = {
    "chunk_gated_delta_rule": ("wyfold_prepare_gluon", "wyfold_scan_gluon", "wyfold_gradients_triton"),
    "chunk_kda": ("wyfold_prepare_channel_gluon", "wyfold_scan_gluon", "wyfold_gradients_channel_gluon"),
}

COMMUTE = ("add", "mul")
IGNORED = ("ld", "st", "mov", "selp", "setp", "cvt.f32.bf16")  # moves, selections and widening do not round


def trees(ptx: str) -> collections.Counter[str]:
    """Count of float operations by the tree of operations that computes their operands. Loaded values are leaves."""
    known: dict[str, str] = {}
    found: collections.Counter[str] = collections.Counter()
    for line in ptx.splitlines():
        match = re.match(r"\s*(?:@!?%p\d+ )?([a-z]\S*\.f32\S*)\s+(%\w+), (.*);", line)
        if match is None or match[1].startswith(IGNORED):
            continue
        name, result, operands = match.groups()
        parts = [known.get(x.strip(), "leaf" if x.strip().startswith("%") else x.strip()) for x in operands.split(",")]
        if name.startswith(COMMUTE):
            parts.sort()
        elif name.startswith("fma"):
            parts[:2] = sorted(parts[:2])
        known[result] = hashlib.sha256(repr((name, parts)).encode()).hexdigest()
        found[f"{name} {known[result]}"] += 1
    return found


def reductions(ttgir: str) -> collections.Counter[str]:
    """Count of the operands of reductions, by shape and layout."""
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.MULTILINE))
    operands = re.findall(r'"tt\.reduce".*?\}\) : \(tensor<(\w+), (#\w+)>\)', ttgir, re.DOTALL)
    return collections.Counter(f"{shape} {layouts.get(layout, layout)}" for shape, layout in operands)


def kernels(
    op: str, T: int, names: tuple[str, ...], *, strided: bool = False, cu: tuple[int, ...] | None = None
) -> dict[str, tuple[collections.Counter[str], ...]]:
    """Kernels of forward and backward on sm_90, in chunks of 64: name -> trees and reductions.

    If `names` include the Triton kernel of `gradients`, the Gluon one is disabled.
    """
    found: dict[str, tuple[collections.Counter[str], ...]] = {}
    dispatched = kernel_configs.dispatched
    left_out = "gradients" if "wyfold_gradients_triton" in names else ""

    def look(kernel, *arguments, **options) -> None:
        if kernel.fn.__name__ in names:
            asm = aot.code(kernel, *arguments, **options)[0].asm
            found[kernel.fn.__name__] = trees(asm["ptx"]), reductions(asm["ttgir"])

    with (
        aot.pretend_gpu("sm_90", look),
        mock.patch.object(
            kernel_configs,
            "dispatched",
            lambda where, stage, key: stage != left_out and dispatched(where, stage, key),
        ),
    ):
        buffer = torch.zeros(1, T, 4, 3 * 128 + 8, dtype=torch.bfloat16)
        first = 1 if strided else 0  # not aligned to 16 bytes
        rows = [buffer[..., first + 128 * i : first + 128 * (i + 1)] for i in range(3)]
        q, k, v = ((x if strided else x.contiguous()).requires_grad_() for x in rows)
        g = torch.zeros((1, T, 4, 128) if op == "chunk_kda" else (1, T, 4)).requires_grad_()
        beta = torch.ones(1, T, 4).requires_grad_()
        options = {"chunk_size": 64, "backend": "triton", "cu_seqlens": None if cu is None else torch.tensor(cu)}
        o = getattr(wyfold, op)(q, k, v, g, beta, **options)[0]
        do = torch.zeros_like(o)
        o.backward(do.transpose(1, 2).contiguous().transpose(1, 2) if strided else do)
    return found


@pytest.mark.release
@pytest.mark.parametrize("op, names", KERNELS.items())
def test_descriptors_pointers_strides_and_packed(op: str, names: tuple[str, ...]):
    with_strides = tuple(name for name in names if "scan" not in name)
    descriptors, strides = kernels(op, 128, names), kernels(op, 100, with_strides, strided=True)
    packed = kernels(op, 100, names, cu=(0, 30, 100))
    for name in names:
        assert descriptors[name][0].total() > 100
        assert descriptors[name] == packed[name], name
    for name in with_strides:
        assert descriptors[name] == strides[name], name


def factors(op: str, given: dict[str, torch.Tensor], **options: object) -> tuple[collections.Counter[str], ...]:
    """Trees and reductions of `prepare` with the norm inside, in chunks of 16."""
    found = []

    def look(kernel, *arguments, **fixed) -> None:
        if kernel.fn.__name__ == "wyfold_prepare_triton":
            asm = aot.code(kernel, *arguments, **fixed)[0].asm
            found.append((trees(asm["ptx"]), reductions(asm["ttgir"])))

    inside = {"use_qk_l2norm_in_kernel": True, "chunk_size": 16, "backend": "triton"}
    with aot.pretend_gpu("sm_90", look), torch.no_grad():
        getattr(wyfold, op)(**given, **inside, **options)
    (one,) = found
    return one


def test_rows_of_eight_numbers_packed():
    """Rows of tokens begin at multiples of 8 elements, and those of sequences at multiples of 16."""
    rows = {name: torch.zeros(2, 18, heads, n) for name, heads, n in (("q", 1, 8), ("k", 1, 8), ("v", 2, 16))}
    rows["beta"] = torch.ones(2, 18, 2)
    flat = {name: x.flatten(0, 1)[None] for name, x in rows.items()}
    packed = factors("chunk_delta_rule", flat, cu_seqlens=torch.tensor([0, 18, 36]))
    assert packed == factors("chunk_delta_rule", rows)


@pytest.mark.release
def test_strided_channel_gates():
    rows = {name: torch.zeros(2, 17, 2, 24) for name in ("q", "k", "v", "g")} | {"beta": torch.ones(2, 17, 2)}
    apart = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in rows.items()}
    assert factors("chunk_kda", apart) == factors("chunk_kda", rows)


@pytest.mark.release
@pytest.mark.parametrize("C, K", [(16, 24), (64, 128)])
def test_key_grams_with_a_channel_gate(C: int, K: int):
    def gram(k: torch.Tensor, g: torch.Tensor, **options: object) -> tuple[collections.Counter[str], ...]:
        found = []

        def look(kernel, *arguments, **fixed) -> None:
            if kernel.fn.__name__ == "wyfold_kkt_triton":
                asm = aot.code(kernel, *arguments, **fixed)[0].asm
                found.append((trees(asm["ptx"]), reductions(asm["ttgir"])))

        with aot.pretend_gpu("sm_90", look):
            wyfold.chunk_scaled_dot_kkt(k, torch.ones(g.shape[:3]), g, chunk_size=C, backend="triton", **options)
        (one,) = found
        return one

    k, g = torch.zeros(1, 64, 2, K, dtype=torch.bfloat16), torch.zeros(1, 64, 4, K)
    with aot.pretend_gpu("sm_90", lambda *_, **__: None):
        plan = wyfold.explain(wyfold.chunk_scaled_dot_kkt, k, torch.ones(g.shape[:3]), g, backend="triton")
        assert plan.copies == (("k", "g") if K % 16 else ())
    dense = gram(k, g)
    assert dense[0].total() > 100
    assert gram(k[:, :50], g[:, :50], cu_seqlens=torch.tensor([0, 17, 50])) == dense
    assert gram(*(x.transpose(1, -1).contiguous().transpose(1, -1) for x in (k, g))) == dense


@pytest.mark.parametrize("step, copied", [(1, ("k",)), (8, ("k",)), (16, ())])
def test_unaligned_rows_are_copied_first(step: int, copied: tuple[str, ...]):
    q = torch.randn(1, 40, 2, 128)
    buffer = torch.randn(1, 40, 2, 128 + step)
    with aot.pretend_gpu("sm_90", lambda *_, **__: None):
        assert wyfold.explain(wyfold.chunk_kda, q, buffer[..., :128], q, backend="triton").copies == copied


def test_unaligned_contiguous_rows_are_copied_too():
    q = torch.randn(1, 40, 2, 128)
    k = torch.randn(q.numel() + 1)[1:].view(q.shape)
    assert k.is_contiguous()
    with aot.pretend_gpu("sm_90", lambda *_, **__: None):
        assert wyfold.explain(wyfold.chunk_kda, q, k, q, backend="triton").copies == ("k",)


def test_trees_distinguish_contracted_products():
    one = "fma.rn.f32 %f3, %f1, %f2, %f0;"
    other = "mul.f32 %f4, %f1, %f2;\nadd.f32 %f3, %f4, %f0;"
    assert trees(one) != trees(other)
    swapped = "mul.f32 %f4, %f1, %f2;\nfma.rn.f32 %f5, %f4, %f1, %f0;\n"
    assert trees(swapped) != trees(swapped.replace("%f5, %f4, %f1, %f0", "%f5, %f0, %f1, %f4"))


@pytest.mark.release
def test_strided_rows_of_ttt():
    """With rows that do not begin at multiples of 16 elements."""

    def scanned(apart: bool) -> dict[str, tuple[collections.Counter[str], ...]]:
        found = {}

        def look(kernel, *arguments, **fixed) -> None:
            if kernel.fn.__name__ in ("wyfold_ttt_triton", "wyfold_ttt_replay_triton", "wyfold_ttt_bwd_triton"):
                asm = aot.code(kernel, *arguments, **fixed)[0].asm
                found[kernel.fn.__name__] = trees(asm["ptx"]), reductions(asm["ttgir"])

        def laid_out(x: torch.Tensor) -> torch.Tensor:
            return x.transpose(0, -1).contiguous().transpose(0, -1) if apart else x

        with aot.pretend_gpu("sm_90", look):
            q, k, v = (laid_out(torch.zeros(1, 20, 1, 12)).requires_grad_() for _ in range(3))
            w, b = torch.ones(1, 12), torch.zeros(1, 12)
            o = wyfold.chunk_ttt_linear(q, k, v, w, b, 0.1, chunk_size=16, backend="triton")[0]
            o.backward(laid_out(torch.zeros_like(o)))
        return found

    assert len(scanned(False)) == 3 and scanned(True) == scanned(False)
    with aot.pretend_gpu("sm_90", lambda *_, **__: None):
        q, w = torch.zeros(1, 20, 1, 12), torch.ones(1, 12)
        plan = wyfold.explain(wyfold.chunk_ttt_linear, q, q, q, w, w, 0.1, chunk_size=16, backend="triton")
        assert plan.copies == ("q", "k", "v")
