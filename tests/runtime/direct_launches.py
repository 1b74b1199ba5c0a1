"""Program: launch kernels by Triton's launcher and by the driver itself, and compare what reaches the driver.

    python -m tests.runtime.direct_launches FOLDER

A library with the driver's functions is compiled into the folder. Its launch keeps its configuration and the values of
its parameters. Prints the number of compared parameters of each kernel.
"""

import ctypes
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.backends.nvidia.driver as nvidia
import triton.language as tl
from tests.compile.aot import FakeDriver
from tests.runtime.test_triton_launcher import Sizes as Rows
from tests.runtime.test_triton_launcher import Utilities, copy_rows, given
from triton.runtime import driver

from wyfold.runtime import kernel_launch

DRIVER = """
#include <stdint.h>
#include <string.h>
int parameters;
uint64_t values[64];
struct { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; } config;
int cuLaunchKernelEx(const void *launch, void *function, void **given, void **more) {
  memcpy(&config, launch, sizeof config);
  for (int i = 0; i < parameters; i++) values[i] = *(uint64_t *)memcpy(&values[i], given[i], 8);
  return function != (void *)22 || more != 0;
}
int cuTensorMapEncodeTiled(void *map, int type, unsigned rank, void *address) {
  memset(map, 0, 128);
  memcpy(map, &address, 8);
  return 0;
}
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "refused"; return 0; }
"""
UNUSED = (
    "cuCtxSetCurrent cuDeviceGet cuDeviceGetAttribute cuDevicePrimaryCtxRetain cuFuncGetAttribute cuFuncSetAttribute "
    "cuFuncSetCacheConfig cuModuleGetFunction cuModuleLoadData cuModuleUnload cuOccupancyMaxActiveClusters "
    "cuPointerGetAttribute cuCtxSetLimit cuCtxGetLimit"
)
BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "fp32": 4, "u32": 4}


class Numbers(NamedTuple):
    """A record of numbers."""

    large: int
    one: int
    small: float
    strides: tuple[Any, ...]


@triton.jit
def numbers(p, flag, below, large, numbers, share, N: tl.constexpr):
    x = tl.load(p + tl.arange(0, N)) + below + large + numbers.large + numbers.one + numbers.small
    if flag:
        x += share * numbers.strides[0] + numbers.strides[2]
    tl.store(p + tl.arange(0, N), x)


def stub(folder: Path) -> ctypes.CDLL:
    """The compiled driver, which every later search for the driver finds."""
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(DRIVER + "".join(f"int {name}(void) {{ return 0; }}\n" for name in UNUSED.split()))
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True, capture_output=True
    )
    (folder / "libcuda.so").symlink_to(library)
    nvidia.library_dirs = lambda: [str(folder)]
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def widths(kind: Any) -> list[int]:
    """Bytes of each of the kernel's parameters that an argument of a type of the signature becomes."""
    if isinstance(kind, tuple):
        return [width for member in kind for width in widths(member)]
    if kind == "constexpr":
        return []
    if kind.startswith("tensordesc"):
        rank = kind.partition("[")[2].partition("]")[0].count(",") + 1
        return [8, *[4] * rank, *[8] * rank]
    return [BYTES.get(kind, 8)]


def compared(library: ctypes.CDLL, kernel: Any, *arguments: Any, **fixed: Any) -> int:
    """Number of parameters of a kernel that both ways of launching pass."""
    steps: list[Any] = []
    count = ctypes.c_int.in_dll(library, "parameters")
    count.value = 0  # not known before the kernel is compiled
    launch = lambda: kernel_launch.launch_kernel(kernel, 5, *arguments, num_warps=4, enable_fp_fusion=True, **fixed)
    launch()
    with kernel_launch.observe_steps(lambda step, kernel, new: steps.append(step)):
        launch()
    tensors: list[torch.Tensor] = []

    def to(x: torch.Tensor, offset: int) -> tuple[int, int]:
        tensors.append(x)
        return len(tensors) - 1, offset

    step = steps[0].rebind(to)
    signature = tuple(step.launch.owner.src.signature.values())
    sizes = [*widths(signature), 8, 8]
    assert step.direct is not None and len(step.direct.order) == len(sizes), signature
    count.value = len(sizes)
    found = []
    for moved in (0, 4096):
        for way in (step, step._replace(direct=None)):
            values = (ctypes.c_uint64 * 64).in_dll(library, "values")
            config = (ctypes.c_uint32 * 13).in_dll(library, "config")
            ctypes.memset(values, 0xFF, 512)
            way.replay(7, tensors, [x.data_ptr() + moved for x in tensors])
            passed = [value & (1 << 8 * size) - 1 for value, size in zip(values, sizes)]
            # Grid, block, shared memory and stream; the pointer to attributes is not read where there are none.
            found.append((passed, [*config[:7], *config[8:10], config[12]]))
    assert found[0] == found[1] and found[2] == found[3], found
    assert found[0] != found[2], "addresses are not written"
    return len(sizes)


def main(folder: Path) -> None:
    library, found, fake = stub(folder), Utilities(), FakeDriver("sm_90")
    found.fill_tma_descriptor = nvidia.CudaUtils().fill_tma_descriptor
    fake.utils, fake.launcher_cls = found, nvidia.CudaLauncher
    driver._active = fake
    triton.knobs.cache.dir = str(folder / "cache")
    x = torch.zeros(64, 64)
    rows = compared(library, copy_rows, *given(x), SIZES=Rows(16, 64))
    record = Numbers(2**33 + 5, 1, -0.1, (3, 1, 2**40))
    print(rows, compared(library, numbers, x, 3, -7, 2**31, record, 1e-45, N=64))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
