"""Every serving call once, on tensors at fixed addresses, for the proofs of the other files.

A path can be called again and again, with other contents in between: other tokens, states, slots, flags and packings
within the same capacities. Everything that it must not read is NaN: unused slots, slots of sequences that start, and
tokens of rows that are skipped or lie past the last boundary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wyfold import SequenceLayout, TTTState, serving
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

RULES = ("delta_rule", "gated_delta_rule", "kda")
TOKENS = ("q", "k", "v", "g", "beta", "eta")
SLOTS = 40
POISON = torch.tensor(0x7FC0DEAD, dtype=torch.int32).view(torch.float32)
"""A NaN whose bits no arithmetic produces, so that another NaN in its place is detected."""


@dataclass(frozen=True)
class Case:
    """Rule, layout, width and device of the calls.

    Attributes:
        rule: One of `RULES`.
        v_first: Whether states are [V, K].
        width: K and V.
        device: Device of every tensor.
        backend: Requested backend; None: the table's choice.
        heads: H and HV.
    """

    rule: str
    v_first: bool
    width: int
    device: torch.device
    backend: str | None = None
    heads: tuple[int, int] = (2, 4)

    @property
    def title(self) -> str:
        return f"{self.rule}/{'VK' if self.v_first else 'KV'}/{self.width}"

    def tokens(self, B: int, T: int, seed: int = 0, **options: str) -> dict[str, Any]:
        """Arguments that every serving call takes: bfloat16 tokens, with norm, gate and sigmoid inside by default."""
        gate = None if self.rule == "delta_rule" else "model"
        given: dict[str, Any] = {"gate": gate, "beta": "logits"} | options
        drawn = inputs.draw(
            "random", self.rule, Shape(B, T, *self.heads, self.width, self.width), dtype=torch.bfloat16, seed=seed,
            **given,
        )  # fmt: skip
        drawn = {"g": None, "use_qk_l2norm_in_kernel": True} | drawn
        return {name: x.to(self.device) if isinstance(x, Tensor) else x for name, x in drawn.items()}

    def states(self, count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        size = count, self.heads[1], self.width, self.width
        return torch.randn(size, generator=generator).to(self.device, dtype)


@dataclass(frozen=True)
class Path:
    """One call on fixed tensors.

    Attributes:
        name: Name of the call.
        run: Makes the call and returns its output, which `out=` passes in: the same memory every time.
        refill: Fills all tensors with other contents, from a seed.
        written: Tensors that the call writes, its output first.
        pools: The pools among `written`, each with the slots that the last refill uses.
    """

    name: str
    run: Callable[[], Tensor]
    refill: Callable[[int], None]
    written: tuple[Tensor, ...]
    pools: tuple[tuple[Tensor, Callable[[], set[int]]], ...]


def bits(x: Tensor) -> Tensor:
    """x as integers: NaNs of the same bits are equal, and -0 is not 0."""
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(bits(one), bits(other))


def paths(case: Case, rows: int = 6, tokens: int = 300) -> Iterator[Path]:
    """The serving calls of one rule.

    Args:
        case: Rule, layout, width, device.
        rows: Number of sequences, including skipped ones.
        tokens: Capacity of a packed row.
    """
    yield _decode(case, rows)
    yield _decode(case, rows, elsewhere=True)
    if case.rule != "delta_rule":
        yield _decode_packed(case, rows)
    yield _verify(case, rows)
    yield _verify_packed(case, rows)
    yield _prefill(case, rows, tokens)
    yield _prefill(case, rows, tokens, between=True)
    yield _prefill_dense(case, rows, tokens // 4)


class _Rows:
    """Random slots and flags of N sequences: distinct slots, some sequences without one, some that start."""

    def __init__(self, device: torch.device, N: int, columns: int = 1):
        self.slots = torch.zeros(N, columns, dtype=torch.int32, device=device)
        self.to = torch.zeros_like(self.slots)
        self.given = torch.ones(N, dtype=torch.bool, device=device)
        self.accepted = torch.ones(N, dtype=torch.int32, device=device)
        self.live: list[bool] = [True] * N
        self.named: set[int] = set()

    def refill(self, seed: int, pool: Tensor, *, elsewhere: bool = False) -> torch.Generator:
        """Draw new slots and flags; fill the readable part of the pool with numbers and the rest with NaN."""
        draw = torch.Generator().manual_seed(seed)
        N, columns = self.slots.shape
        order = torch.randperm(SLOTS, generator=draw).int()
        slots = order[: N * columns].view(N, columns).clone()
        to = order[-N * columns :].view(N, columns).clone() if elsewhere else slots
        skipped = torch.rand(N, generator=draw) < 0.2
        slots[skipped] = torch.where(torch.rand(int(skipped.sum()), columns, generator=draw) < 0.5, -1, SLOTS + 7).int()
        if elsewhere:
            to[torch.rand(N, columns, generator=draw) < 0.2] = -1
        given = torch.rand(N, generator=draw) < 0.8
        accepted = torch.randint(0, columns + 2, (N,), generator=draw).int()
        first = (accepted.clamp(min=1, max=columns) - 1).long()
        entered = slots.gather(1, first[:, None])[:, 0]
        contents = POISON.expand(pool.shape).clone()
        for slot, starts in zip(entered.tolist(), given.logical_not().tolist()):
            if 0 <= slot < SLOTS and not starts:
                contents[slot] = torch.randn(pool.shape[1:], generator=draw) / pool.shape[-1] ** 0.5
        pool.copy_(contents)
        for held, drawn in ((self.slots, slots), (self.to, to), (self.given, given), (self.accepted, accepted)):
            held.copy_(drawn)
        self.live = (~skipped).tolist()
        self.named = {slot for slot in (to if elsewhere else slots)[~skipped].flatten().tolist() if 0 <= slot < SLOTS}
        return draw


def _boundaries(draw: torch.Generator, N: int, tokens: int, longest: int | None = None) -> Tensor:
    """[N+1] boundaries of sequences of random lengths, including empty ones, that leave a part of the row unused."""
    if longest is not None:
        lengths = torch.randint(0, longest + 1, (N,), generator=draw)
    else:
        cuts = torch.randint(0, tokens + 1, (N,), generator=draw).sort().values
        lengths = cuts.diff(prepend=torch.zeros(1, dtype=torch.int64))
        lengths[torch.rand(N, generator=draw) < 0.15] = 0
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def _fill(call: dict[str, Any], drawn: dict[str, Any]) -> None:
    for name in TOKENS:
        if isinstance(call.get(name), Tensor):
            call[name].copy_(drawn[name])


def _poison(call: dict[str, Any], place: Any) -> None:
    """Set every token at `place` to NaN."""
    for name in TOKENS:
        if isinstance(call.get(name), Tensor):
            call[name][place] = torch.nan


def _skipped(rows: _Rows) -> list[int]:
    return [n for n, live in enumerate(rows.live) if not live]


def _decode(case: Case, N: int, *, elsewhere: bool = False) -> Path:
    call, pool, rows = case.tokens(N, 1), case.states(SLOTS), _Rows(case.device, N)
    out = torch.empty_like(call["v"])
    to = rows.to[:, 0] if elsewhere else None

    def run() -> Tensor:
        return serving.decode(
            **call, pool=pool, state_indices=rows.slots[:, 0], output_state_indices=to, has_initial_state=rows.given,
            state_v_first=case.v_first, out=out, backend=case.backend,
        )  # fmt: skip

    def refill(seed: int) -> None:
        rows.refill(seed, pool, elsewhere=elsewhere)
        _fill(call, case.tokens(N, 1, seed))
        _poison(call, _skipped(rows))

    name = "decode, written elsewhere" if elsewhere else "decode"
    return Path(name, run, refill, (out, pool), ((pool, lambda: rows.named),))


def _decode_packed(case: Case, N: int) -> Path:
    (H, HV), K = case.heads, case.width
    call, pool, rows = case.tokens(N, 1), case.states(SLOTS), _Rows(case.device, N)
    mixed = torch.empty(N, (2 * H + HV) * K, dtype=torch.bfloat16, device=case.device)
    out = torch.empty(N, HV, K, dtype=torch.bfloat16, device=case.device)
    raw_g, raw_beta = call["g"][:, 0], call["beta"][:, 0]

    def run() -> Tensor:
        return serving.decode_packed(
            mixed, raw_g, raw_beta, call["A_log"], call["dt_bias"], pool, rows.slots[:, 0], heads=case.heads,
            dims=(K, K), state_v_first=case.v_first, has_initial_state=rows.given, out=out, backend=case.backend,
        )  # fmt: skip

    def refill(seed: int) -> None:
        rows.refill(seed, pool)
        _fill(call, case.tokens(N, 1, seed))
        _poison(call, _skipped(rows))
        mixed.copy_(torch.cat([call[name].flatten(1) for name in ("q", "k", "v")], 1))

    return Path("decode_packed", run, refill, (out, pool), ((pool, lambda: rows.named),))


def _verify(case: Case, N: int, C: int = 4, T: int = 3) -> Path:
    call, pool, rows = case.tokens(N, T), case.states(SLOTS), _Rows(case.device, N, C)
    out = torch.empty_like(call["v"])

    def run() -> Tensor:
        return serving.verify(
            **call, pool=pool, state_indices=rows.slots, num_accepted_tokens=rows.accepted,
            has_initial_state=rows.given, state_v_first=case.v_first, out=out, backend=case.backend,
        )  # fmt: skip

    def refill(seed: int) -> None:
        rows.refill(seed, pool)
        _fill(call, case.tokens(N, T, seed))
        _poison(call, _skipped(rows))

    return Path("verify", run, refill, (out, pool), ((pool, lambda: rows.named),))


def _verify_packed(case: Case, N: int, C: int = 4) -> Path:
    T = N * C
    call, pool, rows = case.tokens(1, T), case.states(SLOTS), _Rows(case.device, N, C)
    out, cu = torch.empty_like(call["v"]), torch.zeros(N + 1, dtype=torch.int64, device=case.device)

    def run() -> Tensor:
        return serving.verify(
            **call, pool=pool, state_indices=rows.slots, cu_seqlens=cu, num_accepted_tokens=rows.accepted,
            has_initial_state=rows.given, state_v_first=case.v_first, out=out, backend=case.backend,
        )  # fmt: skip

    def refill(seed: int) -> None:
        borders = _boundaries(rows.refill(seed, pool), N, T, C)
        cu.copy_(borders)
        _fill(call, case.tokens(1, T, seed))
        _poison_packed(call, rows, borders)

    return Path("verify, packed", run, refill, (out, pool), ((pool, lambda: rows.named),))


def _poison_packed(call: dict[str, Any], rows: _Rows, borders: Tensor) -> None:
    ends = borders.tolist()
    for n in _skipped(rows):
        _poison(call, (slice(None), slice(ends[n], ends[n + 1])))
    _poison(call, (slice(None), slice(ends[-1], None)))


def _prefill(case: Case, N: int, T: int, every: int = 64, *, between: bool = False) -> Path:
    """Packed by a layout; with `between`, intermediate states go to a separate pool."""
    call, pool, rows = case.tokens(1, T), case.states(SLOTS), _Rows(case.device, N)
    out = torch.empty_like(call["v"])
    layout = SequenceLayout(torch.zeros(N + 1, dtype=torch.int64, device=case.device), T)
    kept, where = case.states(SLOTS), torch.zeros(T // every, dtype=torch.int32, device=case.device)
    stored: set[int] = set()
    more: dict[str, Any] = {}
    if between:
        more = {"checkpoint_every": every, "checkpoint_pool": kept, "checkpoint_indices": where}

    def run() -> Tensor:
        return serving.prefill(
            **call, pool=pool, state_indices=rows.slots[:, 0], has_initial_state=rows.given, cu_seqlens=layout,
            state_v_first=case.v_first, out=out, backend=case.backend, **more,
        )  # fmt: skip

    def refill(seed: int) -> None:
        draw = rows.refill(seed, pool)
        borders = _boundaries(draw, N, T)
        layout.update_(borders.to(case.device))
        _fill(call, case.tokens(1, T, seed))
        _poison_packed(call, rows, borders)
        kept.copy_(POISON.expand(kept.shape))
        slots = torch.randperm(SLOTS, generator=draw)[: T // every].int()
        where.copy_(slots)
        reached = (borders.diff() // every).tolist()
        of_live = [live for live, count in zip(rows.live, reached) for _ in range(count)]
        stored.clear()
        stored.update(slot for slot, live in zip(slots.tolist(), of_live) if live and between)

    pools = ((pool, lambda: rows.named), (kept, lambda: stored))
    name = "prefill, packed, states between" if between else "prefill, packed"
    return Path(name, run, refill, (out, pool, kept), pools)


def _prefill_dense(case: Case, N: int, T: int) -> Path:
    call, pool, rows = case.tokens(N, T), case.states(SLOTS), _Rows(case.device, N)
    out = torch.empty_like(call["v"])

    def run() -> Tensor:
        return serving.prefill(
            **call, pool=pool, state_indices=rows.slots[:, 0], output_state_indices=rows.to[:, 0],
            has_initial_state=rows.given, state_v_first=case.v_first, out=out, backend=case.backend,
        )  # fmt: skip

    def refill(seed: int) -> None:
        rows.refill(seed, pool, elsewhere=True)
        _fill(call, case.tokens(N, T, seed))
        _poison(call, _skipped(rows))

    return Path("prefill", run, refill, (out, pool), ((pool, lambda: rows.named),))


# --- the short convolution -------------------------------------------------------------------------------------------


def conv_paths(
    device: torch.device, backend: str | None, rows: int = 6, tokens: int = 300, D: int = 256, W: int = 4
) -> Iterator[Path]:
    """The convolution's calls: a token, drafts after a number of accepted ones, packed drafts, packed prompts."""
    for name, T, columns in (("conv1d_update", 0, 1), ("conv1d_update, drafts", 3, 4)):
        yield _conv(name, device, backend, rows, T, columns, D, W, packed=False)
    yield _conv("conv1d_update, packed", device, backend, rows, 4 * rows, 4, D, W, packed=True)
    yield _conv("conv1d_prefill, packed", device, backend, rows, tokens, 1, D, W, packed=True)


def _conv(
    name: str,
    device: torch.device,
    backend: str | None,
    N: int,
    T: int,
    columns: int,
    D: int,
    W: int,
    *,
    packed: bool,
) -> Path:
    """x is [N, D] if T is 0, else [N, T, D] or packed [1, T, D]; a slot has the columns for `columns` drafts."""
    rows, weight = _Rows(device, N), torch.randn(D, W).to(device, torch.bfloat16)
    x = torch.empty((1, T, D) if packed else (N, T, D) if T else (N, D), dtype=torch.bfloat16, device=device)
    out, pool = torch.empty_like(x), torch.zeros(SLOTS, D, W - 2 + columns, dtype=torch.bfloat16, device=device)
    cu = torch.zeros(N + 1, dtype=torch.int64, device=device) if packed else None
    accepted = {"num_accepted_tokens": rows.accepted} if columns > 1 else {}
    op = serving.conv1d_prefill if "prefill" in name else serving.conv1d_update

    def run() -> Tensor:
        return op(
            x, pool, weight, state_indices=rows.slots[:, 0], cu_seqlens=cu, has_initial_state=rows.given, out=out,
            activation="silu", backend=backend, **accepted,
        )  # fmt: skip

    def refill(seed: int) -> None:
        draw = rows.refill(seed, pool)
        rows.accepted.copy_(torch.randint(0, columns + 1, (N,), generator=draw))
        x.copy_(torch.randn(x.shape, generator=draw))
        if cu is None:
            x[_skipped(rows)] = torch.nan
            return
        borders = _boundaries(draw, N, T, columns if columns > 1 else None)
        cu.copy_(borders)
        _poison_packed({"q": x}, rows, borders)

    return Path(name, run, refill, (out, pool), ((pool, lambda: rows.named),))


# --- TTT-Linear ------------------------------------------------------------------------------------------------------


def ttt_tokens(shape: Shape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> dict[str, Any]:
    """Arguments of `ttt_decode` without its pool."""
    drawn = inputs.draw("random", "ttt_linear", shape, eta_col="uniform", dtype=dtype, seed=seed)
    return {name: x.to(device) for name, x in drawn.items()}


def ttt_path(device: torch.device, backend: str | None, N: int = 6, D: int = 64) -> Path:
    """`ttt_decode` of sequences at different positions of their mini-batches."""
    shape, rows = Shape(N, 1, 2, 4, D, D), _Rows(device, N)
    call = ttt_tokens(shape, torch.bfloat16, device)
    square, line = (torch.zeros(SLOTS, 4, n, D, device=device) for n in (D, 1))
    position = torch.zeros(SLOTS, dtype=torch.int32, device=device)
    pool = TTTState(square, line, square.clone(), line.clone(), position)
    out = torch.empty_like(call["v"])

    def run() -> Tensor:
        return serving.ttt_decode(
            **call, pool=pool, state_indices=rows.slots[:, 0], chunk_size=16, out=out, backend=backend
        )  # fmt: skip

    def refill(seed: int) -> None:
        draw = rows.refill(seed, pool.state)
        drawn = ttt_tokens(shape, torch.bfloat16, device, seed)
        for name in ("q", "k", "v", "eta", "eta_col"):
            call[name].copy_(drawn[name])
            call[name][_skipped(rows)] = torch.nan
        live = sorted(rows.named)
        for x in pool[:4]:
            contents = POISON.expand(x.shape).clone()
            contents[live] = 0.1 * torch.randn(len(live), *x.shape[1:], generator=draw)
            x.copy_(contents)
        pool.position.copy_(torch.randint(0, 16, (SLOTS,), generator=draw))

    return Path("ttt_decode", run, refill, (out, *pool), tuple((x, lambda: rows.named) for x in pool))


def changed(path: Path, before: Sequence[Tensor]) -> str:
    """Unused slots whose contents differ from `before`, the earlier pools; empty if none does."""
    wrong = []
    for (pool, named), was in zip(path.pools, before, strict=True):
        others = sorted(set(range(pool.shape[0])) - named())
        if not same(pool[others], was[others]):
            wrong += [n for n in others if not same(pool[n], was[n])]
    return f"slots {wrong} were changed" if wrong else ""
