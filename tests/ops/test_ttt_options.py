"""TTT-Linear with all pairs of options, and with mixed dtypes, against the token loop in float64."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold import reference
from wyfold.reference import inputs
from wyfold.reference.error import Verdict, judge, require
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target

F64 = torch.float64
NAMES = ("o", "state", "state_bias")
GRADIENT_OF = {"initial_state": "dh0", "initial_state_bias": "dc0"}
CHUNK_ONLY = ("disable_recompute", "batch_invariant")  # options that the loop does not have
FACTORS: dict[str, tuple[Any, ...]] = {
    "C": (16, 32, 64),
    "packing": ("dense", "packed", "spare rows"),
    "states": ("both", "matrix", "bias", "none"),
    "state_v_first": (False, True),
    "state_dtype": (None, torch.float32, torch.bfloat16, torch.float16),
    "eta": ("column", "row", "number"),
    "eta_col": (None, "column", "row", "number"),
    "residual": ("o", "q"),
    "heads": ((1, 1), (2, 4), (1, 3)),
    "disable_recompute": (False, True),
    "batch_invariant": (False, True),
    "D": (8, 24),
    "eps": (1e-6, 1e-2),
    "scale": (None, 0.3),
}
Cell = dict[str, Any]


def pairs(cell: Cell) -> set[tuple[str, str]]:
    return set(itertools.combinations([f"{name} {value}" for name, value in cell.items()], 2))


def pairwise() -> list[Cell]:
    """Cases that cover every pair of values of two options: each is the best of forty random candidates."""
    drawer, cells = random.Random(0), []
    missing = set().union(
        *(pairs({a: x, b: y}) for a, b in itertools.combinations(FACTORS, 2) for x in FACTORS[a] for y in FACTORS[b])
    )
    while missing:
        drawn = [{name: drawer.choice(values) for name, values in FACTORS.items()} for _ in range(40)]
        best = max(drawn, key=lambda cell: len(pairs(cell) & missing))
        if pairs(best) & missing:
            missing -= pairs(best)
            cells.append(best)
    return cells


CELLS = pairwise()


def arguments_of(cell: Cell) -> dict[str, Any]:
    packed = cell["packing"] != "dense"
    (H, HV), T, D = cell["heads"], 75, cell["D"]
    a = inputs.draw(
        rule="ttt_linear",
        shape=Shape(1 if packed else 2, T, H, HV, D, D),
        state="normal",
        sequences=4 if packed else None,
        dtype=F64,
        eta_col="signed",
    )
    if cell["eta_col"] is None:
        del a["eta_col"]
    elif cell["eta_col"] != "column":
        a["eta_col"] = 1.3 if cell["eta_col"] == "number" else a["eta_col"].squeeze(-1)
    for name, kept in (("initial_state", ("both", "matrix")), ("initial_state_bias", ("both", "bias"))):
        if cell["states"] not in kept:
            del a[name]
    if packed:
        a["cu_seqlens"] = torch.tensor([0, 33, 33, 34, T if cell["packing"] == "packed" else T - 6])
    if cell["eta"] != "column":
        a["eta"] = 0.07 if cell["eta"] == "number" else a["eta"].squeeze(-1)
    if cell["state_v_first"] and "initial_state" in a:
        a["initial_state"] = a["initial_state"].mT
    same = {name: cell[name] for name in ("residual", "state_v_first", "state_dtype", "eps", "scale", *CHUNK_ONLY)}
    return a | same | {"chunk_size": cell["C"], "output_final_state": True}


def results(op, arguments: dict[str, Any], fed: list[Tensor] | None = None) -> dict[str, Tensor]:
    """Outputs and gradients by name; fed: incoming gradients of the outputs."""
    leaves = {
        name: x.detach().requires_grad_()
        for name, x in arguments.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    found = op(**arguments | leaves)
    fed = [inputs.incoming(x, seed) for seed, x in enumerate(found)] if fed is None else fed
    grads = torch.autograd.grad(found, list(leaves.values()), fed)
    named = dict(zip(NAMES, (x.detach() for x in found), strict=True))
    return named | {GRADIENT_OF.get(name, f"d{name}"): dx for name, dx in zip(leaves, grads, strict=True)}


def of_the_loop(arguments: dict[str, Any], fed: list[Tensor] | None = None) -> dict[str, Tensor]:
    meant = {name: x for name, x in arguments.items() if name not in CHUNK_ONLY}
    return results(reference.ttt_linear, meant, fed)


def test_every_pair_has_a_cell():
    seen = set().union(*map(pairs, CELLS))
    wanted = sum(len(FACTORS[a]) * len(FACTORS[b]) for a, b in itertools.combinations(FACTORS, 2))
    assert len(seen) == wanted
    assert len(CELLS) < 40


@pytest.mark.parametrize("number", range(len(CELLS)))
def test_all_pairs_of_options(number: int, float64_bounds):
    """States stored in fewer bits are the loop's rounded once, within one ulp of that dtype."""
    a = arguments_of(CELLS[number])
    got, truth = results(wyfold.chunk_ttt_linear, a), of_the_loop(a)
    assert got.keys() == truth.keys()
    for name, x in truth.items():
        assert got[name].dtype == x.dtype, name
        if x.dtype == F64:
            (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, got[name], x)
        else:
            wide = of_the_loop(a | {"state_dtype": None})[name]
            require(judge(got[name], wide, x, name=name))
    if "cu_seqlens" in a:
        end = int(a["cu_seqlens"][-1])
        for name in {"o", "dq", "dk", "dv", "deta", "deta_col"} & got.keys():
            assert not got[name][:, end:].any(), name


# --- mixed dtypes ---------------------------------------------------------------------------------------------------

PARAMETERS = ("w", "b", "eta", "eta_col")


def judged(got: dict[str, Tensor], truth: dict[str, Tensor]) -> list[Verdict]:
    """Judge 16-bit results by the rounded truth, others by the target of float32."""
    return [
        judge(
            got[name],
            x,
            x.to(got[name].dtype) if got[name].dtype in (torch.bfloat16, torch.float16) else None,
            name=name,
            target=target(name, torch.float32 if got[name].dtype == F64 else got[name].dtype, "ttt"),
        )
        for name, x in truth.items()
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [*PARAMETERS, "all of them"])
def test_parameters_wider_than_the_tokens(dtype: torch.dtype, wide: str):
    """q sets the arithmetic; a float64 weight or step size is accepted and gets a float64 gradient."""
    a = inputs.draw(rule="ttt_linear", shape=Shape(1, 40, 1, 2, 8, 8), dtype=dtype, state="normal", eta_col="uniform")
    names = PARAMETERS if wide == "all of them" else (wide,)
    a = a | {name: a[name].double() for name in names} | {"output_final_state": True}
    got = results(wyfold.chunk_ttt_linear, a)
    assert got["o"].dtype == dtype and got["state"].dtype == torch.float32
    assert all(got[f"d{name}"].dtype == (F64 if name in names else dtype) for name in PARAMETERS)
    fed = [inputs.incoming(got[name], seed).double() for seed, name in enumerate(NAMES)]
    exact = {name: x.double() if isinstance(x, Tensor) else x for name, x in a.items()}
    require(*judged(got, of_the_loop(exact, fed)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_narrower_than_float64_tokens(dtype: torch.dtype, float64_bounds):
    a = inputs.draw(rule="ttt_linear", shape=Shape(1, 40, 1, 2, 8, 8), dtype=F64, state="normal", eta_col="uniform")
    narrow = (*PARAMETERS, "initial_state", "initial_state_bias")
    a = a | {name: a[name].to(dtype) for name in narrow} | {"output_final_state": True}
    got = results(wyfold.chunk_ttt_linear, a)
    truth = of_the_loop({name: x.double() if isinstance(x, Tensor) else x for name, x in a.items()})
    for name, x in truth.items():
        argument = {"dh0": "initial_state", "dc0": "initial_state_bias"}.get(name, name[1:])
        stored = a[argument].dtype if name.startswith("d") else F64
        assert got[name].dtype == stored, name
        if stored == F64:
            (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, got[name], x)
        else:
            require(judge(got[name], x, x.to(stored), name=name))
