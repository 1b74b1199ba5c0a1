"""Inspection of a compiled kernel's machine code (SASS) and shared-memory allocation."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def disassemble(kernel: Any) -> str:
    """Disassemble a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile() as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([str(tool), file.name], capture_output=True, text=True, check=True).stdout


def count_instructions(sass: str) -> int:
    """Number of instructions."""
    return len(re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+.*?;", sass, re.MULTILINE))


def overwritten_operands(sass: str) -> list[str]:
    """Instructions that write a register that a matrix product in flight still reads as its left operand."""
    groups: list[set[int]] = [set()]
    found = []
    for instruction in re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", sass, re.MULTILINE):
        wait = re.search(r"DEPBAR\.LE gsb0, 0x(\d+)", instruction)
        if wait:
            groups = [*groups[:-1][max(0, len(groups) - 1 - int(wait[1])) :], groups[-1]]
        elif "HGMMA" in instruction:
            left = re.search(r", R(\d+), gdesc", instruction)
            if left:
                groups[-1] |= set(range(int(left[1]), int(left[1]) + 4))
            if "gsb0" in instruction:
                groups.append(set())
        else:
            written = re.match(
                r"(?:@!?U?P\d+ )?(?!ST|UTMA)[A-Z]\S* (?:P\d+, )*R(\d+)", re.sub(r"\s+", " ", instruction)
            )
            if written and any(int(written[1]) in group for group in groups):
                found.append(instruction)
    return found


def blocking_loads(sass: str) -> list[str]:
    """Moves of a value loaded from global memory to a warp-uniform register, in innermost loops with products.

    The whole warp waits for such a load.
    """
    return [text for body in mma_loops(sass) for text in _uniform_moves(body, r"LDG\.E\S* R(\d+),", 1)]


def reloaded_addresses(sass: str) -> list[str]:
    """Moves of a value loaded from local memory to a warp-uniform register, in innermost loops with products.

    Such values are addresses of tiles that were computed before the loop and spilled.
    """
    return [text for body in mma_loops(sass) for text in _uniform_moves(body, r"LDL\S* R(\d+),", 4)]


def _uniform_moves(body: list[str], load: str, width: int) -> list[str]:
    """Moves to a warp-uniform register of a value that a load in the loop left in a register.

    Args:
        body: Instructions of a loop, which is passed twice: a value may be moved in the next iteration.
        load: Pattern of a load and the number of its first register.
        width: Registers that a load may write.
    """
    loaded: set[int] = set()
    found = set()
    for n, text in (*enumerate(body), *enumerate(body)):
        moved = re.search(r"R2UR UR\d+, R(\d+)", text)
        if moved and int(moved[1]) in loaded:
            found.add(n)
        written = re.match(r"(?!@|ST|UTMA)([A-Z]\S*) (?:P\d+, )*R(\d+)", re.sub(r"\s+", " ", text))
        if written:  # under a predicate, the loaded value may stay
            registers = 4 if ".128" in written[1] else 2 if ".64" in written[1] or ".WIDE" in written[1] else 1
            loaded -= set(range(int(written[2]), int(written[2]) + registers))
        for first in re.findall(load, text):
            loaded |= set(range(int(first), int(first) + width))
    return [body[n] for n in sorted(found)]


def mma_loops(sass: str) -> list[list[str]]:
    """Instructions of each innermost loop that contains matrix products."""
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);|^\s*(\.L_\w+):", sass, re.MULTILINE)
    labels = {label: n for n, (_, label) in enumerate(lines) if label}
    loops = []
    for n, (instruction, _) in enumerate(lines):
        target = re.search(r"BRA `\((\.L_\w+)\)", instruction)
        if target and labels[target[1]] < n and any("HGMMA" in text for text, _ in lines[labels[target[1]] : n]):
            loops.append(range(labels[target[1]], n))
    return [
        [lines[n][0] for n in loop]
        for loop in loops
        if not any(other != loop and other.start in loop and other.stop in loop for other in loops)
    ]


def reused_barriers(kernel: Any) -> list[str]:
    """Allocations of shared memory after the last use of a Gluon barrier, which may overlap the barrier's memory.

    Barriers that Triton creates itself are also invalidated by it, and not listed.
    """
    if "gluon" not in kernel.metadata.name:
        return []
    from triton._C.libtriton import ir, nvidia, passes

    context = ir.context()
    ir.load_dialects(context)
    nvidia.load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(kernel.asm["ttgir"])
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    module.context = context
    steps = ir.pass_manager(context)
    passes.ttgpuir.add_allocate_warp_groups(steps)
    passes.convert.add_scf_to_cf(steps)
    passes.gluon.add_inliner(steps)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(steps, 90, 86)
    steps.run(module, "allocate")
    lines = str(module).splitlines()
    found = []
    for barrier in re.findall(r"(%\w+) = ttg\.local_alloc .*memdesc<[0-9x]*xi64,", "\n".join(lines)):
        last = max(n for n, line in enumerate(lines) if re.search(rf"{barrier}\b(?!_)", line))
        indent = len(lines[last]) - len(lines[last].lstrip())
        if "ttg.warp_specialize" in lines[last]:  # its partitions follow, and may all use its operands
            last = next(n for n in range(last + 1, len(lines)) if re.match(rf" {{{indent}}}\}}", lines[n]))
        found += [f"{barrier}: {line.strip()[:80]}" for line in lines[last + 1 :] if "allocation.offset" in line]
    return found
