"""The scans have the same bits with TMA and with pointer loads, and no TMA box brings in rows of a neighbour.

The interpreter emulates TMA descriptors, so both ways run there; on a GPU the promise is the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.upper_tiles import from_quarters
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is not installed")

from wyfold.kernels.prepare.triton import gate_kind, launch_key, prepare  # noqa: E402
from wyfold.kernels.records import Slots  # noqa: E402
from wyfold.kernels.scan import triton as forward  # noqa: E402
from wyfold.kernels.scan_bwd import triton as backward  # noqa: E402
from wyfold.kernels.state_pool import triton as copies  # noqa: E402
from wyfold.reference import inputs  # noqa: E402
from wyfold.reference.shapes import Shape  # noqa: E402
from wyfold.runtime.chunk_layout import ChunkGrid, chunk_grid  # noqa: E402
from wyfold.runtime.options import DeltaOptions  # noqa: E402
from wyfold.tile.index.triton import descriptors as index  # noqa: E402

FORMS = [("delta_rule", False), ("gated_delta_rule", False), ("gated_delta_rule", True), ("kda", True)]
CUTS = {
    "one row a sequence": None,
    "whole chunks": (0, 16, 48),
    "within a chunk": (0, 5, 9, 9, 30, 46),
    "one chunk and some": (0, 33, 45, 47),
}
OPTIONS = DeltaOptions(
    operator="test",
    recurrent=False,
    scale=0.3,
    qk_l2norm=True,
    activation="given",
    lower_bound=0.0,
    clamp=0.0,
    beta_logit=False,
    beta_most=1.0,
    state_v_first=False,
    state_dtype=torch.float32,
    final_state=True,
    chunk_size=16,
    checkpoint_every=16,
    save=False,
    keep_factors=False,
    backend="triton",
)


@dataclass
class Drawn:
    """Tokens of a call, incoming gradients, and the chunk grid."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor
    do: Tensor
    initial_state: Tensor
    dST: Tensor
    cu: Tensor | None

    @property
    def grid(self) -> ChunkGrid:
        return chunk_grid(*self.q.shape[:2], OPTIONS.chunk_size, self.cu, OPTIONS.checkpoint_every)


@pytest.fixture
def draw(device: torch.device) -> Callable[..., Drawn]:
    """A call's tensors on the device; `cut` is a packed batch's boundaries."""

    def drawn(rule: str, shape: Shape, cut: tuple[int, ...] | None, dtype: torch.dtype = torch.float32) -> Drawn:
        N = None if cut is None else len(cut) - 1
        a = inputs.draw("random", rule, shape, state="normal", sequences=N)
        moved = {name: x.to(device, dtype) for name, x in a.items() if name in ("q", "k", "v", "beta")}
        g = a["g"].to(device) if "g" in a else None
        state = a["initial_state"].to(device)
        do = torch.randn(moved["v"].shape).to(device, dtype)
        cu = None if cut is None else torch.tensor(cut, device=device)
        return Drawn(**moved, g=g, do=do, initial_state=state, dST=torch.randn_like(state), cu=cu)

    return drawn


def scans(a: Drawn, folded: bool, *, use_tma: bool, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """Everything that the forward and the backward scan write, without padding tiles of a packed batch."""
    made = []

    def taken(found: Any) -> Any:
        made.append(found is not None)
        return found

    for stage in (forward, backward):
        original = index.token_descriptor
        monkeypatch.setattr(stage, "has_tma", lambda device: use_tma)
        monkeypatch.setattr(stage, "token_descriptor", lambda *x, original=original: taken(original(*x)))
    grid, (K, V) = a.grid, (a.q.shape[3], a.v.shape[3])
    key = launch_key(a.q.dtype, K, V, OPTIONS.chunk_size, gate_kind(a.g), folded)
    o, final, dS0 = a.v.new_full(a.v.shape, 7), a.initial_state.clone(), a.initial_state.clone()
    first = grid.first_states(a.q.device)
    states = a.initial_state.new_zeros(grid.chunks, *a.initial_state.shape[1:])
    prepared = prepare(a.q, a.k, a.g, a.beta, None, None, grid, OPTIONS, o, folded=folded, backward=True)
    forward.scan(a.q, a.k, a.v, prepared, a.initial_state, grid, OPTIONS, key, o, final, states, first)
    borders = backward.token_borders(a.q, a.v, grid)
    given = a.q, a.k, a.v, prepared, a.initial_state, a.do, a.dST, grid, OPTIONS, key, dS0, borders
    backward.scan_bwd(*given)
    assert all(made) and bool(made) == use_tma, "the tensors of these tests can have descriptors"
    tiles = (grid.chunks if a.cu is None else int(grid.first[-1])) * a.v.shape[2]
    return {"o": o, "final": final, "states": states, "dS0": dS0} | {
        name: x[:tiles] for name, x in borders._asdict().items() if name != "norms"
    }


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize(("rule", "folded"), FORMS)
def test_descriptors_and_pointers_give_the_same_bits(rule, folded, cut, draw, monkeypatch):
    shape = Shape(2, 37, 1, 2, 16, 16) if cut is None else Shape(1, 60, 1, 1, 16, 32)
    a = draw(rule, shape, cut, torch.bfloat16 if cut is None else torch.float32)
    descriptors = scans(a, folded, use_tma=True, monkeypatch=monkeypatch)
    pointers = scans(a, folded, use_tma=False, monkeypatch=monkeypatch)
    for name in descriptors:
        assert descriptors[name].isfinite().all(), name
        assert torch.equal(descriptors[name], pointers[name]), name


@pytest.mark.parametrize("rule", ["delta_rule", "gated_delta_rule"])
def test_both_directions_read_beta(rule, draw):
    """Each direction with the factors it reads, and both with the union. With beta = 0 the forward writes nothing."""
    a = draw(rule, Shape(1, 48, 1, 2, 16, 16), None)
    a.beta[:, ::5] = 0
    given = a.q, a.k, a.g, a.beta, None, None, a.grid, OPTIONS, a.v.clone()
    forth, back, both = (
        prepare(*given, folded=False, forward=forward, backward=backward)
        for forward, backward in ((True, False), (False, True), (True, True))
    )
    assert (forth.F, forth.rows_bwd, back.FB, back.rows_bwd) == (None,) * 4
    for name, alone, wanted in (("FB", forth.FB, both.FB), ("rows", forth.rows, both.rows), ("W", forth.W, both.W)):
        assert torch.equal(alone, wanted), name
    for name, alone, wanted in (("F", back.F, both.F), ("rows", back.rows, both.rows_bwd), ("W", back.W, both.W)):
        assert torch.equal(alone, wanted), name
    beta = back.rows[:, 3]
    FB, F = from_quarters(forth.FB), from_quarters(back.F)
    assert torch.equal(FB, F * beta[:, :, None]) and torch.equal(forth.rows[:, 2], beta * back.rows[:, 2])
    none = beta == 0
    assert none.any() and not FB[none].any() and F[none].any() and not forth.rows[:, 2][none].any()


POOLS = {"K first": (torch.float32, False), "V first": (torch.float32, True), "narrow": (torch.bfloat16, True)}


SLOTS = [
    pytest.param(
        *form,
        POOLS[name],
        cut,
        (i // 2 + j // 2) % 2 == 0,
        id=f"{form[0]}-{form[1]}-{name}-{word}",
        marks=[pytest.mark.release_if_interpreted] if (i + j) % 3 == 0 else [],
    )
    for i, form in enumerate(FORMS)
    for j, name in enumerate(POOLS)
    for word, cut in ((("dense", None), ("packed", (0, 5, 9, 9, 30, 46)))[(i + j) % 2],)
]
"""Each form with each pool, dense and packed in turn; each of them with loads by TMA and by pointers."""


@pytest.mark.parametrize("rule, folded, pool_of, cut, use_tma", SLOTS)
def test_states_in_slots_equal_states_copied_out_and_back(rule, folded, pool_of, cut, use_tma, draw, monkeypatch):
    """The bits of copying slots out, scanning contiguous states, and copying back, for intermediate states too."""
    stored, v_first = pool_of
    a = draw(rule, Shape(5, 37, 1, 2, 16, 16) if cut is None else Shape(1, 60, 1, 1, 16, 16), cut, torch.bfloat16)
    monkeypatch.setattr(forward, "has_tma", lambda device: use_tma)
    grid, (K, V), device, HV = a.grid, (a.q.shape[3], a.v.shape[3]), a.q.device, a.v.shape[2]
    key = launch_key(a.q.dtype, K, V, OPTIONS.chunk_size, gate_kind(a.g), folded)
    cleared = a.v.new_full(a.v.shape, 7)
    prepared = prepare(a.q, a.k, a.g, a.beta, None, None, grid, OPTIONS, cleared, folded=folded, backward=False)
    rows = grid.chunks if cut is not None else 5 * (37 // OPTIONS.checkpoint_every)

    def swap_state_layout(x: Tensor) -> Tensor:
        return x.mT if v_first else x

    pool = torch.randn(9, HV, 16, 16).to(device, stored)
    pool[[1, 5, 8]] = torch.nan
    source, target = (torch.tensor(x, device=device) for x in ([[7], [0], [-1], [3], [6]], [2, 4, 1, -1, 6]))
    given = torch.tensor([True, False, True, True, True], device=device)
    for elsewhere, some, indexed in ((None, None, source), (target, given, source), (None, given, None)):
        found = []
        for inside in (True, False):
            mine, o = pool.clone(), cleared.clone()
            states = torch.zeros(rows, HV, K, V, device=device)
            slots = Slots(mine, mine, indexed, elsewhere, some)
            given_to = OPTIONS, key, o
            between = states, grid.first_states(device)
            if inside:
                states_of = swap_state_layout(mine), swap_state_layout(mine)
                forward.scan(
                    a.q, a.k, a.v, prepared, states_of[0], grid, *given_to, states_of[1], *between, slots=slots
                )  # fmt: skip
            else:
                here, there = (torch.empty(5, HV, 16, 16, device=device) for _ in range(2))
                copies.enter(mine, slots, here)
                forward.scan(
                    a.q,
                    a.k,
                    a.v,
                    prepared,
                    swap_state_layout(here),
                    grid,
                    *given_to,
                    swap_state_layout(there),
                    *between,
                )
                copies.leave(there, slots, mine, grid, o)
            found.append((mine, o, states))
        (mine, o, states), (expected, right, on_the_way) = found
        assert torch.equal(mine.nan_to_num(9), expected.nan_to_num(9)) and torch.equal(o, right)
        skipped = 2 if indexed is not None else 9
        reached = (torch.full((5,), 37) if cut is None else torch.tensor(cut).diff()) // OPTIONS.checkpoint_every
        live = torch.repeat_interleave(torch.arange(5) != skipped, reached).to(device)
        assert torch.equal(states[: len(live)][live], on_the_way[: len(live)][live])


@pytest.mark.parametrize(("rule", "folded"), FORMS)
def test_the_low_occupancy_configuration_changes_no_bit(rule, folded, draw, monkeypatch, device):
    """The scan's configuration depends on the number of programs; its bits do not."""
    if device.type != "cuda":
        pytest.skip("numpy's products sum in another order for every number of rows")
    a = draw(rule, Shape(1, 70, 1, 1, 128, 128), None, torch.bfloat16)
    grid, found = chunk_grid(1, 70, 64, None), []
    key = launch_key(a.q.dtype, 128, 128, 64, gate_kind(a.g), folded)
    options = OPTIONS._replace(chunk_size=64, checkpoint_every=0)
    o = torch.empty_like(a.v)
    prepared = prepare(a.q, a.k, a.g, a.beta, None, None, grid, options, o, folded=folded, backward=False)
    heights = []
    for hinted in (key, key._replace(low_occupancy=True)):
        monkeypatch.setattr(forward, "with_occupancy_hint", lambda *_, hinted=hinted: hinted)
        heights.append(forward.tuned("scan.triton", hinted, a.q.device).blocks["BV"])
        o, final = torch.empty_like(a.v), torch.empty_like(a.initial_state)
        forward.scan(a.q, a.k, a.v, prepared, a.initial_state, grid, options, key, o, final, None, None)
        found.append((o, final))
    assert heights[0] > heights[1]
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize(("rule", "folded"), FORMS)
def test_tma_boxes_exclude_neighbours(rule, folded, draw, monkeypatch):
    """The second of four sequences is NaN, and lies within the TMA boxes of the first one's last chunk."""
    a = draw(rule, Shape(1, 70, 1, 1, 16, 16), (0, 21, 30, 30, 66))
    clean = scans(a, folded, use_tma=True, monkeypatch=monkeypatch)
    for x in (a.q, a.k, a.v, a.do, a.beta, a.g):
        if x is not None:
            x[:, 21:30] = float("nan")
    spoiled = scans(a, folded, use_tma=True, monkeypatch=monkeypatch)
    others = [0, 2, 3]
    kept = torch.tensor([t for t in range(66) if not 21 <= t < 30], device=a.q.device)
    assert spoiled["o"][:, 21:30].isnan().all()
    assert torch.equal(clean["o"][:, kept], spoiled["o"][:, kept])
    for name in ("final", "dS0"):
        assert spoiled[name][1].isnan().any()
        assert torch.equal(clean[name][others], spoiled[name][others]), name
    tiles = [0, 1, *range(3, 6)]  # chunks of the others
    for name in ("S", "dS", "e", "X"):
        assert torch.equal(clean[name][tiles], spoiled[name][tiles]), name


@pytest.mark.parametrize(("rule", "folded"), FORMS)
def test_a_sequences_rows_past_its_end_stay_as_they_are(rule, folded, draw, monkeypatch, guarded):
    a = draw(rule, Shape(1, 40, 1, 1, 16, 16), (0, 21))
    a = replace(a, **{name: guarded(getattr(a, name)) for name in ("q", "k", "v", "do", "beta")})
    found = scans(a, folded, use_tma=True, monkeypatch=monkeypatch)
    assert (found["o"][:, 21:] == 0).all(), "zeros, by prepare"
    assert found["o"][:, :21].isfinite().all()


class TestDescriptors:
    """Descriptors are chosen from metadata; tensors that TMA cannot address get none."""

    B, T, H, W = 2, 24, 3, 16

    def tokens(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.arange(torch.Size(shape).numel(), dtype=dtype).view(shape)

    def matrix(self, x: Tensor) -> Tensor | None:
        """The 2-D view that a descriptor's boxes are cut from."""
        found = index.token_descriptor(x, 8, 16)
        return None if found is None else found.base.as_strided(found.shape, found.strides, found.base.storage_offset())

    @pytest.mark.parametrize("part", ["all", "a slice of heads", "heads apart", "one row, heads first"])
    def test_descriptors_address_the_rows_of_a_head(self, part: str):
        B, T, H, W = self.B, self.T, self.H, self.W
        x = {
            "all": lambda: self.tokens(B, T, H, W),
            "a slice of heads": lambda: self.tokens(B, T, H + 2, W)[:, :, 1:-1],
            "heads apart": lambda: self.tokens(B, T, H, 3, W)[:, :, :, 1],
            "one row, heads first": lambda: self.tokens(1, H, T, W).transpose(1, 2),
        }[part]()
        matrix = self.matrix(x)
        for b in range(x.shape[0]):
            for h in range(H):
                column = h * x.stride(2)
                assert torch.equal(matrix[b * T : (b + 1) * T, column : column + W], x[b, :, h])

    @pytest.mark.parametrize(
        "refused",
        ["columns apart", "expanded", "rows unaligned", "base unaligned", "batch apart", "half a width", "no tokens"],
    )
    def test_others_are_refused(self, refused: str):
        B, T, H, W = self.B, self.T, self.H, self.W
        x = {
            "columns apart": lambda: self.tokens(B, T, H, W, 2)[..., 0],
            "expanded": lambda: torch.ones(()).expand(B, T, H, W),
            "rows unaligned": lambda: self.tokens(B, T, H * W + 1)[..., :-1].unflatten(-1, (H, W)),
            "base unaligned": lambda: self.tokens(B, T, H * W + 4)[..., 1 : H * W + 1].unflatten(-1, (H, W)),
            "batch apart": lambda: self.tokens(B, 2 * T, H, W)[:, :T],
            "half a width": lambda: self.tokens(B, T, H, 24),
            "no tokens": lambda: self.tokens(B, 0, H, W),
        }[refused]()
        assert index.token_descriptor(x, 8, 16) is None

    def test_tiles(self):
        tiles = self.tokens(4, 32, 16)
        found = index.tile_descriptor(tiles, 16, 16)
        assert list(found.shape) == [128, 16] and list(found.block_shape) == [16, 16]
        assert index.tile_descriptor(tiles, 24, 16) is None, "a box would reach into the next tile"
        assert index.tile_descriptor(self.tokens(4, 32, 6), 16, 6) is None
        assert index.tile_descriptor(self.tokens(0, 32, 16), 16, 16) is None
        assert index.vector_descriptor(self.tokens(4, 24), 24) is None
        assert index.vector_descriptor(self.tokens(4, 32), 32) is not None
