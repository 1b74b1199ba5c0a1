"""Shapes used in tests: lengths, boundaries, widths and head groups; and shapes that must be refused."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Sizes of one call.

    Attributes:
        B: Batch size.
        T: Tokens.
        H: Query and key heads.
        HV: Value heads.
        K: Width of queries and keys.
        V: Width of values.
    """

    B: int = 1
    T: int = 64
    H: int = 2
    HV: int = 2
    K: int = 16
    V: int = 16


DEFAULT = Shape()


@dataclass(frozen=True)
class Packing:
    """Boundaries of sequences packed into a buffer of `tokens` rows.

    Attributes:
        cu_seqlens: [N+1] boundaries.
        tokens: T, rows of the buffer.
    """

    cu_seqlens: tuple[int | float, ...]
    tokens: int

    def lengths(self) -> list[int]:
        """Lengths of the sequences, in order."""
        return [int(end - start) for start, end in zip(self.cu_seqlens, self.cu_seqlens[1:])]


# --- lengths ---------------------------------------------------------------------------------------------------------

EVERY_LENGTH = tuple(range(1, 131))
BORDER_LENGTHS = (191, 192, 193, 447, 448, 449)
FAR_BORDER_LENGTHS = (1023, 1024, 1025)
LONG_LENGTHS = (65_537, 524_289)  # the second has more than 32,768 chunks of 16 tokens


def past_the_grid(chunk_size: int) -> int:
    """The first length with more than 65,536 chunks, the limit of a launch grid's second and third axis."""
    return chunk_size * 65_536 + 1


# --- boundaries ------------------------------------------------------------------------------------------------------

PACKINGS = {
    "no sequence": Packing((0,), 0),
    "no sequence, spare rows": Packing((0,), 7),
    "one empty": Packing((0, 0), 0),
    "one empty, spare rows": Packing((0, 0), 5),
    "empty first": Packing((0, 0, 5), 5),
    "empty in the middle": Packing((0, 5, 5, 5, 9), 9),
    "empty last, spare rows": Packing((0, 5, 9, 9), 12),
    "one token each": Packing(tuple(range(12)), 11),
    "one sequence": Packing((0, 70), 70),
    "chunk multiples": Packing((0, 64, 128, 192), 192),
    "around the chunk": Packing((0, 63, 127, 192, 193), 193),
    "ragged, spare rows": Packing((0, 17, 17, 82, 83, 147), 160),
}
MANY_SEQUENCES = Packing(tuple(range(70_001)), 70_000)


def every_offset(chunk_size: int) -> list[Packing]:
    """Two sequences, with their border at each offset inside a chunk."""
    return [Packing((0, at, 2 * chunk_size), 2 * chunk_size) for at in range(1, chunk_size + 1)]


INVALID_PACKINGS = {
    "decreasing": Packing((0, 5, 3, 9), 9),
    "not from zero": Packing((1, 5, 9), 9),
    "negative": Packing((-1, 5, 9), 9),
    "beyond the buffer": Packing((0, 5, 10), 9),
    "float": Packing((0.0, 5.0, 9.0), 9),
    "no boundary at all": Packing((), 9),
}

# --- widths and heads ------------------------------------------------------------------------------------------------

WIDTHS = (8, 16, 24, 40, 56, 64, 72, 96, 104, 128, 160, 192, 256)
UNEQUAL_WIDTHS = ((8, 24), (64, 128), (128, 64), (40, 16), (256, 8), (96, 192))
GROUPS = (1, 2, 3, 4, 8)
CHUNK_SIZES = (16, 32, 64)
INVALID_CHUNK_SIZES = (0, 1, 15, 48, 128, -16)

WIDE = Shape(B=1, T=256, H=2, HV=2, K=128, V=128)
MANY_HEADS = Shape(B=256, T=2, H=256, HV=256, K=8, V=8)  # B * HV = 65,536, past a launch grid's limit
OVER_INT32 = Shape(B=1, T=131_073, H=128, HV=128, K=128, V=128)  # each of q, k, v has more than 2^31 elements
