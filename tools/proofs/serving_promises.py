"""Bitwise promises of serving (bits, graphs, sync and ttt), as lists of promises to try.

All comparisons are of integers. Each promise is one function that returns a description of the failure, or "".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tools.proofs.serving_paths import (
    SLOTS,
    TOKENS,
    Case,
    Path,
    changed,
    conv_paths,
    paths,
    same,
    ttt_path,
    ttt_tokens,
)
from torch import Tensor

import wyfold
from wyfold import SequenceLayout, TTTState, serving
from wyfold.models import Decoder, DecoderConfig
from wyfold.reference import error, inputs
from wyfold.reference.shapes import Shape

PACKINGS = 100
"""Replays of each captured call, each with other contents."""


@dataclass(frozen=True)
class Promise:
    """One promise.

    Attributes:
        line: Line of the table it counts for.
        name: What is promised.
        broken: Tries it; returns a description of the failure, or "".
    """

    line: str
    name: str
    broken: Callable[[], str]


def differing(**pairs: tuple[Tensor, Tensor]) -> str:
    """Names of the pairs that differ in a bit."""
    return ", ".join(name for name, (one, other) in pairs.items() if not same(one, other))


def at(call: dict[str, Any], tokens: slice, rows: slice | Tensor | list[int] = slice(None)) -> dict[str, Any]:
    """Some tokens of some sequences of a call."""
    return call | {name: call[name][rows][:, tokens] for name in TOKENS if isinstance(call.get(name), Tensor)}


def differentiable(case: Case, form: str, call: dict[str, Any], **more: Any) -> tuple[Tensor, ...]:
    """Outputs and final states of the training operator on the same tokens."""
    op = getattr(wyfold, f"{form}_{case.rule}")
    given = {name: x for name, x in call.items() if not (name == "g" and x is None)}
    result: tuple[Tensor, ...] = op(
        **given, **more, output_final_state=True, state_v_first=case.v_first, backend=case.backend
    )
    return result


# --- bits ------------------------------------------------------------------------------------------------------------


def bits(case: Case, small: bool = False) -> Iterator[Promise]:
    """Every bitwise equality that is promised for the served calls of a rule."""
    yield from _recurrent(case, 9 if small else 33)
    yield from _drafts(case)
    yield from _permuted(case, 2 if small else 10, 70 if small else 200)
    yield from _poisoned(paths(case, tokens=130 if small else 300), 2 if small else 5)
    yield from _chunks(case, 2 * 64 + 17 if small else 8 * 64 + 17)
    yield from _in_slots(case, small)


def _in_slots(case: Case, small: bool) -> Iterator[Promise]:
    """`prefill` over a pool equals copying states out, the chunk form, and copying them back.

    Tried with few sequences and with enough for another launch configuration, in place and into other slots, and with
    rows that are skipped, start from zeros or are empty.
    """

    def tried(N: int, stored: torch.dtype, seed: int, *, packed: bool) -> str:
        draw, T = torch.Generator().manual_seed(seed), 40 if small else 150
        order = torch.randperm(SLOTS, generator=draw)
        slots, to = order[:N].clone(), order[:N] if packed else order[-N:].clone()
        skipped, fresh = torch.rand(N, generator=draw) < 0.2, torch.rand(N, generator=draw) < 0.2
        pool = torch.full_like(case.states(SLOTS, dtype=stored), torch.nan)
        here = case.states(N, seed, stored)
        begun = ~(skipped | fresh)
        pool[slots[begun].to(case.device)] = here[begun.to(case.device)]
        kept = to[~skipped].to(case.device)
        slots[skipped] = torch.where(torch.rand(int(skipped.sum()), generator=draw) < 0.5, -1, SLOTS + 7)
        lengths = torch.randint(0, T, (N,), generator=draw) if packed else torch.full((N,), T)
        lengths[0] = 0 if packed else T
        cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        call = case.tokens(1, int(cu[-1]) + 9, seed) if packed else case.tokens(N, T, seed)
        where: dict[str, Any] = {"cu_seqlens": cu.to(case.device)} if packed else {}
        entering = torch.where(begun.to(case.device)[:, None, None, None], here.float(), 0)
        o, left = differentiable(case, "chunk", call, initial_state=entering, batch_invariant=True, **where)
        for n in skipped.nonzero().flatten().tolist():
            o[(0, slice(cu[n], cu[n + 1])) if packed else n] = 0
        expected = pool.clone()
        expected[kept] = left[~skipped.to(case.device)].to(stored)
        if not packed:
            where["output_state_indices"] = to.to(case.device)
        found = serving.prefill(
            **call, **where, pool=pool, state_indices=slots.to(case.device), has_initial_state=~fresh.to(case.device),
            state_v_first=case.v_first, backend=case.backend,
        )  # fmt: skip
        return differing(o=(found, o), pool=(pool, expected))

    for N, stored, packed in (
        (6, torch.float32, True), (6, torch.float32, False), (20, torch.bfloat16, True), (20, torch.float32, False),
    ):  # fmt: skip
        for seed in range(2 if small else 4):
            name = f"prefill of {N} {'packed' if packed else 'dense'} prompts in {str(stored)[6:]} slots, {seed}"
            yield Promise("bits", name, partial(tried, N, stored, seed, packed=packed))


def _recurrent(case: Case, T: int, B: int = 2) -> Iterator[Promise]:
    call, first = case.tokens(B, T), case.states(B)
    made: list[tuple[Tensor, ...]] = []

    def whole() -> tuple[Tensor, ...]:
        if not made:
            made.append(differentiable(case, "fused_recurrent", call, initial_state=first))
        return made[0]

    def pieces(*cuts: int) -> str:
        state, outputs = first, []
        for begin, end in itertools.pairwise((0, *cuts, T)):
            o, state = differentiable(case, "fused_recurrent", at(call, slice(begin, end)), initial_state=state)
            outputs.append(o)
        o, final = whole()
        return differing(o=(torch.cat(outputs, 1), o), state=(state, final))

    for cut in range(1, T):
        yield Promise("bits", f"recurrent form cut after token {cut} of {T}", lambda cut=cut: pieces(cut))
    yield Promise("bits", f"recurrent form cut after every one of {T} tokens", lambda: pieces(*range(1, T)))

    def decoded() -> str:
        pool, slots = torch.full_like(case.states(SLOTS), torch.nan), torch.tensor([17, 4], device=case.device)
        pool[slots] = first
        outputs = [
            serving.decode(
                **at(call, slice(t, t + 1)), pool=pool, state_indices=slots, state_v_first=case.v_first,
                backend=case.backend,
            )
            for t in range(T)
        ]  # fmt: skip
        o, final = whole()
        return differing(o=(torch.cat(outputs, 1), o), state=(pool[slots], final))

    yield Promise("bits", f"{T} decoded tokens are the recurrent form", decoded)

    def narrow() -> str:
        stored = case.states(B, dtype=torch.bfloat16)
        pool = stored.clone()
        token = at(call, slice(0, 1))
        o = serving.decode(**token, pool=pool, state_v_first=case.v_first, backend=case.backend)
        expected = differentiable(
            case, "fused_recurrent", token, initial_state=stored, state_dtype=torch.bfloat16
        )  # fmt: skip
        return differing(o=(o, expected[0]), state=(pool, expected[1]))

    yield Promise("bits", "a token decoded from bfloat16 states is the recurrent form's", narrow)
    yield Promise("bits", "backward of the recurrent form, cut after every token", lambda: _backward(case, min(T, 9)))


def _backward(case: Case, T: int) -> str:
    """Gradients of tokens and of the initial state, of one call and of T calls that pass states and gradients on."""
    call, first = case.tokens(1, T), case.states(1)
    fed = inputs.incoming(call["v"], 1), inputs.incoming(first, 2)

    def both(tokens: slice, state: Tensor, do: Tensor, dS: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        leaves = {name: x.detach().clone().requires_grad_() for name, x in at(call, tokens).items() if name in TOKENS and x is not None}  # fmt: skip # noqa: E501
        entering = state.detach().clone().requires_grad_()
        o, final = differentiable(case, "fused_recurrent", at(call, tokens) | leaves, initial_state=entering)
        gradients = torch.autograd.grad([o, final], [*leaves.values(), entering], [do, dS])
        return final.detach(), dict(zip((*leaves, "state"), gradients))

    _, whole = both(slice(0, T), first, *fed)
    states = [first]
    for t in range(T):
        states.append(differentiable(case, "fused_recurrent", at(call, slice(t, t + 1)), initial_state=states[-1])[1])
    dS, found = fed[1], {name: [] for name in whole if name != "state"}
    for t in reversed(range(T)):
        _, part = both(slice(t, t + 1), states[t], fed[0][:, t : t + 1], dS)
        dS = part.pop("state")
        for name, x in part.items():
            found[name].insert(0, x)
    return differing(state=(dS, whole["state"]), **{name: (torch.cat(x, 1), whole[name]) for name, x in found.items()})


def _drafts(case: Case, n: int = 4, N: int = 3) -> Iterator[Promise]:
    """k accepted of n drafted tokens equal k steps, independent of the tokens after them."""
    draft, behind, first = case.tokens(N, n, 1), case.tokens(N, 2, 2), case.states(N)
    columns = torch.tensor([[5, 0, 11, 2], [9, 20, 1, 30], [3, 4, 8, 7]], device=case.device)
    how: dict[str, Any] = {"state_v_first": case.v_first, "backend": case.backend}

    def steps(call: dict[str, Any], state: Tensor, count: int) -> tuple[list[Tensor], list[Tensor]]:
        pool, outputs, states = state.clone(), [], []
        for t in range(count):
            outputs.append(serving.decode(**at(call, slice(t, t + 1)), pool=pool, **how))
            states.append(pool.clone())
        return outputs, states

    def accepted(*counts: int) -> str:
        pool = torch.full_like(case.states(SLOTS), torch.nan)
        pool[columns[:, 0]] = first
        o = serving.verify(**draft, pool=pool, state_indices=columns, **how)
        outputs, states = steps(draft, first, n)
        wrong = differing(o=(o, torch.cat(outputs, 1)), kept=(pool[columns.flatten()], torch.stack(states, 1).flatten(0, 1)))  # fmt: skip # noqa: E501
        if wrong:
            return f"drafts: {wrong}"
        number = torch.tensor(counts, device=case.device)
        o = serving.verify(**behind, pool=pool, state_indices=columns, num_accepted_tokens=number, **how)
        entering = torch.stack([states[min(max(k, 1), n) - 1][row] for row, k in enumerate(counts)])
        outputs, after = steps(behind, entering, 2)
        return differing(o=(o, torch.cat(outputs, 1)), kept=(pool[columns[:, :2].flatten()], torch.stack(after, 1).flatten(0, 1)))  # fmt: skip # noqa: E501

    for k in range(1, n + 1):
        yield Promise("bits", f"{k} of {n} accepted drafts are {k} steps", lambda k=k: accepted(k, k, k))
    yield Promise(
        "bits", "other numbers accepted in each sequence, 0 and too many among them", lambda: accepted(0, 9, 3)
    )


def _permuted(case: Case, seeds: int, T: int, N: int = 7) -> Iterator[Promise]:
    """Neither a row's position nor its slot number changes a bit."""
    how: dict[str, Any] = {"state_v_first": case.v_first, "backend": case.backend}
    first = case.states(N)

    def twice(name: str, seed: int) -> str:
        draw = torch.Generator().manual_seed(seed)
        columns = {"verify": 3}.get(name, 1)
        length = {"decode": 1, "verify": 3}.get(name, T)
        call, op = case.tokens(N, length, seed), getattr(serving, name)
        results = []
        for rows in (torch.arange(N), torch.randperm(N, generator=draw)):
            slots = torch.randperm(SLOTS, generator=draw)[: N * columns].view(N, columns).to(case.device)
            order = rows.to(case.device)
            pool = torch.full_like(case.states(SLOTS), torch.nan)
            pool[slots[:, 0]] = first[order]
            where = slots if columns > 1 else slots[:, 0]
            o = op(**at(call, slice(None), order), pool=pool, state_indices=where, **how)
            back = order.argsort()
            results.append((o[back], pool[slots[back].flatten()]))
        return differing(o=(results[0][0], results[1][0]), states=(results[0][1], results[1][1]))

    for name, seed in itertools.product(("decode", "verify", "prefill"), range(seeds)):
        yield Promise(
            "bits", f"{name}, rows and slots permuted, {seed}", lambda name=name, seed=seed: twice(name, seed)
        )


def _poisoned(some: Iterator[Path], seeds: int, line: str = "bits") -> Iterator[Promise]:
    """Unused slots keep their bits, which are NaN, and no NaN reaches a result or a state."""

    def tried(path: Path, seed: int) -> str:
        path.refill(seed)
        before = [pool.clone() for pool, _ in path.pools]
        path.written[0].fill_(torch.nan)
        path.run()
        if not path.written[0].isfinite().all():
            return "an output is not finite"
        for (pool, named), was in zip(path.pools, before):
            spoilt = [n for n in sorted(named()) if pool[n].isnan().any() and not same(pool[n], was[n])]
            if spoilt and pool.dim() == 4:  # columns of a convolution's slot behind few drafts are unused
                return f"slots {spoilt} were given NaN"
        return changed(path, before)

    for path in some:
        for seed in range(seeds):
            yield Promise(line, f"{path.name}: poisoned slots, {seed}", lambda path=path, seed=seed: tried(path, seed))


def _chunks(case: Case, T: int, B: int = 2) -> Iterator[Promise]:
    """The chunk form, cut at every multiple of 64, equals `prefill`, which is the chunk form in place."""
    call, first = case.tokens(B, T), case.states(B)
    made: list[tuple[Tensor, ...]] = []

    def whole() -> tuple[Tensor, ...]:
        if not made:
            made.append(differentiable(case, "chunk", call, initial_state=first, batch_invariant=True))
        return made[0]

    def pieces(*cuts: int) -> str:
        state, outputs = first, []
        for begin, end in itertools.pairwise((0, *cuts, T)):
            tokens = at(call, slice(begin, end))
            o, state = differentiable(case, "chunk", tokens, initial_state=state, batch_invariant=True)
            outputs.append(o)
        o, final = whole()
        return differing(o=(torch.cat(outputs, 1), o), state=(state, final))

    def prefilled(*cuts: int) -> str:
        pool, slots = torch.full_like(case.states(SLOTS), torch.nan), torch.tensor([6, 31], device=case.device)
        pool[slots] = first
        outputs = [
            serving.prefill(
                **at(call, slice(begin, end)), pool=pool, state_indices=slots, state_v_first=case.v_first,
                backend=case.backend,
            )
            for begin, end in itertools.pairwise((0, *cuts, T))
        ]  # fmt: skip
        o, final = whole()
        return differing(o=(torch.cat(outputs, 1), o), state=(pool[slots], final))

    every = range(64, T, 64)
    for cut in every:
        yield Promise("bits", f"chunk form cut after {cut} of {T} tokens", lambda cut=cut: pieces(cut))
        yield Promise("bits", f"prefill cut after {cut} of {T} tokens", lambda cut=cut: prefilled(cut))
    yield Promise("bits", f"chunk form cut at every multiple of 64 in {T}", lambda: pieces(*every))
    yield Promise("bits", f"prefill cut at every multiple of 64 in {T}", lambda: prefilled(*every))
    yield Promise("bits", "prefill is the chunk form in place", prefilled)

    def between() -> str:
        count = T // 64
        pool, kept = first.clone(), torch.full_like(case.states(B * count), torch.nan)
        where = torch.randperm(B * count, generator=torch.Generator().manual_seed(0)).view(B, count).to(case.device)
        serving.prefill(
            **call, pool=pool, checkpoint_every=64, checkpoint_pool=kept, checkpoint_indices=where,
            state_v_first=case.v_first, backend=case.backend,
        )  # fmt: skip
        wrong = []
        for n in range(count):
            tokens = at(call, slice(0, 64 * (n + 1)))
            _, state = differentiable(case, "chunk", tokens, initial_state=first, batch_invariant=True)
            wrong += [] if same(kept[where[:, n]], state) else [str(64 * (n + 1))]
        return f"after {', '.join(wrong)} tokens" if wrong else ""

    yield Promise("bits", "states kept between are those of the tokens before them", between)


GATES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "ready-made": ({"gate": "weak", "beta": "sigmoid"}, {}),
    "ready-made, no beta": ({"gate": "weak", "beta": "sigmoid"}, {"beta": None}),
    "of a model, beta doubled, scaled": ({}, {"allow_neg_eigval": True, "scale": -0.3}),
    "of a model, not normalised": ({}, {"use_qk_l2norm_in_kernel": False}),
}
OF_CHANNELS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "raised": ({"gate": "any", "beta": "sigmoid"}, {"safe_gate": True, "lower_bound": -0.5}),
    "bounded": ({"gate": "model bounded"}, {}),
}


def gates(case: Case) -> Iterator[Promise]:
    """Deliver 7: for every gate, a decoded and a drafted token have the bits of the training operator."""

    def tried(drawn: dict[str, str], given: dict[str, Any]) -> str:
        call, first = case.tokens(3, 3, **drawn) | given, case.states(3)
        o, final = differentiable(case, "fused_recurrent", call, initial_state=first)
        how: dict[str, Any] = {"state_v_first": case.v_first, "backend": case.backend}
        pool, columns = case.states(9), torch.arange(9, device=case.device).view(3, 3)
        pool[columns[:, 0]] = first
        drafted = serving.verify(**call, pool=pool, state_indices=columns, **how)
        one = first.clone()
        steps = [serving.decode(**at(call, slice(t, t + 1)), pool=one, **how) for t in range(3)]
        return differing(
            drafted=(drafted, o),
            kept=(pool[columns[:, -1]], final),
            decoded=(torch.cat(steps, 1), o),
            left=(one, final),
        )

    for name, (drawn, given) in (GATES | (OF_CHANNELS if case.rule == "kda" else {})).items():
        yield Promise("bits", f"gate {name}", lambda drawn=drawn, given=given: tried(drawn, given))


def conv_bits(device: torch.device, backend: str | None, D: int = 256, W: int = 4, T: int = 70) -> Iterator[Promise]:
    """The convolution from a pool equals the plain convolution for every cut of its sequences."""
    draw = torch.Generator().manual_seed(0)
    x, state, weight = (torch.randn(size, generator=draw).to(device, torch.bfloat16) for size in ((3, T, D), (3, D, W - 1), (D, W)))  # fmt: skip # noqa: E501
    slots = torch.tensor([8, 2, 33], device=device)
    how: dict[str, Any] = {"activation": "silu", "backend": backend}

    def fresh(columns: int = 1) -> Tensor:
        pool = torch.full((SLOTS, D, W - 2 + columns), torch.nan, dtype=torch.bfloat16, device=device)
        pool[slots, :, : W - 1] = state
        return pool

    def whole() -> tuple[Tensor, Tensor]:
        y, left = wyfold.causal_conv1d(x, weight, initial_state=state, output_final_state=True, **how)
        assert left is not None
        return y, left

    def updated() -> str:
        pool = fresh()
        y = torch.stack([serving.conv1d_update(t, pool, weight, state_indices=slots, **how) for t in x.unbind(1)], 1)
        expected, left = whole()
        return differing(y=(y, expected), pool=(pool[slots], left))

    def prefilled(*cuts: int) -> str:
        pool, outputs = fresh(), []
        for begin, end in itertools.pairwise((0, *cuts, T)):
            outputs.append(serving.conv1d_prefill(x[:, begin:end], pool, weight, state_indices=slots, **how))
        expected, left = whole()
        return differing(y=(torch.cat(outputs, 1), expected), pool=(pool[slots], left))

    def drafted(k: int) -> str:
        pool = fresh(4)
        serving.conv1d_update(x[:, :4], pool, weight, state_indices=slots, **how)
        again, number = torch.cat([x[:, :k], x[:, 10:12]], 1), torch.full((3,), k, device=device)
        y = serving.conv1d_update(
            x[:, 10:12], pool, weight, state_indices=slots, num_accepted_tokens=number, **how
        )  # fmt: skip
        expected, _ = wyfold.causal_conv1d(again, weight, initial_state=state, **how)
        return differing(y=(y, expected[:, k:]))

    yield Promise("bits", f"convolution: {T} single tokens are one call", updated)
    for cut in range(1, 10):
        yield Promise("bits", f"convolution cut after {cut} tokens", lambda cut=cut: prefilled(cut))
    yield Promise("bits", "convolution cut at every multiple of 3", lambda: prefilled(*range(3, T, 3)))
    for k in range(1, 5):
        yield Promise("bits", f"convolution: {k} of 4 accepted drafts are {k} steps", lambda k=k: drafted(k))
    yield from _poisoned(conv_paths(device, backend), 5)


# --- graphs and sync -------------------------------------------------------------------------------------------------


def graphs(some: Iterator[Path]) -> Iterator[Promise]:
    """Captured once and replayed with other contents, compared with plain calls on the same contents."""
    for path in some:
        yield Promise("graphs", f"{path.name}: {PACKINGS} packings", lambda path=path: _replayed(path))


def _replayed(path: Path) -> str:
    path.refill(0)
    path.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        path.run()
    wrong = []
    for seed in range(PACKINGS):
        path.refill(seed)
        before = [x.clone() for x in path.written]
        graph.replay()
        replayed = [x.clone() for x in path.written]
        for x, was in zip(path.written, before):
            x.copy_(was)
        path.run()
        if not all(same(x, other) for x, other in zip(path.written, replayed)):
            wrong.append(seed)
    return f"packings {wrong} differ" if wrong else ""


@contextmanager
def sync_raises() -> Iterator[None]:
    """Context manager in which PyTorch raises if the host would wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def sync(known: Iterator[Path], other: Iterator[Path]) -> Iterator[Promise]:
    """Calls whose kernels are loaded do not synchronise.

    Args:
        known: Called once before; the next calls are recorded and replayed.
        other: The same with other sizes, called for the first time in sync debug mode.
    """

    def tried(path: Path, more: Path) -> str:
        path.refill(1)
        more.refill(1)
        path.run()
        with sync_raises():
            for _ in range(4):
                path.run()
            for _ in range(4):
                more.run()
        return ""

    for path, more in zip(known, other, strict=True):
        yield Promise("sync", f"{path.name}, called four times", lambda path=path, more=more: tried(path, more))


# --- a whole decoder -------------------------------------------------------------------------------------------------


def decoder(device: torch.device, backend: str | None, small: bool = False) -> Iterator[Promise]:
    """A decoder of all three rules, served from its pools."""
    heads, width = (2, 16) if small else (8, 64)
    torch.manual_seed(0)
    config = DecoderConfig(hidden_size=heads * width, num_layers=3, pattern="gdn kda delta_net", num_heads=heads, head_dim=width)  # fmt: skip # noqa: E501
    model = Decoder(config, backend=backend).to(device, torch.bfloat16).eval()
    N, T = 5, 100
    ids, step = torch.randint(256, (1, N * T), device=device), torch.randint(256, (N, 1), device=device)
    layout = SequenceLayout(torch.arange(0, N * T + 1, T, device=device), N * T)
    pools, slots = model.new_pools(9), torch.tensor([4, 0, 8, 2, 5], device=device)
    fresh = torch.zeros(N, dtype=torch.bool, device=device)

    @torch.inference_mode()
    def prompts() -> Tensor:
        return model(ids, layout=layout, cache=pools.at(slots, fresh))[0]

    @torch.inference_mode()
    def token() -> Tensor:
        return model(step, cache=pools.at(slots))[0]

    def moved() -> str:
        prompts()
        one = token()
        untouched = [n for n in range(9) if n not in slots.tolist()]
        wrong = [
            n for n, layer in enumerate(pools.layers) if layer.state[untouched].any() or layer.conv[untouched].any()
        ]
        slots.copy_(torch.tensor([1, 3, 6, 7, 0], device=device))
        prompts()
        again = token()
        return differing(logits=(one, again)) or (f"layers {wrong} wrote unused slots" if wrong else "")

    yield Promise("bits", "decoder: the same prompts in other slots", moved)
    if device.type != "cuda":
        return

    def watched() -> str:
        prompts(), token()
        with sync_raises():
            for _ in range(4):
                prompts(), token()
        return ""

    yield Promise("sync", "decoder: packed prompts and a token, called four times", watched)

    def streamed(temperature: float) -> str:
        stream = model.stream(ids.view(N, T), 24, temperature=temperature, seed=0)
        for _ in range(4):  # from the third token on it is a graph, whose capture synchronises
            next(stream)
        with sync_raises():
            for _ in stream:
                pass
        return ""

    yield Promise("sync", "decoder: the stream, likeliest tokens", lambda: streamed(0.0))
    yield Promise("sync", "decoder: the stream, drawn tokens", lambda: streamed(0.8))

    def step_path() -> Iterator[Path]:
        held: list[Tensor] = [x for layer in pools.layers for x in (layer.conv, layer.state)]
        out = torch.empty(N, 1, 256, dtype=torch.bfloat16, device=device)

        def refill(seed: int) -> None:
            draw = torch.Generator().manual_seed(seed)
            step.copy_(torch.randint(256, (N, 1), generator=draw))
            slots.copy_(torch.randperm(9, generator=draw)[:N])
            for x in held:
                x.copy_(0.1 * torch.randn(x.shape, generator=draw))

        named = {int(n) for n in range(9)}
        yield Path("decoder's step", lambda: out.copy_(token()), refill, (out, *held), tuple((x, lambda: named) for x in held))  # fmt: skip # noqa: E501

    yield from graphs(step_path())


# --- TTT-Linear ------------------------------------------------------------------------------------------------------


def ttt(device: torch.device, backend: str | None, small: bool = False) -> Iterator[Promise]:
    """`ttt_decode` is as accurate as the chunk form across mini-batches, and touches only its slots."""
    for D, dtype, residual in itertools.product((16,) if small else (64, 128), (torch.float32, torch.bfloat16), "oq"):
        name = f"D {D}, {str(dtype).removeprefix('torch.')}, residual {residual}"
        yield Promise("ttt", f"as near as the chunk form, {name}",
            lambda D=D, dtype=dtype, residual=residual: _ttt_near(device, backend, D, dtype, residual))  # fmt: skip
    yield Promise("ttt", "rows and slots permuted", lambda: _ttt_permuted(device, backend, 16 if small else 64))
    yield from _poisoned(iter([ttt_path(device, backend, D=16 if small else 64)]), 5, "ttt")


def _ttt_near(device: torch.device, backend: str | None, D: int, dtype: torch.dtype, residual: str) -> str:
    """A prompt of whole mini-batches in the chunk form, then token by token; the truth is all of it in float64."""
    N, T, prompt = 3, 69, 32
    call = ttt_tokens(Shape(N, T, 2, 4, D, D), dtype, device)
    how: dict[str, Any] = {"residual": residual, "chunk_size": 16}
    wide = {name: x.double() for name, x in call.items()}
    truth = wyfold.chunk_ttt_linear(**wide, **how, backend="eager")[0]
    yardstick = wyfold.chunk_ttt_linear(**call, **how, backend=backend)[0]
    tokens = lambda some: call | {name: call[name][:, some] for name in ("q", "k", "v", "eta", "eta_col")}
    before, state, bias = wyfold.chunk_ttt_linear(
        **tokens(slice(0, prompt)), **how, output_final_state=True, backend=backend
    )
    slots = torch.tensor([7, 30, 2], device=device)
    square, line = (torch.full((SLOTS, 4, n, D), torch.nan, device=device) for n in (D, 1))
    position = torch.zeros(SLOTS, dtype=torch.int32, device=device)
    pool = TTTState(square, line, square.clone(), line.clone(), position)
    pool.state[slots], pool.bias[slots] = state.float(), bias.float()
    pool.grad[slots], pool.bias_grad[slots] = 0, 0
    after = [
        serving.ttt_decode(**tokens(slice(t, t + 1)), pool=pool, state_indices=slots, **how, backend=backend)
        for t in range(prompt, T)
    ]
    verdict = error.judge(torch.cat([before, *after], 1), truth, yardstick, name="o")
    stand = [(T - prompt) % 16] * 3
    wrong = (
        [] if pool.position[slots].tolist() == stand else [f"positions {pool.position[slots].tolist()}, not {stand}"]
    )
    return "; ".join([str(verdict)] * (not verdict.passed) + wrong)


def _ttt_permuted(device: torch.device, backend: str | None, D: int) -> str:
    path = ttt_path(device, backend, D=D)
    call = ttt_tokens(Shape(6, 1, 2, 4, D, D), torch.bfloat16, device, 3)
    path.refill(0)
    pool = TTTState(*path.written[1:])
    for n, x in enumerate(pool[:4]):
        x.copy_(0.1 * torch.randn(x.shape, generator=torch.Generator().manual_seed(n)))
    entering, results = TTTState(*(x[:6].clone() for x in pool)), []
    for seed in (0, 1):
        draw = torch.Generator().manual_seed(seed)
        slots, order = (torch.randperm(n, generator=draw)[:6].to(device) for n in (SLOTS, 6))
        for x, first in zip(pool, entering):
            x[slots] = first[order]
        rows = {name: x[order] if name in ("q", "k", "v", "eta", "eta_col") else x for name, x in call.items()}
        o = serving.ttt_decode(**rows, pool=pool, state_indices=slots, chunk_size=16, backend=backend)
        back = order.argsort()
        results.append((o[back], *(x[slots[back]] for x in pool)))
    names = "o", *TTTState._fields
    return differing(**{name: (one, other) for name, one, other in zip(names, *results)})
