"""Eager TTT-Linear on tiles: `load` on partial mini-batches, the state after every mini-batch, and the adjoint."""

import pytest
import torch
from torch import Tensor

from wyfold import reference
from wyfold.kernels import table as stages
from wyfold.kernels.ttt_records import MiniBatches, MiniBatchGradients, State
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime.chunk_layout import ChunkTable, dense_table, packed_table
from wyfold.tile.index.eager import to_chunks

C, H, HV, D = 16, 1, 2, 8
EPS, SCALE = 1e-6, 0.3
LENGTHS = [5, 0, 33, 16, 1]
TABLES = {
    "dense": (dense_table(2, 37, C), 2, 37),
    "whole": (dense_table(2, 32, C), 2, 32),
    "packed": (packed_table(torch.tensor(LENGTHS), C), 1, sum(LENGTHS)),
}


@pytest.fixture(params=TABLES)
def grid(request: pytest.FixtureRequest) -> tuple[ChunkTable, dict[str, Tensor]]:
    """A chunk table, and arguments with its tokens."""
    table, B, T = TABLES[request.param]
    return table, inputs.draw(
        rule="ttt_linear",
        shape=Shape(B=B, T=T, H=H, HV=HV, K=D, V=D),
        dtype=torch.float64,
        state="normal",
        sequences=table.sequences,
        eta_col=None if request.param == "dense" else "signed",
    )


def residual(arguments: dict[str, Tensor]) -> str:
    """The residual: the query where tokens have factors, as in published layers, else the output."""
    return "q" if "eta_col" in arguments else "o"


def load(arguments: dict[str, Tensor], table: ChunkTable, backend: str, taken: Tensor | None = None) -> MiniBatches:
    tokens = (arguments.get(name) for name in ("q", "k", "v", "w", "b", "eta", "eta_col"))
    return stages.kernel_module("ttt", backend).load(*tokens, table, SCALE, taken, residual(arguments))


def entering(arguments: dict[str, Tensor]) -> State:
    return State(arguments["initial_state"], arguments["initial_state_bias"])


def empty_states(table: ChunkTable) -> State:
    return State(
        torch.empty(table.chunks, HV, D, D, dtype=torch.float64),
        torch.empty(table.chunks, HV, 1, D, dtype=torch.float64),
    )


def sequences(table: ChunkTable) -> list[tuple[int, slice]]:
    """Batch row and token slice of every sequence."""
    if table.uniform:
        return [(n, slice(0, table.tokens)) for n in range(table.sequences)]
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    return [(0, slice(end - length, end)) for end, length in zip(ends, LENGTHS)]


def chunk_of(table: ChunkTable, sequence: int, number: int) -> int:
    """Position in the chunk table of a sequence's chunk of that number."""
    rank = sequence if table.order is None else table.order.tolist().index(sequence)
    return table.starts[number] + rank


def test_a_mini_batch_closes_with_its_last_real_row(grid, backend: str):
    table, arguments = grid
    x = load(arguments, table, backend)
    for n, (row, tokens) in enumerate(sequences(table)):
        for number, start in enumerate(range(tokens.start, tokens.stop, C)):
            stop = min(start + C, tokens.stop)
            tiles = slice(chunk_of(table, n, number) * HV, (chunk_of(table, n, number) + 1) * HV)
            assert torch.equal(x.e_last[tiles, 0, 0], arguments["eta"][row, stop - 1, :, 0])
            idle = torch.zeros(HV, C, 1, dtype=torch.bool) if x.idle is None else x.idle[tiles]
            assert torch.equal(idle[:, :, 0], (torch.arange(C) >= stop - start).expand(HV, C))
            for tile in (x.q, x.k, x.e):
                assert not tile[tiles, stop - start :].any()


def test_an_open_mini_batch_does_not_close(grid, backend: str):
    table, arguments = grid
    taken = torch.arange(table.sequences) * 0
    x, closing = load(arguments, table, backend, taken), load(arguments, table, backend)
    short = (table.valid < C).repeat_interleave(HV)
    assert not x.e_last[short].any()
    assert torch.equal(x.e_last[~short], closing.e_last[~short])


def test_idle_rows_stand_in_front_of_an_open_mini_batch(grid, backend: str):
    table, arguments = grid
    taken = torch.arange(table.sequences)
    x = load(arguments, table, backend, taken)
    row = torch.arange(C)
    for n, (_, tokens) in enumerate(sequences(table)):
        for number, start in enumerate(range(tokens.start, tokens.stop, C)):
            tiles = slice(chunk_of(table, n, number) * HV, (chunk_of(table, n, number) + 1) * HV)
            before = row < (n if number == 0 else 0)
            assert torch.equal(x.idle[tiles, :, 0], (before | (row >= tokens.stop - start)).expand(HV, C))


def test_the_state_entering_every_mini_batch(grid, backend: str, float64_bounds):
    """`at` and the leaving states equal the token loop's states after as many tokens."""
    table, arguments = grid
    at, o = empty_states(table), torch.zeros_like(arguments["v"])
    leaving, sums = stages.kernel_module("ttt", backend).ttt(
        load(arguments, table, backend), entering(arguments), None, table, EPS, o, at
    )
    assert sums is None
    for n, (row, tokens) in enumerate(sequences(table)):
        T = tokens.stop - tokens.start
        alone = {x: arguments[x][row : row + 1, tokens] for x in ("q", "k", "v", "eta", "eta_col") if x in arguments}
        states = {x: arguments[x][n : n + 1] for x in ("initial_state", "initial_state_bias")}
        for done in [*range(0, T, C), T]:
            prefix = arguments | states | {x: rows[:, :done] for x, rows in alone.items()}
            out, S, c = reference.ttt_linear(
                **prefix, residual=residual(arguments), scale=SCALE, eps=EPS, output_final_state=True
            )
            if done < T:
                chunk = chunk_of(table, n, done // C)
                float64_bounds.output("S", at.S[chunk], S[0])
                float64_bounds.output("c", at.c[chunk], c[0])
        float64_bounds.output("leaving S", leaving.S[n], S[0])
        float64_bounds.output("leaving c", leaving.c[n], c[0])
        float64_bounds.output("o", o[row, tokens], out[0])


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_states_kept_or_rebuilt_give_the_same_gradients(grid, is_open: bool, backend: str):
    table, arguments = grid
    launch = stages.kernel_module("ttt", backend)
    sums = State(*map(torch.randn_like, entering(arguments))) if is_open else None
    x = load(arguments, table, backend, torch.arange(table.sequences) * 0 if is_open else None)
    at, o = empty_states(table), torch.zeros_like(arguments["v"])
    leaving, last = launch.ttt(x, entering(arguments), sums, table, EPS, o, at)
    do = to_chunks(inputs.incoming(o), table, HV, torch.float64)
    dstate = State(*(inputs.incoming(s, 1) for s in leaving))
    dsums = State(*(inputs.incoming(s, 2) for s in last)) if is_open else None
    kept = launch.ttt_bwd(x, None, sums, do, dstate, dsums, table, EPS, at)
    built = launch.ttt_bwd(x, entering(arguments), sums, do, dstate, dsums, table, EPS, empty_states(table))
    for a, b in zip((*kept[0], *kept[1]), (*built[0], *built[1])):
        assert a is b is None or torch.equal(a, b)


def test_padded_rows_get_and_give_no_gradient(grid, backend: str):
    table, arguments = grid
    x = load(arguments, table, backend)
    do = to_chunks(inputs.incoming(arguments["v"]), table, HV, torch.float64)
    dstate = State(*(inputs.incoming(s, 1) for s in entering(arguments)))
    launch = stages.kernel_module("ttt", backend)
    found, _ = launch.ttt_bwd(x, entering(arguments), None, do, dstate, None, table, EPS, empty_states(table))
    if table.padding is None:
        assert x.idle is None
        return
    idle = x.idle[:, :, 0]
    for name, d in zip(found._fields[:6], found):
        assert d is None or not d[idle].any(), name
        assert d is None or d[~idle].any(), name


def test_unload_sums_groups_in_order_and_adds_to_parameters(grid, backend: str):
    table, arguments = grid
    tiles = [torch.randn(table.chunks * HV, C, width, dtype=torch.float64) for width in (D, D, D, 1, 1, D)]
    shares = (torch.randn(table.chunks * HV, D, dtype=torch.float64) for _ in range(2))
    if "eta_col" not in arguments:
        tiles[4:] = None, None
    found = MiniBatchGradients(*tiles, *shares)
    q, k, v, e = (x.clone() for x in found[:4])
    outputs = [
        torch.empty_like(arguments[name]) if name in arguments else None for name in ("q", "k", "v", "eta", "eta_col")
    ]
    dw, du = torch.ones(HV, D, dtype=torch.float64), torch.zeros(HV, D, dtype=torch.float64)
    stages.kernel_module("ttt", backend).unload(found, table, SCALE, *outputs, dw, du)

    def of_tokens(tiles: Tensor) -> Tensor:
        """Tokens in the order of the buffer, [tokens, HV, W]."""
        tiles = tiles.view(table.chunks, HV, C, -1).transpose(1, 2)
        pieces = []
        for n, (_, tokens) in enumerate(sequences(table)):
            chunks = [tiles[chunk_of(table, n, i)] for i in range(-(-(tokens.stop - tokens.start) // C))]
            pieces.append(torch.cat([tiles[:0].flatten(0, 1), *chunks])[: tokens.stop - tokens.start])
        return torch.cat(pieces)

    def of_groups(tile: Tensor) -> Tensor:
        heads = of_tokens(tile)
        return heads[:, :1] + heads[:, 1:]

    dq = of_groups(q) * SCALE
    assert torch.equal(outputs[0].flatten(0, 1), dq if found.raw is None else dq + of_groups(found.raw))
    assert torch.equal(outputs[1].flatten(0, 1), of_groups(k))
    for got, tile in zip(outputs[2:], (v, e, found.col)):
        assert got is tile is None or torch.equal(got.flatten(0, 1), of_tokens(tile))
    assert torch.equal(dw, 1 + found.w.view(-1, HV, D).sum(0))
    assert torch.equal(du, found.u.view(-1, HV, D).sum(0))
