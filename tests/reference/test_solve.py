"""Key Gram matrix and triangular inverse: formulas, inversion, and DeltaNet from both."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from wyfold.reference import chunk_scaled_dot_kkt, delta_rule, solve_tril
from wyfold.reference.error import judge, require
from wyfold.reference.inputs import draw
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target

O64 = target("o", torch.float64)
SHAPE = Shape(B=2, T=37, H=2, HV=4, K=8, V=5)
RULE_OF_RANK = {0: "delta_rule", 3: "gated_delta_rule", 4: "kda"}


def chunk_of(x: Tensor, start: int, end: int) -> Tensor:
    """Rows start to end of x [B, T, HV, C], as square matrices [B, HV, n, n]."""
    return x[:, start:end, :, : end - start].transpose(1, 2)


@pytest.mark.parametrize("rank", RULE_OF_RANK, ids=["no gate", "scalar gate", "channel gate"])
def test_the_gram_matrix_is_the_decayed_product_of_keys(rank):
    arguments = draw("random", RULE_OF_RANK[rank], SHAPE, dtype=torch.float64)
    k, beta, g = arguments["k"], arguments["beta"], arguments.get("g")
    L = chunk_scaled_dot_kkt(k, beta, g, chunk_size=16)
    keys = k.repeat_interleave(2, dim=2)
    steps = torch.zeros_like(keys) if g is None else g.reshape(*beta.shape, -1).expand_as(keys)
    truth = torch.zeros_like(L)
    for t in range(SHAPE.T):
        for s in range(t // 16 * 16, t):
            decay = steps[:, s + 1 : t + 1].sum(1).exp()
            truth[:, t, :, s % 16] = beta[:, t] * (keys[:, t] * keys[:, s] * decay).sum(-1)
    require(judge(L, truth, name="L", target=O64))


def test_an_infinite_gate_zeroes_the_gram_matrix():
    arguments = draw("random", "gated_delta_rule", SHAPE, gate="reset one")
    L = chunk_scaled_dot_kkt(arguments["k"], arguments["beta"], arguments["g"], chunk_size=64)
    t = SHAPE.T // 2
    assert L.isfinite().all() and not L[:, t:, :, :t].any()
    assert L[:, t + 1 :, :, t].all() and L[:, 1:t, :, 0].all()


@pytest.mark.parametrize("C", [16, 32, 64])
def test_the_inverse_inverts(C):
    arguments = draw("identical", "delta_rule", SHAPE, dtype=torch.float64)
    L = chunk_scaled_dot_kkt(arguments["k"], arguments["beta"], chunk_size=C)
    X = solve_tril(L)
    for start in range(0, SHAPE.T, C):
        end = min(start + C, SHAPE.T)
        identity = torch.eye(end - start, dtype=torch.float64).expand(SHAPE.B, SHAPE.HV, -1, -1)
        product = (identity + chunk_of(L, start, end)) @ chunk_of(X, start, end)
        require(judge(product, identity.contiguous(), name="(I + L) X", target=O64))
        assert not X[:, start:end, :, end - start :].any()


def test_only_the_strictly_lower_part_is_read():
    L = torch.randn(1, 37, 2, 16).tril(-1)
    column, position = torch.arange(16), torch.arange(37) % 16
    X = solve_tril(L.where((column < position[:, None])[None, :, None], 0.0))
    garbage = L.where((column < position[:, None])[None, :, None], float("nan"))
    assert torch.equal(X, solve_tril(garbage))
    assert torch.equal(X.bfloat16(), solve_tril(garbage, output_dtype=torch.bfloat16))


def test_each_packed_sequence_starts_a_chunk():
    bounds = [0, 5, 5, 25, 33]
    arguments = draw("random", "kda", Shape(B=1, T=37, H=1, HV=2, K=8, V=5))
    k, beta, g = arguments["k"], arguments["beta"], arguments["g"]
    for x in (k, beta, g):
        x[:, bounds[-1] :] = float("nan")
    L = chunk_scaled_dot_kkt(k, beta, g, chunk_size=16, cu_seqlens=torch.tensor(bounds))
    X = solve_tril(L, cu_seqlens=torch.tensor(bounds))
    assert not L[:, bounds[-1] :].any() and not X[:, bounds[-1] :].any()
    for start, end in pairwise(bounds):
        alone = chunk_scaled_dot_kkt(k[:, start:end], beta[:, start:end], g[:, start:end], chunk_size=16)
        assert torch.equal(L[:, start:end], alone) and torch.equal(X[:, start:end], solve_tril(alone))


def test_gram_matrix_and_inverse_give_delta_net():
    """One chunk: the written values are A diag(beta) (V - K S0); the output reads S0 and these."""
    shape = Shape(B=2, T=16, H=2, HV=4, K=8, V=5)
    arguments = draw("random", "delta_rule", shape, dtype=torch.float64, state="normal")
    q, k = (arguments[n].repeat_interleave(2, dim=2).transpose(1, 2) for n in ("q", "k"))
    v, beta, S0 = arguments["v"].transpose(1, 2), arguments["beta"].transpose(1, 2), arguments["initial_state"]
    A = chunk_of(solve_tril(chunk_scaled_dot_kkt(arguments["k"], arguments["beta"], chunk_size=16)), 0, 16)
    written = A @ (beta[..., None] * (v - k @ S0))
    o = shape.K**-0.5 * (q @ S0 + (q @ k.mT).tril() @ written)
    truth, final = delta_rule(**arguments, output_final_state=True)
    require(
        judge(o.transpose(1, 2), truth, name="o", target=O64),
        judge(S0 + k.mT @ written, final, name="state", target=O64),
    )
