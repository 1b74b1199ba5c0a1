"""Runs the Gluon summaries' own source, of both directions, on the CPU, with the machine of `scan_gluon_emulate`.

Held against the formulas, in float32 with the kernels' roundings; the way back against the same in float64 as well.

PYTHONPATH=src:tools/experiments python tools/experiments/summary_gluon_emulate.py
"""

import inspect
from itertools import accumulate, product
from unittest import mock

import scan_bwd_gluon_emulate as back
import scan_gluon_emulate as machine
import torch
from tests.upper_tiles import whole

import wyfold.stages.scan.gluon as scan
from wyfold.runtime.chunks import Cut, chunk_grid, segment_grid
from wyfold.runtime.launch import Config
from wyfold.stages.records import Prepared
from wyfold.stages.summary.gluon import backward, forward
from wyfold.tile.index import triton as index

C, K, V, H, HV = 64, 128, 128, 1, 2


def emulate(kernel, programs, *arguments, **fixed):
    """In place of `launched`: the scan's machine, given this kernel's source."""
    G = forward if kernel is forward.wyfold_summary_gluon else backward
    place = inspect.getsource(index.segment_place.fn)
    place = place[place.index("def ") :]
    made = machine.namespace

    def namespace(pid):
        with (
            mock.patch.object(scan, "__file__", G.__file__),
            mock.patch.multiple(scan, Tiles=G.Tiles, Source=G.Source, Memory=G.Memory, Place=G.Place),
        ):
            found = made(pid)
        exec("from __future__ import annotations\n" + place, found)
        found["tl"] = found["segment_place"].__globals__["tl"] = type("tl", (), {"load": staticmethod(machine.load)})
        found.update(clear_rows=cleared, one_over=lambda x: 1 / x, divisor=back.divisor)
        return found

    with mock.patch.object(machine, "namespace", namespace), mock.patch.object(machine, "Acc", back.Acc):
        machine.emulate(kernel, programs, *arguments, **fixed)


def cleared(*arguments):
    """From here on products may meet rows that another part clears."""
    machine.clear_rows(*arguments)
    machine.queue()
    machine.HERE.tail = True


def truth(k, v, p, S0, segments, H_, M_):
    """The same, segment by segment."""
    for i, (n, begin, end) in enumerate(zip(segments.sequence, segments.grid.cu, segments.grid.cu[1:], strict=False)):
        n, begin, end = int(n), int(begin), int(end)
        if n >= segments.sequences or int(segments.first[n + 1]) == i + 1:
            continue
        begins = int(segments.first[n]) == i
        for hv, of_H in product(range(HV), (True, False)):
            S = torch.zeros(V, K) if of_H else torch.eye(K) * (not begins)
            if of_H and begins and S0 is not None:
                S = S0[n, hv].T.clone()
            for c in range((end - begin) // C):
                t = slice(begin + c * C, begin + (c + 1) * C)
                tile = (int(segments.grid.first[i]) + c) * HV + hv
                keys = (p.k[tile] if p.k is not None else k[0, t, hv // (HV // H)]).float()
                in_k, _, written, beta = p.rows[tile]
                Sk = S.bfloat16().float() @ keys.T
                R = (v[0, t, hv].float().T if of_H else 0) - (Sk if p.k is not None else Sk * in_k)
                S = S * p.total[tile]
                if p.E is not None:
                    S = S + (R * beta).bfloat16().float() @ p.E[tile].float()
                else:
                    e = R.bfloat16().float() @ whole(p.W[tile]).float()
                    S = S + (e * written).bfloat16().float() @ keys
            (H_ if of_H else M_)[i - n, hv] = S.T


def drawn(channel, folded, lengths, lost):
    """A packed batch cut into segments, its tokens, and factors at random: the launches are maps of whatever they are.

    lost: tokens past the last sequence, which hold NaN.
    """
    torch.manual_seed(0)
    T = sum(lengths) + lost
    grid = chunk_grid(1, T, C, torch.tensor([0, *accumulate(lengths)]))
    segments = segment_grid(grid, Cut(1, 3), torch.device("cpu"))
    unit = torch.nn.functional.normalize
    tokens = [unit(torch.randn(1, T, H, K), dim=-1).bfloat16() for _ in range(2)]
    tokens += [torch.randn(1, T, HV, V).bfloat16() for _ in range(2)]
    for x in tokens:
        x[:, sum(lengths) :] = torch.nan
    n = grid.chunks * HV
    rows = torch.rand(n, 4, C)
    if channel:
        rows[:, :3] = 1
    rows[::3, 3, :5] = 0  # a strength of zero is divided by, too
    p = Prepared(
        rows=rows,
        total=torch.rand(n, K if channel else 1),
        q=unit(torch.randn(n, C, K), dim=-1).bfloat16() if channel else None,
        k=unit(torch.randn(n, C, K), dim=-1).bfloat16() if channel else None,
        E=(0.1 * torch.randn(n, C, K)).bfloat16() if folded else None,
        F=(0.3 * torch.randn(n, 3, C // 2, C // 2)).bfloat16(),
        W=(0.3 * torch.randn(n, 3, C // 2, C // 2)).bfloat16(),
    )
    return segments, tokens, p


def exactly(x):
    return x.double()


def rounded(x):
    return x.bfloat16().float()


def truth_back(q, k, do, p, dST, segments, scale, c_, op, number):
    """The same, segment by segment: op rounds a product's left operand, number is what numbers are counted in."""
    for i, (n, begin, end) in enumerate(zip(segments.sequence, segments.grid.cu, segments.grid.cu[1:], strict=False)):
        n, begin, end = int(n), int(begin), int(end)
        if n >= segments.sequences or int(segments.first[n]) == i:
            continue
        ends = int(segments.first[n + 1]) == i + 1
        for hv in range(HV):
            dS = number(dST[n, hv].T) if ends and dST is not None else number(torch.zeros(V, K))
            for c in reversed(range(-(-(end - begin) // C))):
                t = slice(begin + c * C, min(begin + (c + 1) * C, end))
                tile = (int(segments.grid.first[i]) + c) * HV + hv
                h = hv // (HV // H)
                keys, queries, doT = (torch.zeros(C, w) for w in (K, K, V))
                for x, given in ((keys, k[0, t, h]), (queries, q[0, t, h]), (doT, do[0, t, hv])):
                    x[: given.shape[0]] = given
                if p.k is not None:
                    keys, queries = p.k[tile], p.q[tile]
                keys, queries, doT = number(keys), number(queries), number(doT).T
                in_k, in_q, out, beta = number(p.rows[tile])
                X = doT @ number(whole(p.F[tile])).T * scale
                if p.E is not None:
                    X = X + op(dS) @ number(p.E[tile]).T
                else:
                    by = back.divisor(beta)
                    X = X + op(op(dS) @ keys.T * (out * by)) @ number(whole(p.W[tile])).T * (1 / by)
                dS = dS * number(p.total[tile]) + op(doT * (in_q * scale)) @ queries
                dS = dS + op(-(X * (beta * in_k))) @ keys
            c_[i - n - 1, hv] = dS.T


def told(words, worst, most):
    print(f"{words}: {', '.join(f'{x:.1e}' for x in worst)}", flush=True)
    assert all(x < y for x, y in zip(worst, most, strict=True))


def case_back(channel, folded, parts, rows, stages, lengths, mode, given=True):
    segments, (q, k, _, do), p = drawn(channel, folded, lengths, 5)
    dST = torch.randn(len(lengths), HV, K, V) if given else None
    scale = K**-0.5
    found = torch.full((segments.borders, HV, V, K), 7.0).mT
    expected, exact = found.clone(), found.double()
    machine.MODE = mode
    truth_back(q, k, do, p, dST, segments, scale, expected, rounded, torch.Tensor.float)
    truth_back(q, k, do, p, dST, segments, scale, exact, exactly, exactly)
    config, done = Config(4, stages, {"BV": rows, "PARTS": parts}), []

    def launch(*a, **b):
        done.append(1)
        emulate(*a, **b)

    with mock.patch.multiple(backward, tuned=lambda *a: config, launched=launch):
        backward.summary_bwd(q, k, p, do, dST, segments, machine.options(scale), "", found)
    assert done
    unasked = (expected == 7).all(-1)
    assert torch.equal((found == 7).all(-1), unasked)
    written = ~unasked[..., None].expand_as(found)
    distance = [float((x - found)[written].norm() / x[written].norm()) for x in (expected, exact)]
    told(
        f"back channel {channel:d} folded {folded:d} {rows} rows in {parts} {stages} stages {mode} dST {given:d}",
        distance,
        (1e-4, 1e-2),
    )


def case(channel, folded, parts, rows, stages, lengths, mode, fast=False):
    """fast: of decays after which M is gone in a few chunks; so many copies are saved."""
    torch.manual_seed(0)
    T = sum(lengths) + 5
    grid = chunk_grid(1, T, C, torch.tensor([0, *accumulate(lengths)]))
    segments = segment_grid(grid, Cut(1, 3), torch.device("cpu"))
    unit = torch.nn.functional.normalize
    k, v = unit(torch.randn(1, T, H, K), dim=-1).bfloat16(), torch.randn(1, T, HV, V).bfloat16()
    n = grid.chunks * HV
    square = (0.3 * torch.randn(n, 3, C // 2, C // 2)).bfloat16()
    decay = 1e-18 if fast else 1.0
    p = Prepared(
        rows=torch.rand(n, 4, C) * torch.tensor([1, 1, decay, 1])[:, None],
        total=torch.rand(n, K if channel else 1) * decay,
        q=unit(torch.randn(n, C, K), dim=-1).bfloat16() if channel else None,
        k=unit(torch.randn(n, C, K), dim=-1).bfloat16() if channel else None,
        E=(0.1 * decay * torch.randn(n, C, K)).bfloat16() if folded else None,
        F=square,
        W=None if folded else square,
    )
    S0 = torch.randn(len(lengths), HV, K, V)
    states, maps = (torch.full((segments.borders, HV, width, K), 7.0).mT for width in (V, K))
    expected = states.clone(), maps.clone()
    truth(k, v, p, S0, segments, *expected)
    config, done = Config(4, stages, {"BV": rows, "PARTS": parts}), []
    machine.MODE = mode

    def launch(*a, **b):
        done.append(1)
        emulate(*a, **b)

    copies = []
    load = mock.patch.object(machine, "tma_load", lambda *a, load=machine.tma_load: (copies.append(1), load(*a)))
    with load, mock.patch.multiple(forward, tuned=lambda *a: config, launched=launch):
        forward.summary(k, v, p, S0, segments, "", states, maps)
    assert done
    worst = max(float((x - y).abs().max()) for x, y in zip((states, maps), expected, strict=True))
    words = f"channel {channel:d} folded {folded:d} {rows} rows in {parts} {stages} stages {mode} fast {fast:d}"
    print(f"{words}: {worst:.1e}, {len(copies)} copies", flush=True)
    assert worst < 1e-4
    return len(copies)


for form, (parts, rows, stages), mode in product(
    ((False, False), (False, True), (True, True)), ((1, 64, 3), (2, 128, 2)), ("late", "now")
):
    case(*form, parts, rows, stages, (7 * C + 3, 1, 4 * C, 3 * C), mode)
    long = (42 * C, 9 * C)
    fewer = case(*form, parts, rows, stages, long, mode, fast=True) < case(*form, parts, rows, stages, long, mode)
    assert fewer == (not form[0])
    case_back(*form, parts, rows, stages, (7 * C + 3, 1, 4 * C, 3 * C), mode)
    case_back(*form, parts, rows, stages, (5 * C - 1, 0, 6 * C), mode, given=False)
