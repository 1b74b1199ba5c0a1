"""Two planted faults for `memory.py`, which show that the sanitizer reports such faults."""

import torch
import triton
import triton.language as tl

WARPS = 4


@triton.jit
def wyfold_scan_planted(x, y, N: tl.constexpr, past: tl.constexpr, race: tl.constexpr):
    """A kernel with two faults: it writes `past` elements behind the end of y; with `race`, all threads write different
    numbers to one shared word.
    """
    i = tl.arange(0, N)
    total = tl.sum(tl.load(x + i), 0)  # a reduction over warps, which uses shared memory
    if race:
        i = tl.inline_asm_elementwise(
            "{ .reg .u32 at; mov.u32 at, global_smem; st.shared.u32 [at], $1; mov.u32 $0, $1; }",
            "=r,r",
            [i],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    tl.store(y + i + past, total + i)


def behind_a_tensor(device: torch.device) -> list[torch.Tensor]:
    return _launched(device, past=1, race=False)


def race(device: torch.device) -> list[torch.Tensor]:
    return _launched(device, past=0, race=True)


def _launched(device: torch.device, past: int, race: bool) -> list[torch.Tensor]:
    N = 32 * WARPS
    x, y = (torch.zeros(N, dtype=torch.int32).to(device) for _ in range(2))
    wyfold_scan_planted[(1,)](x, y, N=N, past=past, race=race, num_warps=WARPS)
    return [y]
