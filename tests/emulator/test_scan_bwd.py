"""`scan_bwd` in Gluon, on the emulator, against its formulas in PyTorch."""

import torch
from tests.emulator.cases import cases
from tests.emulator.compare import require_close
from tests.emulator.delta import PACKED, C, Call, Chunk, draw, heads, options, rounded
from tests.emulator.machine import Machine
from torch import Tensor

from wyfold.kernels.scan_bwd import gluon
from wyfold.kernels.scan_bwd.triton import token_borders
from wyfold.runtime.kernel_configs import Config, LaunchKey

SCALE = 0.25
CONFIGS = [
    ({"BV": 128, "PARTS": 1, "OUT": 2}, 2),
    ({"BV": 128, "PARTS": 1, "OUT": 1}, 2),
    ({"BV": 128, "PARTS": 2, "OUT": 1}, 2),
    ({"BV": 64, "PARTS": 1, "OUT": 1}, 3),
]
FORMS = [("scalar", False), ("scalar", True), ("channel", True), ("channel", True, False), ("scalar", False, False)]
SHAPES = [
    {"B": 2, "T": 200},
    {"T": 530, "cu": PACKED, "H": 2},
    {"T": 320, "given": False},
    {"T": 40},
    {"T": 130, "K": 64},
]
WIDE = [({"BV": 64, "PARTS": 1, "OUT": 1}, 2)]
"""Configurations for keys of 256 channels, which have no folded form."""
WIDE_FORMS = [("scalar", False), ("scalar", False, False)]
CASES = cases(CONFIGS, FORMS, SHAPES) + cases(WIDE, WIDE_FORMS, [shape | {"K": 256} for shape in SHAPES[:4]])


def expected(call: Call) -> tuple[list[int], dict[str, Tensor]]:
    """Tiles that are written, with S, dS, e and X of every chunk, and gradients of the initial states.

    dS and X are in units of the scale.
    """
    (K, V), n = (call.q.shape[3], call.v.shape[3]), call.prepared.rows.shape[0]
    S_, dS_ = torch.zeros(2, n, V, K)
    e_, X_ = torch.zeros(2, n, C, V)
    dS0 = torch.zeros(len(call.spans), call.v.shape[2], K, V)
    written = []
    for sequence, head, chunks in heads(call):
        written += [x.tile for x in chunks]
        S = torch.zeros(V, K) if call.S0 is None else call.S0[sequence, head].T
        for x in chunks:
            S_[x.tile] = S
            e, S = forward(x, S)
            e_[x.tile] = e.T
        dS = torch.zeros(V, K) if call.dST is None else call.dST[sequence, head].T / SCALE
        for x in reversed(chunks):
            dS_[x.tile] = dS
            X, dS = reverse(x, dS)
            X_[x.tile] = X.T
        dS0[sequence, head] = dS.T * SCALE
    return written, {"S": S_, "dS": dS_, "e": e_, "X": X_, "dS0": dS0}


def forward(x: Chunk, S: Tensor) -> tuple[Tensor, Tensor]:
    """e, and the final state."""
    R = x.v - (rounded(S) @ x.k.T) * x.in_k
    e = rounded(R) @ x.W
    if x.E is not None:
        return R - rounded(R) + e, S * x.total + rounded(R * x.beta) @ x.E
    return e, S * x.total + rounded(e * (x.beta * x.out)) @ x.k


def reverse(x: Chunk, dS: Tensor) -> tuple[Tensor, Tensor]:
    """X, and the gradient of the initial state."""
    X = x.do @ x.F.T
    if x.E is not None:
        X = X + rounded(dS) @ x.E.T
    else:
        z = (rounded(dS) @ x.k.T) * (x.out * x.beta)
        X = X + (z - rounded(z) + rounded(z) @ x.W.T) / x.beta
    return X, dS * x.total + rounded(x.do * x.in_q) @ x.q - rounded(X * (x.beta * x.in_k)) @ x.k


def test_scan_bwd(case):
    config, form, shape = case.values
    judge(Machine(*case.schedule), config, draw(*form, **shape))


def judge(machine: Machine, config: tuple[dict[str, int], int], call: Call) -> None:
    blocks, stages = config
    written, want = expected(call)
    call.spoil()
    dS0 = torch.full_like(want["dS0"], torch.nan) if call.S0 is not None else None
    found = token_borders(call.q, call.v, call.grid)
    with machine.installed(gluon, Config(blocks["BV"] // 16 // blocks["PARTS"], stages, blocks)):
        gluon.scan_bwd(
            call.q, call.k, call.v, call.launched, call.S0, call.do, call.dST, call.grid,
            options(scale=SCALE, erases=call.erases), LaunchKey(), dS0, found,
        )  # fmt: skip
    results = {name: x for name, x in found._asdict().items() if name != "norms"}  # from `prepare`
    pairs = {name: (x[written], want[name][written].to(x.dtype)) for name, x in results.items()}
    require_close(machine, **pairs, **({} if dS0 is None else {"dS0": (dS0, want["dS0"])}))
