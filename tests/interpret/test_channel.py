"""The adjoint of channel-gated decays, against float64 with one exponential per pair of tokens and channel.

Everything is float32, so the error is that of the splitting into anchors. Strong gates lose no more.
"""

import pytest
import torch
from torch import Tensor

from wyfold.reference.error import judge, require

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language", reason="Triton is not installed")
adjoint = pytest.importorskip("wyfold.tile.decay.channel.triton.adjoint", reason="Triton is not installed")
near_pairs = pytest.importorskip("wyfold.tile.decay.channel.triton.near_pairs", reason="Triton is not installed")
index = pytest.importorskip("wyfold.tile.index.triton", reason="Triton is not installed")
sub_chunks = pytest.importorskip("wyfold.tile.index.triton.sub_chunks", reason="Triton is not installed")
dot = pytest.importorskip("wyfold.tile.dot.triton", reason="Triton is not installed")

NEAR, LOG2_E = near_pairs.NEAR, 1.4426950408889634
channel_bwd, store_near_pairs = adjoint.channel_bwd, near_pairs.store_near_pairs
PairMemory, PairRows = adjoint.PairMemory, adjoint.PairRows
TokenRows = index.TokenRows
load_sub_chunks, store_sub_chunks = sub_chunks.load_sub_chunks, sub_chunks.store_sub_chunks
load_tile = index.load_tile
FLOOR, K = -104.0, 64
MOST = 1e-6  # relative, in float32: a few dozen roundings


@triton.jit
def adjoint(
    p_q, p_k, p_g, p_pairs, p_dJT, p_near, p_rows, p_carried, p_out, s, zero,
    BT: tl.constexpr, K: tl.constexpr, NEAR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run the device function on one chunk; p_rows and p_out hold three tiles each."""
    i = tl.program_id(0).to(tl.int64)
    b_q = load_sub_chunks(p_q, s, TokenRows(i, 0, BT), 0, 0, zero, K, BT, K, NEAR)
    b_k = load_sub_chunks(p_k, s, TokenRows(i, 0, BT), 0, 0, zero, K, BT, K, NEAR)
    b_g = load_sub_chunks(p_g, s, TokenRows(i, 0, BT), 0, 0, zero, K, BT, K, NEAR) * 1.4426950408889634
    store_near_pairs(p_near, i, 0, load_tile(p_pairs, i * 3 + 2, 0, 0, BT, BT, BT, BT), BT)
    store_near_pairs(p_near, i, 1, load_tile(p_dJT, i, 0, 0, BT, BT, BT, BT), BT)
    b_dq = load_tile(p_rows, i * 3, 0, 0, BT, K, BT, K)
    b_dk = load_tile(p_rows, i * 3 + 1, 0, 0, BT, K, BT, K)
    b_dk_write = load_tile(p_rows, i * 3 + 2, 0, 0, BT, K, BT, K)
    b_carried = tl.load(p_carried + i * K + tl.arange(0, K))
    tl.debug_barrier()
    b_dq, b_dk, b_dg = channel_bwd(
        PairRows(b_q, b_k), b_g, PairMemory(p_pairs, p_near, i, zero), b_dq, b_dk, b_dk_write, b_carried, tl.float32,
        PRECISION,
    )  # fmt: skip
    store_sub_chunks(p_out, i * 3, 0, b_dq, zero, K, BT, K, NEAR)
    store_sub_chunks(p_out, i * 3 + 1, 0, b_dk, zero, K, BT, K, NEAR)
    store_sub_chunks(p_out, i * 3 + 2, 0, b_dg, zero, K, BT, K, NEAR)


def loss(q: Tensor, k: Tensor, g: Tensor, dJ: Tensor, dP: Tensor, rows: Tensor, carried: Tensor) -> Tensor:
    """The function whose gradients are tested. Each decay is exp of a sum of gates, not a difference of prefix sums."""
    C = q.shape[1]
    row = torch.arange(C)
    token, later, earlier = row[:, None, None], row[None, :, None], row[None, None, :]
    between = ((token > earlier) & (token <= later)).to(g)  # [token, r, s]
    decay = torch.exp(torch.einsum("trs,ntc->nrsc", between, g))
    start = torch.exp(torch.einsum("rt,ntc->nrc", (row[:, None] >= row).to(g), g))
    end = torch.exp(torch.einsum("rt,ntc->nrc", (row[:, None] < row).to(g), g))
    found = torch.einsum("nrs,nrc,nsc,nrsc->", dJ, k, k, decay) + torch.einsum("nrs,nrc,nsc,nrsc->", dP, q, k, decay)
    found = found + (rows[:, 0] * q * start).sum() + (rows[:, 1] * k * start).sum() + (rows[:, 2] * k * end).sum()
    return found + (carried * torch.exp(g.sum(1))).sum()


def strong(name: str, N: int, C: int) -> Tensor:
    """Log gates of a token and channel."""
    if name == "mixed":  # from nearly 0 to ranges that no anchor can represent, and resets
        g = -torch.rand(N, C, K) * torch.tensor([0.01, 1.0, 30.0, 104.0])[torch.randint(4, (N, C, K))]
        return torch.where(torch.rand(N, C, K) < 0.1, FLOOR, g)
    if name == "alternating":
        return torch.where(torch.arange(C)[:, None] % 2 == 1, FLOOR, 0.0).expand(N, C, K).clone()
    if name == "one reset":
        return torch.where(torch.arange(C)[:, None] == C // 2 + 3, FLOOR, -0.01 * torch.rand(N, C, K))
    return float(name) * torch.rand(N, C, K) if name == "-1" else torch.full((N, C, K), float(name))


@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("gate", ["0", "-1", "-20", "-104", "mixed", "alternating", "one reset"])
def test_the_adjoint(gate: str, C: int, device: torch.device):
    N = 2
    q, k, g = torch.randn(N, C, K), torch.nn.functional.normalize(torch.randn(N, C, K), dim=-1), strong(gate, N, C)
    dJ, dP = torch.randn(N, C, C).tril(-1), torch.randn(N, C, C).tril()
    rows, carried = torch.randn(N, 3, C, K), torch.randn(N, K)
    leaves = [x.double().requires_grad_() for x in (q, k, g)]
    truth = torch.autograd.grad(loss(*leaves, *(x.double() for x in (dJ, dP, rows, carried))), leaves)

    pairs = torch.stack([dJ + dJ.mT, dP, dP.mT], 1).contiguous().to(device)
    near, out = torch.full((N, C, near_pairs.NEAR, 2), torch.nan), torch.full((N, 3, C, K), torch.nan)
    near, out = near.to(device), out.to(device)
    adjoint[(N,)](
        *(x.to(device) for x in (q, k, g)), pairs, dJ.mT.contiguous().to(device), near, rows.to(device),
        carried.to(device), out, (C * K, K, 0, 1), 0,
        BT=C, K=K, NEAR=near_pairs.NEAR, PRECISION=dot.precision(torch.float32), num_warps=C // near_pairs.NEAR,
    )  # fmt: skip
    require(*(judge(out[:, i].cpu(), truth[i], target=MOST, name=name) for i, name in enumerate(("dq", "dk", "dg"))))
    # Nothing passes a reset, so the gradient of its gate is exactly zero.
    assert not out[:, 2].cpu()[g == FLOOR].any()
