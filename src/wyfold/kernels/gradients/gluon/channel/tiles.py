"""Views, splits and concatenations of tiles; most move no data."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.index.gluon import reinterpret


@gluon.jit
def own_sub_chunk_columns(pairs, o_r):
    """Select each row's 8 columns in its own sub-chunk, also those after the row.   [64, 64] -> [64, 8]"""
    pairs = pairs.reshape([pairs.shape[0], 8, 8])
    own = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, pairs.type.layout)))
    mine = gl.convert_layout(o_r, gl.SliceLayout(1, gl.SliceLayout(2, pairs.type.layout)), assert_trivial=True) // 8
    return gl.sum(gl.where((mine[:, None] == own[None, :])[:, :, None], pairs, 0.0), axis=1)


@gluon.jit
def row_block(tile, n, size: gl.constexpr):
    """The n-th block of `size` rows of a shared memory tile, with n a runtime value.

    Rows must not be longer than one TMA swizzle block.
    """
    return reinterpret(tile, tile.dtype, [tile.shape[0] // size, size, tile.shape[1]], tile.layout).index(n)


@gluon.jit
def empty_tuple():
    """An empty tuple, as a value of the kernel language."""
    return ()


@gluon.jit
def concat_tuples(rows, x):
    """Concatenate two tuples."""
    return rows + x


@gluon.jit
def split8_rows(x):
    """Split 4 sub-chunks of 8 rows into 8 tiles, one per position in the sub-chunk.   [32, 64] -> 8 x [4, 64]"""
    x = x.reshape([4, 2, 2, 2, x.shape[1]]).permute((0, 4, 1, 2, 3))
    even, odd = gl.split(x)
    e0, e2 = gl.split(even)
    o1, o3 = gl.split(odd)
    x0, x4 = gl.split(e0)
    x2, x6 = gl.split(e2)
    x1, x5 = gl.split(o1)
    x3, x7 = gl.split(o3)
    return (
        _to_sub_chunk_layout(x0),
        _to_sub_chunk_layout(x1),
        _to_sub_chunk_layout(x2),
        _to_sub_chunk_layout(x3),
        _to_sub_chunk_layout(x4),
        _to_sub_chunk_layout(x5),
        _to_sub_chunk_layout(x6),
        _to_sub_chunk_layout(x7),
    )


@gluon.jit
def sum8_rows(x):
    """Sum over the rows of each sub-chunk, which a thread holds; moves no data.   [32, 64] -> [4, 64]"""
    return _to_sub_chunk_layout(gl.sum(x.reshape([4, 8, x.shape[1]]), axis=1))


@gluon.jit
def _to_sub_chunk_layout(x):
    """Name the layout of a tile with one token per sub-chunk; moves no data.   [4, 64]"""
    return gl.convert_layout(x, gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0]), assert_trivial=True)


@gluon.jit
def join8_rows(x, NEAR: gl.constexpr):
    """Inverse of `split8_rows`.   8 x [4, 64] -> [32, 64]"""
    even = gl.join(gl.join(x[0], x[4]), gl.join(x[2], x[6]))
    odd = gl.join(gl.join(x[1], x[5]), gl.join(x[3], x[7]))
    x = gl.join(even, odd).permute((0, 2, 3, 4, 1))
    return gl.convert_layout(x.reshape([32, x.shape[4]]), NEAR, assert_trivial=True)


@gluon.jit
def split8_numbers(x):
    """`split8_rows` for one number per token.   [32] -> 8 x [4, 1]"""
    even, odd = gl.split(x.reshape([4, 2, 2, 2]))
    e0, e2 = gl.split(even)
    o1, o3 = gl.split(odd)
    x0, x4 = gl.split(e0)
    x2, x6 = gl.split(e2)
    x1, x5 = gl.split(o1)
    x3, x7 = gl.split(o3)
    return (
        _to_column(x0), _to_column(x1), _to_column(x2), _to_column(x3),
        _to_column(x4), _to_column(x5), _to_column(x6), _to_column(x7),
    )  # fmt: skip


@gluon.jit
def _to_column(x):
    """Column vector in the layout of `_to_sub_chunk_layout`; moves no data.   [4] -> [4, 1]"""
    R: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    return gl.convert_layout(x, gl.SliceLayout(1, R), assert_trivial=True)[:, None]


@gluon.jit
def split4_columns(x, L: gl.constexpr):
    """Split a tile into blocks of 16 columns.   [M, 64] -> 4 x [M, 16]"""
    x = x.reshape([x.shape[0], 2, 2, 16]).permute((0, 3, 1, 2))
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return (
        gl.convert_layout(x0, L, assert_trivial=True),
        gl.convert_layout(x1, L, assert_trivial=True),
        gl.convert_layout(x2, L, assert_trivial=True),
        gl.convert_layout(x3, L, assert_trivial=True),
    )


@gluon.jit
def split2_columns(x, CH: gl.constexpr):
    """Split a tile into its two columns.   [M, 2] -> 2 x [M]"""
    x0, x1 = gl.split(x)
    return gl.convert_layout(x0, CH, assert_trivial=True), gl.convert_layout(x1, CH, assert_trivial=True)


@gluon.jit
def stack4_columns(x0, x1, x2, x3):
    """Stack four vectors as columns.   4 x [M] -> [M, 4]"""
    return gl.join(gl.join(x0, x2), gl.join(x1, x3)).reshape([x0.shape[0], 4])


@gluon.jit
def concat2_columns(x0, x1):
    """Concatenate two tiles along columns.   2 x [M, 16] -> [M, 32]"""
    return gl.join(x0, x1).permute((0, 2, 1)).reshape([x0.shape[0], 32])


@gluon.jit
def allocate4(dtype: gl.constexpr, M: gl.constexpr, S: gl.constexpr):
    """Allocate four separate shared memory tiles [M, 16]: a store to one needs no barrier for the others."""
    return (
        gl.allocate_shared_memory(dtype, [M, 16], S),
        gl.allocate_shared_memory(dtype, [M, 16], S),
        gl.allocate_shared_memory(dtype, [M, 16], S),
        gl.allocate_shared_memory(dtype, [M, 16], S),
    )


@gluon.jit
def per_sub_chunk(x0, x1, L: gl.constexpr):
    """Broadcast one vector over the columns of each of two sub-chunks.   2 x [M] -> [M, 16]"""
    first = gl.arange(0, 16, layout=gl.SliceLayout(0, L))[None, :] < 8
    return gl.where(first, x0[:, None], x1[:, None])


@gluon.jit
def load_quarter(tile, i: gl.constexpr, L: gl.constexpr):
    """Load quarter i of a [token, channel] tile, transposed, as float32.   [M, 16]"""
    return tile.slice(16 * i, 16).permute((1, 0)).load(L).to(gl.float32)


@gluon.jit
def register_operand(x, dtype: gl.constexpr, L: gl.constexpr):
    """Left operand in registers; moves no data."""
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, L, 2), assert_trivial=True)
