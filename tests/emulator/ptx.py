"""An interpreter for the inline PTX of kernels, about ten instructions.

A 32-bit register is an int32 tensor with one element per thread. Shuffles move data along the last axis, between the
threads that share a row; the operand's layout gives their number and the elements that each holds.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

INSTRUCTION = re.compile(r"(?:@(!?)(\w+)\s+)?([a-z][\w.]*)\s+(.*)", re.DOTALL)


def run(asm: str, constraints: str, x: Tensor, layout: Any, dtypes: tuple[torch.dtype, ...], pack: int) -> list[Tensor]:
    """Results of `gl.inline_asm_elementwise` with one operand.

    Args:
        asm: The PTX. `$0`, `$1`, ... are the registers of the results, then those of the operand.
        constraints: One per register; "=" marks results.
        x: The operand, float32.
        layout: Gluon layout of x; only shuffles need it.
        dtypes: Of the results. A register holds one float32 or two bfloat16.
        pack: Elements per execution of the block.

    Raises:
        ValueError: an instruction is not implemented, or a shuffle does not fit the layout.
    """
    flat, columns = _packed(x, layout, pack, "shfl" in asm)
    results = sum(part.startswith("=") for part in constraints.split(","))
    registers = {f"${results + i}": columns[i] for i in range(pack)}
    for statement in re.sub(r"\.reg[^;]*;|[{}]", "", asm).split(";"):
        if statement.strip():
            _step(registers, statement.strip())
    found, first = [], 0
    for dtype in dtypes:
        count = pack * dtype.itemsize // 4
        parts = [registers[f"${first + i}"] for i in range(count)]
        halves = [half for part in parts for half in (part << 16, part & -0x10000)]
        made = [y.view(torch.float32).to(dtype) for y in (halves if dtype.itemsize == 2 else parts)]
        found.append(flat(made))
        first += count
    return found


def _packed(x: Tensor, layout: Any, pack: int, shuffled: bool) -> tuple[Any, list[Tensor]]:
    """A function that turns registers into a tensor of x's shape, and the registers that hold x."""
    if shuffled:
        own, lanes = _row(layout)
        shape = *x.shape[:-1], x.shape[-1] // (pack * lanes), pack // own, lanes, own
        columns = [x.reshape(shape)[..., i // own, :, i % own] for i in range(pack)]
        join = lambda y: torch.stack(y, -1).unflatten(-1, (pack // own, own)).movedim(-2, -3).reshape(x.shape)
    else:
        columns = list(x.reshape(-1, pack).unbind(-1))
        join = lambda y: torch.stack(y, -1).reshape(x.shape)
    return join, [y.contiguous().view(torch.int32) for y in columns]


def _row(layout: Any) -> tuple[int, int]:
    """Contiguous elements of a row per thread, and threads per row."""
    if hasattr(layout, "size_per_thread"):
        return layout.size_per_thread[-1], layout.threads_per_warp[-1]
    if hasattr(layout, "instr_shape"):  # accumulator of an MMA
        return 2, 4
    raise ValueError(f"ptx: a shuffle needs a blocked or MMA layout, got {layout}")


def _step(registers: dict[str, Tensor], statement: str) -> None:
    match = INSTRUCTION.fullmatch(statement)
    if match is None:
        raise ValueError(f"ptx: not implemented: {statement}")
    negated, predicate, name, rest = match.groups()
    target, *sources = (word.strip() for word in rest.split(","))
    x = [_read(registers, word) for word in sources]
    if name.startswith("shfl.sync."):
        target, _, passed = target.partition("|")
        y, registers[passed] = _shuffle(name.split(".")[2], x[0], int(sources[1], 0), int(sources[2], 0))
    else:
        y = _computed(name, x)
    if predicate:
        condition = ~registers[predicate] if negated else registers[predicate]
        y = torch.where(condition, y, registers[target])
    registers[target] = y


def _read(registers: dict[str, Tensor], word: str) -> Tensor:
    if word in registers:
        return registers[word]
    bits = int(word[2:], 16) if word.startswith("0f") else int(word, 0)
    return torch.tensor(bits - (bits >> 31 << 32), dtype=torch.int32)


def _computed(name: str, x: list[Tensor]) -> Tensor:
    f = [y.view(torch.float32) for y in x]
    match name:
        case "mov.b32" | "mov.f32":
            return x[0]
        case "add.f32":
            return (f[0] + f[1]).view(torch.int32)
        case "sub.f32":
            return (f[0] - f[1]).view(torch.int32)
        case "and.b32":
            return x[0] & x[1]
        case "shl.b32":
            return x[0] << x[1]
        case "cvt.rn.bf16x2.f32":  # the first operand is the upper half
            high, low = (y.bfloat16().float().view(torch.int32) for y in f)
            return high | (low >> 16 & 0xFFFF)
        case "ex2.approx.ftz.f32":
            y = torch.exp2(f[0])
            return torch.where(y < torch.finfo(torch.float32).tiny, 0.0, y).view(torch.int32)
        case "rcp.approx.ftz.f32":
            return (1 / f[0]).view(torch.int32)
    raise ValueError(f"ptx: not implemented: {name}")


def _shuffle(kind: str, x: Tensor, by: int, limits: int) -> tuple[Tensor, Tensor]:
    """The source thread's value, or the thread's own if the source is out of range; and whether it is in range."""
    lanes, width = x.shape[-1], 32 - (limits >> 8 & 31)
    if lanes != width:
        raise ValueError(f"ptx: a shuffle of {width} threads in rows of {lanes} threads")
    lane = torch.arange(lanes)
    source = {"up": lane - by, "down": lane + by, "idx": torch.full((lanes,), by)}[kind]
    there = (source >= 0) & (source < lanes)
    return x[..., torch.where(there, source, lane)], there.expand(x.shape)
