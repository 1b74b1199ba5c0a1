"""Rows and columns of a low-rank transition: each rule's formulas, decayed grams by their definition, and adjoints."""

import pytest
import torch
from torch import Tensor

from wyfold.tile.columns.eager import (
    ONE_COLUMN,
    Columns,
    RuleTokens,
    columns,
    columns_bwd,
    early,
    late,
    pair_grams,
    pair_grams_bwd,
    read_from_start,
    reads_before,
)
from wyfold.tile.decay.eager import running_sum

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
    "keys": tokens(a=True, beta=True),
    "keys alone": tokens(a=True, b=True, w=True, beta=True),
    "feedback": tokens(b=True, w=True),
    "feedback alone": tokens(b=True, w=True, beta=True),
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
    elif rule == "feedback":
        expected = (-a, k * (one if beta is None else beta), k * (one if beta is None else beta), v)
    else:
        expected = (-k * (one if b is None else b), k, k, v * (one if w is None else w))
    got = columns(rule, CASES[name])
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert (got.b is got.k) == (rule in ONE_COLUMN) and reads_before(rule) == (rule != "keys")


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
def test_pair_grams_and_their_adjoint(kind: str, steep: float, before: bool, float64_bounds):
    a, q, column, g = normal(N, C, K), normal(N, C, K), normal(N, C, K), gate_of(kind, steep)
    leaves = [x.requires_grad_() for x in (a, q, column, g) if x is not None]
    A, rows = defined_gram(a, column, g, before)
    P = defined_gram(q, column, g, before=False)[0] + torch.diag_embed((q * column).sum(-1))
    dgrams, G = (normal(N, C, C).tril(-1), normal(N, C, C).tril()), running_sum(g)
    with torch.no_grad():
        grams = pair_grams(a, q, column, G, before=before)
        float64_bounds.output("A", grams[0], A.detach())
        float64_bounds.output("P", grams[1], P.detach())
        float64_bounds.output("rows", read_from_start(a, G, before=before), rows.detach())
        found = pair_grams_bwd(a, q, column, G, grams, dgrams, before=before)
    for name, got, dx in zip(found._fields, found, torch.autograd.grad((A, P), leaves, dgrams), strict=False):
        float64_bounds.gradient(f"d{name}", got, dx)
    assert (found.g is None) == (kind == "none")


@pytest.mark.parametrize("kind", GATES)
def test_rows_do_not_depend_on_later_rows(kind: str):
    given = [x for x in (normal(N, C, K), normal(N, C, K), normal(N, C, K), gate_of(kind, 1.0)) if x is not None]

    def grams(a: Tensor, q: Tensor, column: Tensor, g: Tensor | None = None, *, before: bool) -> tuple[Tensor, Tensor]:
        return pair_grams(a, q, column, running_sum(g), before=before)

    for before in (True, False):
        whole = grams(*given, before=before)
        for changed in range(len(given)):
            later = list(given)
            later[changed] = torch.cat([given[changed][:, :9], -torch.rand_like(given[changed][:, 9:])], 1)
            assert all(torch.equal(x[:, :9], y[:, :9]) for x, y in zip(grams(*later, before=before), whole))
