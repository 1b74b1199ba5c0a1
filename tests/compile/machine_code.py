"""What the assembler made of a kernel, read instruction by instruction."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def read(kernel: Any) -> str:
    """A compiled kernel's machine code."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    with tempfile.NamedTemporaryFile() as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([str(tool), file.name], capture_output=True, text=True, check=True).stdout


def overtaken(sass: str) -> list[str]:
    """Instructions that write a register which a product under way still reads as its left operand."""
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
