"""The forward of GDN-2 by its launches on Hopper, on the emulator, against the token loop in float64."""

from itertools import pairwise

import torch
from tests.emulator.cases import cases
from tests.emulator.delta import C, options
from tests.emulator.machine import Machine

from wyfold import reference
from wyfold.kernels.low_rank_prepare import gluon as prepare
from wyfold.kernels.low_rank_prepare.gluon import erase_gate
from wyfold.kernels.low_rank_prepare.triton import call_arguments, launch_key
from wyfold.kernels.low_rank_scan import gluon as scan
from wyfold.kernels.prepare.gluon import channel
from wyfold.reference import inputs
from wyfold.reference.error import judge, require
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target
from wyfold.runtime.chunk_layout import chunk_grid
from wyfold.runtime.kernel_configs import Config

BF16 = torch.bfloat16
CALLS = [
    {"T": 130, "HV": 2},
    {"T": 300, "cu": [0, 65, 65, 200]},
    {"T": 64, "w": False, "initial": False},
    {"T": 100, "strided": True},
]
CASES = cases(CALLS)


def test_gdn2(case):
    (call,), machine = case.values, Machine(*case.schedule)
    T, HV, cu = call["T"], call.get("HV", 1), call.get("cu")
    sequences = 1 if cu is None else len(cu) - 1
    a = inputs.draw(
        "random", "gdn2", Shape(1, T, 1, HV, 128, 128), gate="weak", dtype=BF16, state="normal", sequences=sequences
    )
    if not call.get("w", True):
        del a["w"]
    if not call.get("initial", True):
        del a["initial_state"]
    if call.get("strided"):
        a["v"] = a["v"].transpose(1, 2).contiguous().transpose(1, 2)
    end = T if cu is None else cu[-1]
    parts = ("q", "k", "v", "g", "b", "w")
    truth, states, initial = torch.zeros_like(a["v"], dtype=torch.float64), [], a.get("initial_state")
    for n, (begin, stop) in enumerate(pairwise(cu or [0, T])):
        tokens = {name: a[name][:, begin:stop].double() for name in parts if name in a}
        entering = None if initial is None else initial[n : n + 1].double()
        out, state = reference.gdn2(**tokens, initial_state=entering, output_final_state=True)
        truth[:, begin:stop] = out
        states.append(state)
    for name in parts:
        if name in a:
            a[name][:, end:] = torch.nan
    grid = chunk_grid(1, T, C, None if cu is None else torch.tensor(cu))
    how = options(scale=128**-0.5, rule="keys", chunk_size=C)
    arguments = call_arguments((a["q"], a["k"], None, a["b"]), a["g"], None, None, None, HV, how)
    o, final = torch.full(a["v"].shape, 7.0).to(BF16), torch.empty(sequences, HV, 128, 128)
    key = launch_key(BF16, 128, 128, C)._replace(gate="channel")
    with (
        machine.installed(channel.launch, Config(4, 1, {})),
        machine.installed(erase_gate, Config(4, 1, {})),
        machine.installed(scan, Config(4, 2, {"BV": 128, "PARTS": 2, "OUT": 0})),
    ):
        prepared = prepare.prepare(*arguments, grid, how, key, o, backward=False, clear=True)
        scan.scan(a["v"], a.get("w"), prepared, initial, grid, how, key, o, final)
    assert {"wyfold_prepare_channel_gluon", "wyfold_scan_gluon"} == {*machine.launches}
    assert not o[:, end:].any()
    found = {"o": (o[:, :end], truth[:, :end]), "state": (final, torch.cat(states))}
    require(*(judge(got, want, name=name, target=target(name, BF16)) for name, (got, want) in found.items()))
