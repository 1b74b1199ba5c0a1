"""`solve_tril` and `chunk_scaled_dot_kkt`: the row loops, both together against the token loop, errors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import wyfold.reference.delta as recurrence
import wyfold.reference.solve as reference
from wyfold.ops.solve import chunk_scaled_dot_kkt, solve_tril
from wyfold.reference import shapes
from wyfold.reference.inputs import GATES, KEYS
from wyfold.runtime.check import UnsupportedError, checked
from wyfold.runtime.layout import SequenceLayout

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def chunk_rows(T: int, C: int, B: int = 1, H: int = 2, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random A with entries everywhere, small enough for a well-conditioned inverse of its lower triangle."""
    return (torch.randn(B, T, H, C, dtype=torch.float64) / C**0.5).to(dtype)


def grid(T: int, C: int, cu_seqlens: tuple[int, ...] | None) -> tuple[Tensor, Tensor]:
    """For every token, its row in the chunk, and whether it belongs to a sequence."""
    if cu_seqlens is None:
        return torch.arange(T) % C, torch.ones(T, dtype=torch.bool)
    positions = SequenceLayout(torch.tensor(cu_seqlens), T).positions
    return positions.clamp(min=0) % C, positions >= 0


def poisoned(A: Tensor, cu_seqlens: tuple[int, ...] | None = None) -> Tensor:
    """A with NaN in every entry that `solve_tril` must not read."""
    row, owned = grid(A.shape[1], A.shape[-1], cu_seqlens)
    read = (torch.arange(A.shape[-1]) < row[:, None]) & owned[:, None]
    return A.masked_fill(~read[:, None], torch.nan)


def keys(T: int, B: int = 1, kind: str = "normal", dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(T)
    k = KEYS[kind]((B, T, 2, 24), generator).to(dtype)
    return k, torch.rand(B, T, 4, generator=generator, dtype=torch.float64).to(dtype)


# --- solve_tril ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("C", shapes.CHUNK_SIZES)
@pytest.mark.parametrize("T", [0, 1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_solve_every_length(C: int, T: int, float64_bounds):
    A = chunk_rows(T, C, B=2)
    float64_bounds.output("X", solve_tril(A), reference.solve_tril(A))


@pytest.mark.parametrize("C", shapes.CHUNK_SIZES)
@pytest.mark.parametrize("packing", shapes.PACKINGS)
def test_solve_packings(C: int, packing: str, float64_bounds):
    packed = shapes.PACKINGS[packing]
    A, cu = chunk_rows(packed.tokens, C), torch.tensor(packed.cu_seqlens, dtype=torch.int32)
    X = solve_tril(A, cu_seqlens=cu)
    float64_bounds.output("X", X, reference.solve_tril(A, cu_seqlens=cu))
    assert torch.equal(X[:, packed.cu_seqlens[-1] :], torch.zeros_like(A[:, packed.cu_seqlens[-1] :]))
    assert torch.equal(solve_tril(A, cu_seqlens=SequenceLayout(cu, packed.tokens)), X)
    for start, end in zip(packed.cu_seqlens, packed.cu_seqlens[1:]):
        assert torch.equal(solve_tril(A[:, start:end]), X[:, start:end])


@pytest.mark.parametrize("C", shapes.CHUNK_SIZES)
@pytest.mark.parametrize("cu_seqlens", [None, (0, 17, 17, 82, 83, 147)], ids=["dense", "packed"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_garbage_on_and_above_the_diagonal_changes_no_bit(C: int, cu_seqlens, dtype: torch.dtype):
    A = chunk_rows(160, C, dtype=dtype)
    cu = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    X = solve_tril(poisoned(A, cu_seqlens), cu_seqlens=cu)
    assert X.isfinite().all()
    assert torch.equal(X, solve_tril(A, cu_seqlens=cu))
    clean = poisoned(A, cu_seqlens).nan_to_num(0.0)
    with checked():
        assert torch.equal(solve_tril(clean, cu_seqlens=cu), X)
        for t, column in ((0, 0), (20, C - 1)):
            for stray in (1e-3, torch.nan):
                dirty = clean.clone()
                dirty[0, t, 1, column] = stray
                with pytest.raises(
                    ValueError, match=rf"^solve_tril: A must be strictly lower .* \(token {t}, head 1\)"
                ):
                    solve_tril(dirty, cu_seqlens=cu)


@pytest.mark.parametrize("output_dtype", [None, *FLOATS])
@pytest.mark.parametrize("dtype", FLOATS)
def test_solve_dtypes(dtype: torch.dtype, output_dtype: torch.dtype | None):
    """Any input and output dtype: computed in float32, or float64 for a float64 A, and rounded once."""
    A = chunk_rows(40, 16, dtype=dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    X = solve_tril(A, output_dtype=output_dtype)
    assert X.dtype == (output_dtype or wide)
    assert torch.equal(X, solve_tril(A.to(wide)).to(X.dtype))


def test_solve_inverts_the_matrices_of_correlated_keys():
    """Identical keys and beta 2, where powers of A overflow: X is finite and its product with I + A is I."""
    k = KEYS["identical"]((1, 64, 2, 24), torch.Generator().manual_seed(0))
    A = chunk_scaled_dot_kkt(k.float(), torch.full((1, 64, 2), 2.0))
    X = solve_tril(A)
    assert (X.abs() <= 2 + 2**-10).all()  # |X_rs| <= beta |k_r| |k_s|, and rounding
    truth = solve_tril(A.double())
    error = torch.linalg.vector_norm(X.double() - truth) / torch.linalg.vector_norm(truth)
    assert error < 64 * torch.finfo(torch.float32).eps * 2  # one rounding per row, doubled by beta


# --- chunk_scaled_dot_kkt --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [None, "scalar", "channel"])
@pytest.mark.parametrize("C", shapes.CHUNK_SIZES)
@pytest.mark.parametrize("T", [0, 1, 15, 16, 17, 64, 65, 130])
def test_kkt_every_length(C: int, T: int, gate: str | None, float64_bounds):
    k, beta = keys(T, B=2)
    g = None if gate is None else -torch.rand(2, T, 4, *((24,) if gate == "channel" else ()), dtype=torch.float64)
    got = chunk_scaled_dot_kkt(k, beta, g, chunk_size=C)
    float64_bounds.output("L", got, reference.chunk_scaled_dot_kkt(k, beta, g, chunk_size=C))
    row, _ = grid(T, C, None)
    above = torch.arange(C) >= row[:, None]
    assert torch.equal(got.masked_fill(~above[:, None], 0), torch.zeros_like(got))


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("channels", [(), (24,)], ids=["scalar", "channel"])
def test_kkt_any_gate(kind: str, channels: tuple[int, ...], float64_bounds):
    k, beta = keys(67)
    g = GATES[kind]((1, 67, 4, *channels), torch.Generator().manual_seed(0)).double()
    got = chunk_scaled_dot_kkt(k, beta, g)
    float64_bounds.output("L", got, reference.chunk_scaled_dot_kkt(k, beta, g))


@pytest.mark.parametrize("packing", shapes.PACKINGS)
@pytest.mark.parametrize("gate", [None, "scalar", "channel"])
def test_kkt_packings(packing: str, gate: str | None, float64_bounds, threads: int):
    packed = shapes.PACKINGS[packing]
    T, end = packed.tokens, packed.cu_seqlens[-1]
    k, beta = keys(T)
    g = None if gate is None else -torch.rand(1, T, 4, *((24,) if gate == "channel" else ()), dtype=torch.float64)
    cu = torch.tensor(packed.cu_seqlens)
    truth = reference.chunk_scaled_dot_kkt(k, beta, g, chunk_size=16, cu_seqlens=cu)
    for x in (k, beta, g):
        if x is not None:
            x[:, end:] = torch.nan
    got = chunk_scaled_dot_kkt(k, beta, g, chunk_size=16, cu_seqlens=cu)
    float64_bounds.output("L", got, truth)
    for start, stop in zip(packed.cu_seqlens, packed.cu_seqlens[1:]):
        alone = (x if x is None else x[:, start:stop] for x in (k, beta, g))
        assert torch.equal(chunk_scaled_dot_kkt(*alone, chunk_size=16), got[:, start:stop])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("others", FLOATS)
@pytest.mark.parametrize("output_dtype", [None, torch.bfloat16])
def test_kkt_dtypes(dtype: torch.dtype, others: torch.dtype, output_dtype: torch.dtype | None):
    """k, and independently of it beta and g, in any float: computed in the widest of them, rounded once."""
    k, beta = keys(40, dtype=dtype)
    beta, g = beta.to(others), -torch.rand(1, 40, 4).to(others)
    wide = torch.float64 if torch.float64 in (dtype, others) else torch.float32
    got = chunk_scaled_dot_kkt(k, beta, g, output_dtype=output_dtype)
    assert got.dtype == (output_dtype or wide)
    assert torch.equal(got, chunk_scaled_dot_kkt(k.to(wide), beta.to(wide), g.to(wide)).to(got.dtype))


def test_strided_is_contiguous():
    k, beta = keys(50, B=2, dtype=torch.float32)
    g = -torch.rand(2, 50, 4)
    head_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, beta, g)]
    L = chunk_scaled_dot_kkt(k, beta, g, chunk_size=16)
    assert torch.equal(chunk_scaled_dot_kkt(*head_first, chunk_size=16), L)
    assert torch.equal(
        chunk_scaled_dot_kkt(k[:, :, :1].expand_as(k), beta, g), chunk_scaled_dot_kkt(k[:, :, :1], beta, g)
    )
    X = solve_tril(L)
    for strided in (L.transpose(1, 2).contiguous().transpose(1, 2), torch.cat([L, L], -1)[..., 16:]):
        assert torch.equal(solve_tril(strided), X)


# --- both together-----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("C", shapes.CHUNK_SIZES)
@pytest.mark.parametrize("state", [False, True])
def test_deltanet_from_its_parts(C: int, state: bool, float64_bounds):
    """DeltaNet's output and state, chunk by chunk, from u = A diag(beta) v and w = A diag(beta) k."""
    T, H, K, V = 3 * C - 5, 2, 16, 24
    q, k = (torch.nn.functional.normalize(torch.randn(1, T, H, K, dtype=torch.float64), dim=-1) for _ in range(2))
    v, beta = torch.randn(1, T, H, V, dtype=torch.float64), 2 * torch.rand(1, T, H, dtype=torch.float64)
    S0 = torch.randn(1, H, K, V, dtype=torch.float64) if state else None
    truth, true_state = recurrence.delta_rule(
        q, k, v, beta, scale=0.5, initial_state=S0, output_final_state=True, state_dtype=torch.float64
    )
    A = solve_tril(chunk_scaled_dot_kkt(k, beta, chunk_size=C))
    S = torch.zeros(H, K, V, dtype=torch.float64) if S0 is None else S0[0]
    o = []
    for start in range(0, T, C):
        chunk = slice(start, min(T, start + C))
        q_c, k_c, v_c, beta_c, A_c = (x[0, chunk].transpose(0, 1) for x in (q, k, v, beta[..., None], A))
        A_c = A_c[..., : q_c.shape[1]]
        u, w = A_c @ (beta_c * v_c), A_c @ (beta_c * k_c)
        written = u - w @ S
        o.append(0.5 * (q_c @ S + (q_c @ k_c.mT).tril() @ written))
        S = S + k_c.mT @ written
    float64_bounds.output("o", torch.cat(o, 1).transpose(0, 1)[None], truth)
    float64_bounds.output("state", S[None], true_state)


# --- errors ----------------------------------------------------------------------------------------------------------

A16 = torch.zeros(1, 9, 2, 16)
CU9 = torch.tensor([0, 4, 9])
SOLVE_REFUSED = {
    "no tensor": ({"A": None}, TypeError, "A must be a torch.Tensor, got NoneType"),
    "rank 3": ({"A": A16[0]}, ValueError, r"A must have 4 dimensions, \[B, T, H, C\]"),
    "chunk of 48": ({"A": torch.zeros(1, 9, 2, 48)}, ValueError, "C = 16, 32 or 64"),
    "head first": ({"A": A16.transpose(1, 3)}, ValueError, "C = 16, 32 or 64"),
    "no heads": ({"A": A16[:, :, :0]}, ValueError, "A must be .* with H >= 1"),
    "integers": ({"A": A16.int()}, ValueError, "A must be float32"),
    "a gradient": ({"A": A16.clone().requires_grad_()}, ValueError, "A must not require a gradient"),
    "output of integers": ({"output_dtype": torch.int32}, ValueError, "output_dtype must be float32"),
    "output no dtype": ({"output_dtype": "float32"}, TypeError, "output_dtype must be a torch.dtype"),
    "boundaries no tensor": ({"cu_seqlens": [0, 9]}, TypeError, "cu_seqlens must be a torch.Tensor"),
    "boundaries with a batch": (
        {"A": A16.expand(2, -1, -1, -1), "cu_seqlens": CU9},
        ValueError,
        "cu_seqlens must come",
    ),
    "layout of other length": ({"cu_seqlens": SequenceLayout(CU9, 10)}, ValueError, "layout of T = 9 tokens"),
    "absent backend": ({"backend": "gluon"}, UnsupportedError, "backend='gluon' cannot serve"),
    "unknown backend": ({"backend": "fast"}, ValueError, "backend must be one of"),
}
GOOD = {"k": torch.zeros(1, 9, 2, 8), "beta": torch.zeros(1, 9, 4)}
KKT_REFUSED = {
    "k no tensor": ({"k": 1}, TypeError, "k must be a torch.Tensor"),
    "k of rank 3": ({"k": torch.zeros(9, 2, 8)}, ValueError, r"k must have 4 dimensions, \[B, T, H, K\]"),
    "k too wide": ({"k": torch.zeros(1, 9, 2, 257)}, ValueError, "k must have width K from 1 to 256, got 257"),
    "k of width 0": ({"k": torch.zeros(1, 9, 2, 0)}, ValueError, "k must have width K from 1 to 256, got 0"),
    "k of integers": ({"k": torch.zeros(1, 9, 2, 8).int()}, ValueError, "k must be float32"),
    "k wants a gradient": ({"k": torch.zeros(1, 9, 2, 8, requires_grad=True)}, ValueError, "k must not require"),
    "beta missing": ({"beta": None}, TypeError, "beta must be a torch.Tensor"),
    "beta of other length": ({"beta": torch.zeros(1, 8, 4)}, ValueError, r"beta must be \[B, T, HV\]"),
    "beta of too few heads": ({"beta": torch.zeros(1, 9, 1)}, ValueError, "beta must have a multiple of the 2 heads"),
    "beta of odd heads": ({"beta": torch.zeros(1, 9, 3)}, ValueError, "beta must have a multiple of the 2 heads"),
    "beta wants a gradient": ({"beta": torch.zeros(1, 9, 4, requires_grad=True)}, ValueError, "beta must not require"),
    "beta elsewhere": ({"beta": torch.zeros(1, 9, 4, device="meta")}, ValueError, "beta must have the device of k"),
    "g of other heads": ({"g": torch.zeros(1, 9, 2)}, ValueError, r"g must be \[B, T, HV\] = \[1, 9, 4\]"),
    "g of other channels": ({"g": torch.zeros(1, 9, 4, 16)}, ValueError, r"g must be \[B, T, HV, K\]"),
    "g wants a gradient": ({"g": torch.zeros(1, 9, 4, requires_grad=True)}, ValueError, "g must not require"),
    "chunk of 48": ({"chunk_size": 48}, ValueError, "chunk_size must be one of 16, 32, 64, got 48"),
    "chunk no int": ({"chunk_size": 16.0}, ValueError, "chunk_size must be one of"),
    "output of integers": ({"output_dtype": torch.int8}, ValueError, "output_dtype must be float32"),
    "boundaries of floats": ({"cu_seqlens": CU9.float()}, ValueError, "cu_seqlens must be int32 or int64"),
    "absent backend": ({"backend": "triton"}, UnsupportedError, "backend='triton' cannot serve"),
}


@pytest.mark.parametrize("kind", SOLVE_REFUSED)
def test_solve_refusals(kind: str):
    change, error, text = SOLVE_REFUSED[kind]
    with pytest.raises(error, match=f"^solve_tril: .*{text}"):
        solve_tril(**({"A": A16} | change))


@pytest.mark.parametrize("kind", KKT_REFUSED)
def test_kkt_refusals(kind: str):
    change, error, text = KKT_REFUSED[kind]
    with pytest.raises(error, match=f"^chunk_scaled_dot_kkt: .*{text}"):
        chunk_scaled_dot_kkt(**(GOOD | change))


@pytest.mark.parametrize("kind", shapes.INVALID_PACKINGS)
def test_refused_boundaries(kind: str):
    cu = torch.tensor(shapes.INVALID_PACKINGS[kind].cu_seqlens)
    with pytest.raises(ValueError, match=r"^solve_tril: cu_seqlens must "):
        solve_tril(A16, cu_seqlens=cu)
    with pytest.raises(ValueError, match=r"^chunk_scaled_dot_kkt: cu_seqlens must "):
        chunk_scaled_dot_kkt(**GOOD, cu_seqlens=cu)


def test_checked_refuses_a_positive_gate():
    g = torch.zeros(1, 9, 4)
    g[0, 3, 1] = 0.5
    chunk_scaled_dot_kkt(**GOOD, g=g)
    with checked(), pytest.raises(ValueError, match=r"^chunk_scaled_dot_kkt: g must be <= 0.* 0\.5$"):
        chunk_scaled_dot_kkt(**GOOD, g=g)
    with checked():
        chunk_scaled_dot_kkt(**GOOD, g=g, cu_seqlens=torch.tensor([0, 3]))  # rows past the last boundary are not read


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inputs_may_require_a_gradient_under_no_grad(mode: Callable):
    k, beta = keys(40, dtype=torch.float32)
    g = -torch.rand(1, 40, 4)
    L = chunk_scaled_dot_kkt(k, beta, g, chunk_size=16)
    X = solve_tril(L)
    with mode():
        quiet = chunk_scaled_dot_kkt(*(x.clone().requires_grad_() for x in (k, beta, g)), chunk_size=16)
        solved = solve_tril(L.clone().requires_grad_())
    assert torch.equal(quiet, L) and torch.equal(solved, X)
    assert not any(x.requires_grad for x in (L, X, quiet, solved))


# --- registration and compilation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("cu", [None, CU9], ids=["dense", "packed"])
def test_opcheck(cu: Tensor | None):
    A = chunk_rows(9, 16, dtype=torch.bfloat16)
    torch.library.opcheck(torch.ops.wyfold.solve_tril.default, (A, cu, torch.float32, "eager"))
    k, beta = keys(9, dtype=torch.float32)
    for g in (None, -torch.rand(1, 9, 4), -torch.rand(1, 9, 4, 24)):
        arguments = (k, beta, g, cu, 32, torch.bfloat16, "eager")
        torch.library.opcheck(torch.ops.wyfold.chunk_scaled_dot_kkt.default, arguments)


def test_compiles_whole():
    k, beta = keys(50, dtype=torch.float32)
    cu = torch.tensor([0, 20, 50])

    def pair(k: Tensor, beta: Tensor, cu: Tensor) -> Tensor:
        return solve_tril(chunk_scaled_dot_kkt(k, beta, chunk_size=16, cu_seqlens=cu), cu_seqlens=cu)

    torch._dynamo.reset()
    assert torch.equal(torch.compile(pair, fullgraph=True, backend="aot_eager")(k, beta, cu), pair(k, beta, cu))
