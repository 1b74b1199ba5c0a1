"""Rows and columns of a low-rank transition: each rule's formulas, decayed grams by their definition, and adjoints."""

import pytest
import torch
from torch import Tensor

from wyfold.tile.columns.eager import (
    Columns,
    RuleTokens,
    columns,
    columns_bwd,
    early,
    erasing_gram,
    erasing_gram_bwd,
    late,
    query_gram_bwd,
    read_from_start,
    reads_before,
)
from wyfold.tile.decay.eager import decayed_grams, running_sum

N, C, K, V = 2, 16, 8, 6
GATES = {"none": 0, "scalar": 1, "channel": K}


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def tokens(**absent: bool) -> RuleTokens:
    wide, value = (N, C, K), (N, C, V)
    drawn = RuleTokens(normal(*wide), normal(*value), normal(*wide), normal(*wide), normal(*value), normal(N, C, 1))
    return drawn._replace(**dict.fromkeys(absent))


CASES = {
    "given": tokens(w=True, beta=True),
    "rates": tokens(w=True, beta=True),
    "keys": tokens(),
    "keys of GDN-2": tokens(a=True, beta=True),
    "keys of Comba": tokens(b=True, w=True),
    "keys alone": tokens(a=True, b=True, w=True, beta=True),
}


@pytest.mark.parametrize("name", CASES)
def test_columns(name: str):
    k, v, a, b, w, beta = CASES[name]
    rule = name.split()[0]
    one = torch.ones(1, dtype=torch.float64)
    if rule == "given":
        expected = (a, b, k, v)
    elif rule == "rates":
        expected = (-a, a * b, k, v)
    else:
        column = k * (one if beta is None else beta)
        row = -(k if a is None else a) * (one if b is None else b)
        expected = (row, column, column, v * (one if w is None else w))
    got = columns(rule, CASES[name])
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert (got.b is got.k) == (rule == "keys") == (not reads_before(rule))


@pytest.mark.parametrize("name", CASES)
def test_columns_bwd(name: str, float64_bounds):
    rule = name.split()[0]
    leaves = RuleTokens(*(None if x is None else x.clone().requires_grad_() for x in CASES[name]))
    made = columns(rule, leaves)
    arrows = [torch.randn_like(x) for x in made]
    given = {name: x for name, x in leaves._asdict().items() if x is not None}
    truth = torch.autograd.grad(made, list(given.values()), arrows)
    da, db, dk, dv = arrows
    if made.b is made.k:  # one tensor has one gradient
        dk, db = db + dk, None
    got = columns_bwd(rule, CASES[name], Columns(da, db, dk, dv))._asdict()  # type: ignore[arg-type]
    assert {name for name, x in got.items() if x is not None} == set(given)
    for argument, dx in zip(given, truth, strict=True):
        float64_bounds.gradient(f"d{argument}", got[argument], dx)


def test_early_and_late_are_adjoint(float64_bounds):
    x, y = normal(N, C, K), normal(N, C, K)
    float64_bounds.output("inner product", (early(x) * y).sum(), (x * late(y)).sum())
    assert torch.equal(early(late(x))[:, :-1], x[:, :-1]) and not late(x)[:, 0].any() and not early(x)[:, -1].any()


def gate_of(kind: str, steep: float) -> Tensor | None:
    return None if kind == "none" else -steep * torch.rand(N, C, GATES[kind], dtype=torch.float64)


def defined_gram(a: Tensor, column: Tensor, g: Tensor | None, before: bool) -> tuple[Tensor, Tensor]:
    """The gram and the rows read from the chunk's start, one product of decays at a time."""
    gram, rows = a.new_zeros(N, C, C), []
    decay = torch.ones(N, C, 1, dtype=a.dtype) if g is None else g.exp()
    for r in range(C):
        last = r if before else r + 1  # decays of tokens before this one have passed
        rows.append(a[:, r] * decay[:, :last].prod(1))
        for s in range(r):
            gram[:, r, s] = (a[:, r] * column[:, s] * decay[:, s + 1 : last].prod(1)).sum(-1)
    return gram, torch.stack(rows, 1)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("steep", [0.1, 80.0])
@pytest.mark.parametrize("kind", GATES)
def test_erasing_gram_and_its_adjoint(kind: str, steep: float, before: bool, float64_bounds):
    a, column, g = normal(N, C, K), normal(N, C, K), gate_of(kind, steep)
    leaves = [x.requires_grad_() for x in (a, column, g) if x is not None]
    truth, rows = defined_gram(a, column, g, before)
    G = running_sum(g)
    with torch.no_grad():
        gram = erasing_gram(a, column, G, before=before)
        float64_bounds.output("gram", gram, truth.detach())
        float64_bounds.output("rows", read_from_start(a, G, before=before), rows.detach())
        dgram = normal(N, C, C).tril(-1)
        found = erasing_gram_bwd(a, column, G, gram, dgram, before=before)
    for name, got, dx in zip(("da", "dcolumn", "dg"), found, torch.autograd.grad(truth, leaves, dgram), strict=False):
        float64_bounds.gradient(name, got, dx)


@pytest.mark.parametrize("kind", GATES)
def test_query_gram_bwd(kind: str, float64_bounds):
    q, column, g = normal(N, C, K), normal(N, C, K), gate_of(kind, 0.1)
    leaves = [x.requires_grad_() for x in (q, column, g) if x is not None]
    diagonal = torch.diag_embed((q * column).sum(-1))
    truth = defined_gram(q, column, g, before=False)[0] + diagonal
    dP, G = normal(N, C, C).tril(), running_sum(g)
    with torch.no_grad():
        P = decayed_grams(q, column, G)[1]
        found = query_gram_bwd(q, column, G, P, dP)
    float64_bounds.output("P", P, truth.detach())
    for name, got, dx in zip(("dq", "dcolumn", "dg"), found, torch.autograd.grad(truth, leaves, dP), strict=False):
        float64_bounds.gradient(name, got, dx)


@pytest.mark.parametrize("kind", GATES)
def test_rows_do_not_depend_on_later_rows(kind: str):
    a, column, g = normal(N, C, K), normal(N, C, K), gate_of(kind, 1.0)
    for before in (True, False):
        whole = erasing_gram(a, column, running_sum(g), before=before)
        for x in (a, column, g):
            if x is not None:
                later = [torch.cat([y[:, :9], torch.randn_like(y[:, 9:]).abs().neg()], 1) if y is x else y
                         for y in (a, column, g) if y is not None]  # fmt: skip
                G = running_sum(later[2]) if g is not None else None
                assert torch.equal(erasing_gram(*later[:2], G, before=before)[:, :9], whole[:, :9])
