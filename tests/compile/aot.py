"""Ahead-of-time compilation of the kernels of a call, without a GPU, and the resources that they use.

`compiled(call, architecture)` makes a public operator's call on small CPU tensors, forward and backward. Each kernel
launch ends after the compilation. The compiled code is therefore what a GPU of that architecture would run: with the
configuration of its table, the arguments of the real launch, and Triton's specialisation on their values.

    python -m tests.compile.aot                            every call for every architecture, as a table
    python -m tests.compile.aot -a sm_90 -c float32        some of them
    python -m tests.compile.aot -j 16                      in 16 processes
    python -m tests.compile.aot --allow                    records their spills in allowances.json

AMD's architectures have no Gluon kernels. For them a process pretends to have PyTorch for ROCm, which device functions
ask for when they are imported. Only whether the kernels compile and fit is checked there; none has run on such a GPU.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib.util
import io
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from tests.compile.machine_code import reused_barriers
from torch.testing._internal.distributed.fake_pg import FakeStore

import wyfold
from wyfold import TTTState, serving
from wyfold.cli.operators import OPERATOR_SPECS
from wyfold.cp import build_cp_context
from wyfold.kernels import table
from wyfold.ops import serving_call
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import kernel_configs, segment_rule, triton_support
from wyfold.runtime.kernel_configs import LaunchKey

if importlib.util.find_spec("triton") is not None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    RUN = JITFunction.run

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache" / "triton"
ALLOWANCES = HERE / "allowances.json"

RECORDED_TRITON = "3.6"
"""Triton version whose recorded spills apply to a version without a record for an architecture."""

ANY_ARCHITECTURE = '"cuda:any"'
"""Placeholder for an architecture's name in modules that are cached for all architectures."""

FRONTEND_OPTIONS = (
    "allowed_dot_input_precisions",
    "debug",
    "default_dot_input_precision",
    "sanitize_overflow",
)
"""Options that Triton's front end reads, except those of float8. They are equal for every architecture and row."""

PTX_TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
"""Line of PTX that names the architecture."""

KIB = 1024
SHARED = {
    "sm_80": 163 * KIB,
    "sm_86": 99 * KIB,
    "sm_89": 99 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_103": 227 * KIB,
    "sm_120": 99 * KIB,
    "sm_121": 99 * KIB,
    "gfx942": 64 * KIB,
    "gfx950": 160 * KIB,
}
"""Bytes of shared memory available to one block, of every architecture that kernels are compiled for."""

AMD = "gfx"
"""Start of the names of AMD's architectures."""


@dataclass(frozen=True)
class Call:
    """One small call of an operator.

    Attributes:
        subject: Name of an entry of `wyfold.cli.operators`: the operator, and how it is used.
        dtype: Of the inputs, by torch's name.
        K, V: Widths.
        options: Keywords in addition to the drawn arguments.
        packed: Whether boundaries are passed.
        heads: Value heads. Two of them give few programs (low occupancy).
        wrt: Arguments that require gradients; empty for all. `NONE`: no argument.
        segments: Number of segments of the sequence.
        misaligned: Whether the addresses of tokens are no multiples of 16, which TMA descriptors need.
        scalar: Whether a gate over channels is reduced to its first channel.
        projected: Whether the gate has the dtype of the inputs, as a projection's output whose activation is inside.
        continued: Whether PaTH attention gets keys of earlier calls.
        tested: Architectures for which `make test` compiles the call. `make compile` does for all.
    """

    subject: str
    dtype: str = "bfloat16"
    K: int = 128
    V: int = 128
    options: tuple[tuple[str, Any], ...] = ()
    packed: bool = False
    heads: int = 2
    wrt: tuple[str, ...] = ()
    segments: int = 1
    misaligned: bool = False
    scalar: bool = False
    projected: bool = False
    continued: bool = False
    tested: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [self.subject, self.dtype, f"K{self.K}", f"V{self.V}"]
        words += [f"{name}={value}" for name, value in self.options] + (["packed"] if self.packed else [])
        words += [f"HV{self.heads}"] if self.heads != 2 else []
        words += [f"d{name}" for name in self.wrt]
        words += [f"in {self.segments} segments"] if self.segments != 1 else []
        words += ["misaligned"] if self.misaligned else []
        words += ["scalar"] if self.scalar else []
        words += ["projected"] if self.projected else []
        words += ["continued"] if self.continued else []
        return " ".join(words)

    def arguments(self) -> dict[str, Any]:
        """Arguments of the call, on the CPU."""
        subject = OPERATOR_SPECS[self.subject]
        T = 64 * self.segments
        arguments = subject.arguments(Shape(1, T, 1, self.heads, self.K, self.V), getattr(torch, self.dtype), 0)
        if self.packed:
            arguments["cu_seqlens"] = torch.tensor([0, T])
        arguments |= self.changed(arguments)
        for name, x in arguments.items():
            if subject.backward and isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_(not self.wrt or name in self.wrt)
        return {**arguments, **dict(self.options), "backend": "triton"}

    def changed(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """What `misaligned`, `scalar`, `projected` and `continued` change."""
        found: dict[str, Any] = self.misalign(arguments)
        if self.scalar:
            found["g"] = arguments["g"][..., 0].contiguous()
        if self.projected:
            found["g"] = arguments["g"].to(arguments["q"].dtype)
        if self.continued:
            k = arguments["k"]
            counts = torch.full(k.shape[:1], k.shape[1], device=k.device)
            found["past"] = wyfold.PathKeys(k, arguments["v"], arguments.get("g"), counts)
        return found

    def misalign(self, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
        """If `misaligned`, copies of the tokens, one element behind an address that is a multiple of 16."""
        tokens = {name: arguments[name] for name in ("q", "k", "v")} if self.misaligned else {}
        return {name: x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x) for name, x in tokens.items()}

    def run(self) -> None:
        """Run the forward, and the backward if there is one."""
        subject = OPERATOR_SPECS[self.subject]
        with self.segmented():
            outputs = subject.ours(self.arguments())
        if subject.backward and outputs[0].requires_grad:
            torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])

    def segmented(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the sequence is cut into segments."""
        return contextlib.nullcontext() if self.segments == 1 else segment_rule.forced(self.segments)


@dataclass(frozen=True)
class ServingCall:
    """One call of a serving operator, over a pool of two slots.

    Attributes:
        operator: Name of the operator.
        stored: Dtype of the pool.
        between: Whether boundaries are passed, and intermediate states are stored in a separate pool.
        gate: Kind of the gate, with heads of 128 channels. Empty: no gate, and heads of 16 channels.
        heads: Number of heads, with bfloat16 tokens in chunks of 64 as on a GPU, a mask of initial states, and final
            states in other slots. 0: one head, with float32 tokens.
        v_first: Whether the states of a call with a gate are [V, K].
        wide: Whether the output is float32 for tokens of 16 bits.
        segments: Number of segments of the sequence, with `heads`.
        tested: As in `Call`.
    """

    operator: str
    stored: str = "float32"
    between: bool = False
    gate: str = ""
    heads: int = 0
    v_first: bool = True
    wide: bool = False
    segments: int = 1
    tested: tuple[str, ...] = ()

    def __str__(self) -> str:
        wide = f", a {self.gate} gate, 128 channels, {'V' if self.v_first else 'K'}-first" if self.gate else ""
        wide += f", bfloat16 tokens, {self.heads} heads" if self.heads else ""
        wide += ", float32 output" if self.wide else ""
        wide += f", in {self.segments} segments" if self.segments != 1 else ""
        return f"serving.{self.operator} {self.stored}{wide}" + (" packed, states between" if self.between else "")

    def run(self) -> None:
        if self.operator == "conv1d_update":
            pool = torch.zeros(2, 512, 3, dtype=getattr(torch, self.stored))
            serving.conv1d_update(torch.randn(1, 512), pool, torch.randn(512, 4), activation="silu", backend="triton")
            return
        if self.operator == "ttt_decode":
            D, dtype = 128 if self.stored == "float32" else 64, getattr(torch, self.stored)
            tokens = (torch.randn(1, 1, 1, D) for _ in range(3))
            S, c = torch.zeros(2, 1, D, D, dtype=dtype), torch.zeros(2, 1, 1, D, dtype=dtype)
            stand = TTTState(S, c, S.clone(), c.clone(), torch.zeros(2, dtype=torch.int32))
            w = torch.ones(1, D)
            serving.ttt_decode(*tokens, w, w, 0.1, stand, torch.tensor([1]), backend="triton")
            return
        T, D, H, more = 1, 128 if self.gate else 16, self.heads or 1, dict[str, Any]()
        pool, slots = torch.zeros(2, H, D, D, dtype=getattr(torch, self.stored)), torch.tensor([1])
        if self.heads:
            T = 64 * self.segments
            more = {"has_initial_state": torch.ones(1, dtype=torch.bool), "output_state_indices": slots - 1}
        if self.between:
            T, more = 64, {"cu_seqlens": torch.tensor([0, 64]), "checkpoint_every": 64}
            more |= {"checkpoint_pool": torch.zeros_like(pool), "checkpoint_indices": torch.tensor([1])}
        g = {"": None, "scalar": torch.zeros(1, T, H), "channel": torch.zeros(1, T, H, D)}[self.gate]
        q, k, v = (torch.randn(1, T, H, D, dtype=torch.bfloat16 if self.heads else None) for _ in range(3))
        more |= {"state_v_first": bool(self.gate) and self.v_first, "backend": "triton"}
        if self.wide:
            more |= {"out": torch.empty(v.shape)}
        cut = segment_rule.forced(self.segments) if self.segments != 1 else contextlib.nullcontext()
        with cut, mock.patch.object(serving_call, "best_chunk_size", lambda *_, **__: 64 if self.heads else 16):
            getattr(serving, self.operator)(q, k, v, g, torch.rand(1, T, H), pool, slots, **more)


@dataclass(frozen=True)
class RankCall:
    """A call under context parallelism on the second of three ranks, whose sequence spans all ranks.

    The rank has tokens behind its last full chunk.

    Attributes:
        dtype: Of the inputs, by torch's name.
        K, V: Widths.
        tested: As in `Call`.
    """

    dtype: str = "bfloat16"
    K: int = 128
    V: int = 128
    tested: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"a rank's share {self.dtype} K{self.K} V{self.V}"

    def run(self) -> None:
        tokens = 88
        shape = Shape(1, tokens, 1, 2, self.K, self.V)
        arguments = inputs.draw("random", "gated_delta_rule", shape, dtype=getattr(torch, self.dtype), seed=0)
        given = {name: arguments[name].requires_grad_() for name in ("q", "k", "v", "g", "beta")}
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
        try:
            context = build_cp_context(None, dist.group.WORLD, total_tokens=3 * tokens, check="never")
            o = wyfold.chunk_gated_delta_rule(**given, chunk_size=64, cp_context=context, backend="triton")[0]
            o.backward(torch.zeros_like(o))
        finally:
            dist.destroy_process_group()


@dataclass(frozen=True)
class Usage:
    """Resources of a compiled kernel.

    Attributes:
        kernel: Name.
        shared: Bytes of shared memory of a block.
        registers: Registers of a thread.
        spilled: Bytes of register spills, stored and loaded. Each instruction counts once.
        tensor_memory: Columns of tensor memory; 0 on architectures without it.
        serialized: Whether the assembler serialised asynchronous matrix products for lack of registers.
        reused: Allocations that may overlap the memory of a barrier (docs/facts/hopper.md, KDA-NAN-1).
    """

    kernel: str
    shared: int
    registers: int
    spilled: int
    tensor_memory: int
    serialized: bool
    reused: list[str]


class FakeDriver:
    """Triton driver without a GPU: answers the queries that a launch makes before it compiles."""

    def __init__(self, architecture: str):
        from triton.backends.compiler import GPUTarget

        amd = architecture.startswith(AMD)
        self.number = int(architecture.removeprefix(AMD if amd else "sm_"))
        self.target = GPUTarget("hip", architecture, 64) if amd else GPUTarget("cuda", self.number, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.number  # Triton caches kernels by device, so each architecture has an index

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@contextlib.contextmanager
def pretend_gpu(architecture: str, launched: Callable[..., None]) -> Iterator[None]:
    """Let kernels serve CPU tensors as on a GPU of this architecture.

    Args:
        architecture: Determines calls, configurations and the target of the compiler.
        launched: Called as `launched(kernel, *arguments, grid=..., **options)` instead of a launch.
    """

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched(self, *arguments, grid=grid, **options)

    with (
        mock.patch.object(driver, "_active", FakeDriver(architecture)),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(triton_support, "architecture", lambda device: architecture),
        mock.patch.object(table, "_device_refusal", lambda device, demand: ""),
    ):
        yield


def kernel_name(kernel: Any) -> str:
    """Name of a kernel in the tables: "stage.language"."""
    return ".".join(kernel.fn.__module__.split(".")[2:4])


def is_compiled(call: Call | ServingCall | RankCall, kernel: str) -> bool:
    """Whether a kernel of a call is compiled: of a call under context parallelism only those between ranks."""
    return not isinstance(call, RankCall) or kernel == "rank_carry.triton"


def compiled(
    call: Call | ServingCall | RankCall, architecture: str, functions: Collection[str] | None = None
) -> list[Usage]:
    """Compile the kernels of a call for an architecture; given names of functions, those alone."""
    found: list[Usage] = []

    def launched(kernel: Any, *arguments: Any, **options: Any) -> None:
        if is_compiled(call, kernel_name(kernel)) and (functions is None or kernel.fn.__name__ in functions):
            found.append(compile_one(kernel, *arguments, **options))

    with pretend_gpu(architecture, launched):
        call.run()
    return found


def compile_one(kernel: Any, *arguments: Any, **options: Any) -> Usage:
    """Resources of the kernel that a launch with these arguments compiles; inside `pretend_gpu`."""
    return usage(*code(kernel, *arguments, **options))


def code(kernel: Any, *arguments: Any, **options: Any) -> tuple[Any, str]:
    """Compile the kernel of a launch; returns it and the assembler's log. Inside `pretend_gpu`."""
    from triton import knobs

    log = io.StringIO()
    with (
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(log),
        cache_frontend(),
        cache_layout_passes(),
    ):
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = str(CACHE), True
        ready = RUN(kernel, *arguments, warmup=True, **options)
    return ready, log.getvalue()


def passes_are_known() -> bool:
    """Whether this Triton has the passes that `cache_frontend` and `cache_layout_passes` were written for."""
    return triton_support.triton_version().startswith(f"{RECORDED_TRITON}.") and not torch.version.hip


def cached_module(kind: str, source: str, make: Callable[[], Any], context: Any, name: str = ANY_ARCHITECTURE) -> Any:
    """The module that `make` returns, cached on disk.

    Args:
        kind: Suffix of the cache file.
        source: Cache key: everything that the module depends on.
        make: Makes the module.
        context: Context of the returned module.
        name: Name of the architecture in the module; replaced by `ANY_ARCHITECTURE` in the cache.
    """
    from triton._C.libtriton import ir

    kept = CACHE / f"{hashlib.sha256(f'{triton_support.triton_version()} {source}'.encode()).hexdigest()}.{kind}"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_text(str(make()).replace(name, ANY_ARCHITECTURE))
        unfinished.rename(kept)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as named:
        named.write(kept.read_text().replace(ANY_ARCHITECTURE, name))
        named.flush()
        module = ir.parse_mlir_module(named.name, context)
    module.context = context
    return module


@contextlib.contextmanager
def cache_frontend() -> Iterator[None]:
    """Cache the output of Triton's front end, for all architectures.

    The front end gets no architecture, neither by name nor in an option, and fails if it queries one. Gluon's front end
    is not cached, because it checks layouts for the one architecture that has such kernels.
    """
    from triton.compiler.compiler import ASTSource

    if not passes_are_known():
        yield
        return
    usual = ASTSource.make_ir

    def make_ir(self: Any, target: Any, options: Any, functions: dict[str, Any], modules: Any, context: Any) -> Any:
        shown = {name: getattr(options, name) for name in FRONTEND_OPTIONS}
        least = {"min_dot_size": functions["min_dot_size"]}

        def make() -> Any:
            with mock.patch.object(driver, "_active", object()):
                return usual(self, None, SimpleNamespace(**shown), least, modules, context)

        return cached_module("read", f"{self.hash()} {shown}", make, context)

    with mock.patch.object(ASTSource, "make_ir", make_ir):
        yield


@contextlib.contextmanager
def cache_layout_passes() -> Iterator[None]:
    """Cache the output of Triton's first two passes on tiles, for all architectures.

    They depend on the architecture only by its name. The second one traverses the whole kernel for every memory access
    (TRITON-4 in docs/facts/compilers.md). With many accesses that takes longer than all later passes. Nothing is cached
    under a Triton whose passes were not inspected.
    """
    from triton._C.libtriton import ir, passes
    from triton.backends.nvidia.compiler import CUDABackend

    if not passes_are_known():
        yield
        return
    usual, convert, lay_out = CUDABackend.make_ttgir, passes.ttir.add_convert_to_ttgpuir, passes.ttgpuir.add_coalesce

    def make_ttgir(module: Any, metadata: dict[str, Any], options: Any, capability: int) -> Any:
        name, context = f'"cuda:{capability}"', module.context

        def make() -> Any:
            manager = ir.pass_manager(context)
            convert(manager, name.strip('"'), options.num_warps, 32, options.num_ctas)
            lay_out(manager)
            manager.run(module, "cache_layout_passes")
            return module

        source = f"{options.num_warps} {options.num_ctas} {module}"
        module = cached_module("laid_out", source, make, context, name)
        with (
            mock.patch.object(passes.ttir, "add_convert_to_ttgpuir", lambda *_: None),
            mock.patch.object(passes.ttgpuir, "add_coalesce", lambda *_: None),
        ):
            return usual(module, metadata, options, capability)

    with mock.patch.object(CUDABackend, "make_ttgir", staticmethod(make_ttgir)):
        yield


class Launch(NamedTuple):
    """A launch of a call.

    Attributes:
        kernel: "stage.language".
        function: Name of the kernel's function.
        options: Names of the launch's keywords.
    """

    kernel: str
    function: str
    options: frozenset[str]


class Uncompiled(NamedTuple):
    """What a call launches.

    Attributes:
        rows: (kernel, row) of every configuration that it uses.
        launches: Its launches.
    """

    rows: set[tuple[str, str]]
    launches: list[Launch]


@functools.cache
def uncompiled(call: Call | ServingCall | RankCall, architecture: str) -> Uncompiled:
    """Make a call and compile nothing."""
    found, usual = Uncompiled(set(), []), kernel_configs.row

    def row(architecture: str, kernel: str, key: LaunchKey) -> str:
        name = usual(architecture, kernel, key)
        found.rows.add((kernel, name))
        return name

    def launched(kernel: Any, *_: Any, **options: Any) -> None:
        found.launches.append(Launch(kernel_name(kernel), kernel.fn.__name__, frozenset(options)))

    with mock.patch.object(kernel_configs, "row", row), pretend_gpu(architecture, launched):
        call.run()
    return found


@functools.cache
def tested_functions(architecture: str) -> dict[Call | ServingCall | RankCall, set[str]]:
    """The functions that `make test` compiles in each tested call: those that no earlier one of these launches."""
    known: set[str] = set()
    found = {}
    for call in calls(architecture):
        if architecture in call.tested:
            launches = uncompiled(call, architecture).launches
            found[call] = {launch.function for launch in launches if is_compiled(call, launch.kernel)} - known
            known |= found[call]
    return found


def explained_rows(call: Call, architecture: str) -> set[tuple[str, str]]:
    """(kernel, row) of every configuration in the plan of a call. Does not make the call."""
    with pretend_gpu(architecture, lambda *_, **__: None), call.segmented():
        plan = wyfold.explain(getattr(wyfold, OPERATOR_SPECS[call.subject].operator), **call.arguments())
    return {
        (f"{stage}.{table.selected_backend(stage, plan.backend, LaunchKey.parse(key), torch.device('cpu'))}", row)
        for stage, key, row in plan.rows
    }


def usage(kernel: Any, log: str) -> Usage:
    """Resources of a compiled kernel, from the assembler's log. Cached on disk, next to the compiler's cache."""
    kept = CACHE / f"{kernel.hash}.use.json"
    if "amdgcn" in kernel.asm:
        return amd_usage(kernel)
    if not kept.exists():
        log = log if "spill stores" in log else assembler_log(kernel)
        spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log)
        found = Usage(
            kernel.metadata.name,
            kernel.metadata.shared,
            max(map(int, re.findall(r"Used (\d+) registers", log))),
            sum(int(stores) + int(loads) for stores, loads in spills),
            kernel.metadata.tmem_size or 0,
            "serialized" in log,
            reused_barriers(kernel),
        )
        kept.write_text(json.dumps(asdict(found)))
    return Usage(**json.loads(kept.read_text()))


def amd_usage(kernel: Any) -> Usage:
    """Resources of a kernel compiled for AMD, from the notes in its assembly. Spilled scalars stay in registers."""
    notes = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", kernel.asm["amdgcn"]))
    registers, spilled = int(notes["vgpr_count"]), int(notes["private_segment_fixed_size"])
    return Usage(kernel.metadata.name, kernel.metadata.shared, registers, spilled, 0, False, [])


def assembler_log(kernel: Any) -> str:
    """Assemble the PTX of a compiled kernel again, and return the log."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(kernel.asm["ptx"])
        gpu = PTX_TARGET.search(kernel.asm["ptx"])[1]
        command = [get_ptxas(kernel.metadata.target.arch).path, "-v", f"--gpu-name={gpu}", source]
        done = subprocess.run([*command, "-o", Path(folder, "kernel")], capture_output=True, text=True, check=True)
        return done.stderr


@functools.cache
def allowances() -> dict[str, dict[str, dict[str, int]]]:
    """Allowed spills: Triton minor version -> architecture -> "call: kernel" -> bytes; "...: serialized" -> 1."""
    return json.loads(ALLOWANCES.read_text()) if ALLOWANCES.exists() else {}


def violations(call: Call | ServingCall | RankCall, architecture: str, found: list[Usage]) -> list[str]:
    """Resource limits and allowances that the kernels of a call exceed; empty if none."""
    recorded = allowances()
    minor = ".".join(triton_support.triton_version().split(".")[:2])
    name = kernel_configs.borrowed_from(architecture)
    allowed = recorded.get(minor, {}).get(name) or recorded.get(RECORDED_TRITON, {}).get(name, {})
    wrong = []
    for u in found:
        if u.shared > SHARED[architecture]:
            wrong.append(f"{u.kernel}: {u.shared} bytes of shared memory, {SHARED[architecture]} are available")
        if u.spilled > allowed.get(f"{call}: {u.kernel}", 0) and not architecture.startswith(AMD):
            wrong.append(f"{u.kernel}: spills {u.spilled} bytes, {allowed.get(f'{call}: {u.kernel}', 0)} are allowed")
        if u.serialized and not allowed.get(f"{call}: {u.kernel}: serialized"):
            wrong.append(f"{u.kernel}: its matrix products are serialized")
        wrong += [f"{u.kernel}: memory of a barrier may be reused by {reuse}" for reuse in u.reused]
        if u.tensor_memory > 512:
            wrong.append(f"{u.kernel}: {u.tensor_memory} columns of tensor memory, 512 are available")
    return wrong


NONE = ("no argument",)
"""`wrt` of a call without gradients."""

GPU_CHUNKS = (("chunk_size", 64),)
"""Chunk size that a GPU selects for a scalar gate. For CPU tensors a smaller one is selected."""

HOPPER, ADA = ("sm_90",), ("sm_89",)
"""Architectures for which `make test` compiles a part of the calls: the one with Gluon kernels, and one with the least
shared memory."""

CALLS = (
    Call("chunk_gated_delta_rule, gate inside", options=GPU_CHUNKS, packed=True, heads=128),
    Call("chunk_kda, gate inside", packed=True),
    Call("chunk_kda", K=256, V=256, wrt=("initial_state",)),
    Call("chunk_delta_rule", K=24, V=40, options=(("chunk_size", 32),)),
    Call("chunk_gated_delta_rule", "float16", 64, 64, tested=HOPPER),
    Call("chunk_gated_delta_rule", "float32", options=GPU_CHUNKS),
    Call("chunk_kda, bounded gate", "float16", 64, 64, options=(("chunk_size", 16),)),
    Call("chunk_kda", "float32", 64, 64),
    Call("chunk_kda, gate inside", packed=True, wrt=("initial_state",), segments=8),
    Call("chunk_gated_delta_rule", "float32", 64, 64, wrt=("initial_state",), segments=4, tested=HOPPER + ADA),
    *(
        Call("chunk_ttt_linear", dtype, D, D, options=(("chunk_size", C),), packed=packed, tested=tested)
        for dtype, D, C, packed, tested in (
            ("bfloat16", 64, 16, False, HOPPER),
            ("bfloat16", 64, 64, False, HOPPER),
            ("bfloat16", 128, 16, True, ()),
            ("float32", 64, 16, False, ()),
            ("float16", 128, 16, False, ()),
        )
    ),
    Call("chunk_dplr_delta_rule", packed=True),
    Call("chunk_dplr_delta_rule", K=64, V=64, options=GPU_CHUNKS, wrt=("initial_state",)),
    Call("chunk_rwkv7", "float32", 64, 64),
    # Of the rules, Comba with few gradients has the fewest accesses, which the compiler's time follows (TRITON-4).
    Call("chunk_comba", K=32, V=32, wrt=("k", "beta"), tested=HOPPER),
    Call("chunk_dplr_delta_rule", K=256, V=256, wrt=("initial_state",)),
    Call("fused_recurrent_gdn2", packed=True, wrt=("initial_state",), tested=HOPPER),
    Call("fused_recurrent_rwkv7", "float32", 256, 256, wrt=("initial_state",)),
    Call("fused_recurrent_kda", packed=True, tested=HOPPER),
    Call(
        "fused_recurrent_gated_delta_rule",
        "float32",
        256,
        256,
        options=(("state_v_first", True), ("initial_state", None)),
    ),
    # Tiles of keys and values of two widths.
    Call("parallel_path_attn, forget gate", K=16, V=72, wrt=NONE, continued=True, tested=HOPPER),
    # With a whole block of 512 tokens, and another one.
    Call("parallel_path_attn, forget gate", packed=True, segments=9),
    # Narrow heads, which compile in half the time.
    Call("parallel_path_attn, forget gate", K=16, V=16, packed=True, segments=9, tested=HOPPER),
    Call("parallel_path_attn", wrt=NONE, segments=9, options=(("use_cache", True),), tested=HOPPER),
    Call("solve_tril", tested=HOPPER),
    Call("solve_tril", "float32"),
    *(Call("chunk_scaled_dot_kkt", options=(("chunk_size", C),)) for C in (16, 32)),
    Call("chunk_scaled_dot_kkt", options=GPU_CHUNKS, tested=HOPPER + ADA),
    *(
        Call("chunk_scaled_dot_kkt", dtype, options=(("chunk_size", C), *gate), scalar=not gate)
        for gate in ((("g", None),), ())
        for dtype in ("bfloat16", "float32")
        for C in (16, 32, 64)
    ),
    *(
        Call(name, tested=HOPPER)
        for name in (
            "causal_conv1d",
            "l2norm",
            "rms_norm_gated",
            "fused_gdn_gate",
            "fused_beta_sigmoid",
        )
    ),
    Call("fused_kda_gate"),
)
"""Calls that are compiled for each architecture: every row of its table, every kind of gate and dtype.

`make compile` compiles all, `make test` every kernel once, in the first call of those that are `tested`.
"""

STATES = (("chunk_size", 64), ("state_v_first", True), ("return_intermediate_states", True))
"""Options for intermediate states, which take shared memory in addition to the tokens in flight."""

PER_ARCHITECTURE: dict[str, tuple[Call | ServingCall | RankCall, ...]] = {
    "sm_90": (
        Call("parallel_path_attn", "float16", 64, 64, segments=9),
        Call("parallel_path_attn, forget gate", "float32", 64, 64, packed=True, segments=9),
        Call("chunk_kda, gate inside", options=GPU_CHUNKS, packed=True),
        Call("chunk_comba", K=64, V=64, options=(("chunk_size", 32),), tested=HOPPER),
        Call("chunk_comba", options=(("chunk_size", 32),)),
        Call("chunk_gdn2", options=(("chunk_size", 64),), wrt=("initial_state",)),
        Call("chunk_gdn2", options=(("chunk_size", 64),), wrt=("initial_state",), segments=4),
        Call("chunk_gdn2", options=(("chunk_size", 64), ("use_qk_l2norm_in_kernel", True)), packed=True, wrt=NONE),
        Call("chunk_rwkv7", K=64, V=64, options=(("chunk_size", 32),), wrt=NONE, tested=HOPPER),
        Call("chunk_rwkv7", K=64, V=64, options=(("chunk_size", 32),), heads=1, wrt=NONE),
        Call("chunk_iplr_delta_rule", K=64, V=64, options=(("chunk_size", 32),)),
        Call("chunk_iplr_delta_rule", options=(("chunk_size", 32),)),
        Call("chunk_delta_rule", options=(("chunk_size", 64),), heads=128, tested=HOPPER),
        Call("chunk_gated_delta_rule", options=(("chunk_size", 64),), wrt=("initial_state",)),
        Call("chunk_kda", options=STATES, packed=True, heads=128),
        Call("chunk_kda", options=STATES, packed=True, wrt=("initial_state",)),
        Call("chunk_delta_rule", K=64, V=64, options=(("chunk_size", 64),), wrt=("initial_state",)),
        Call("chunk_kda", K=64, V=64, options=(("chunk_size", 64),), wrt=("initial_state",)),
        Call("chunk_delta_rule", options=(("chunk_size", 64),), heads=1),
        Call("chunk_gated_delta_rule, gate inside", options=GPU_CHUNKS, packed=True, heads=1, tested=HOPPER),
        Call(
            "chunk_gated_delta_rule",
            options=(("chunk_size", 64), ("use_qk_l2norm_in_kernel", True)),
            heads=1,
        ),
        Call("chunk_kda", options=(("chunk_size", 64),), heads=1),
        Call("chunk_kda", options=(("chunk_size", 64),), heads=128, wrt=("initial_state",)),
        Call(
            "chunk_kda, gate inside",
            options=(("chunk_size", 64), ("use_qk_l2norm_in_kernel", True)),
            packed=True,
            heads=1,
            tested=HOPPER,
        ),
        Call(
            "chunk_kda, gate inside",
            options=(("chunk_size", 64), ("use_qk_l2norm_in_kernel", True)),
            heads=1,
            projected=True,
        ),
        Call(
            "chunk_gated_delta_rule, gate inside",
            K=256,
            V=512,
            options=(("chunk_size", 64), ("use_qk_l2norm_in_kernel", True)),
            packed=True,
            heads=1,
            tested=HOPPER,
        ),
        *(
            Call(f"chunk_{name}", K=K, V=V, options=GPU_CHUNKS, heads=1)
            for name in ("delta_rule", "gated_delta_rule")
            for K, V in ((64, 64), (256, 256), (256, 512))
        ),
        *(
            Call(f"chunk_{name}", V=V, options=GPU_CHUNKS, heads=12)
            for name in ("delta_rule", "gated_delta_rule")
            for V in (192, 256)
        ),
        Call("chunk_gated_delta_rule", V=256, options=GPU_CHUNKS, heads=128, wrt=("initial_state",)),
        Call("chunk_gla", V=256, options=GPU_CHUNKS, heads=1, scalar=True),
        Call("chunk_gated_delta_rule", K=32, V=32, options=GPU_CHUNKS, wrt=("initial_state",)),
        Call("chunk_gated_delta_rule", "float16", 256, 256, wrt=("initial_state",)),
        Call("chunk_gated_delta_rule", "float32", 256, 256, wrt=("initial_state",)),
        Call("chunk_gated_delta_rule", options=GPU_CHUNKS, wrt=("initial_state",), misaligned=True),
        ServingCall("prefill", gate="scalar", heads=1, wide=True),
        ServingCall("prefill", gate="channel", heads=128, wide=True),
        Call("chunk_ttt_linear", "float32", options=(("chunk_size", 16),)),
        Call(
            "chunk_gated_delta_rule",
            options=GPU_CHUNKS,
            heads=32,
            wrt=("initial_state",),
            segments=4,
            tested=HOPPER,
        ),
        Call("chunk_kda", options=GPU_CHUNKS, heads=32, wrt=("initial_state",), segments=4),
        Call("chunk_gla", options=GPU_CHUNKS, heads=32, wrt=("initial_state",), segments=4),
        Call("chunk_gla", options=GPU_CHUNKS, heads=1, scalar=True),
        Call("chunk_gla", options=GPU_CHUNKS, heads=128),
        Call("chunk_gla", K=256, V=512, heads=1),
        Call("chunk_gated_delta_rule", K=256, V=256, options=(("chunk_size", 32),), wrt=("initial_state",)),
        Call("chunk_gated_delta_rule", V=64, options=GPU_CHUNKS, wrt=("initial_state",), segments=4),
        *(Call(f"fused_recurrent_{name}", options=(("state_v_first", True),)) for name in ("gated_delta_rule", "kda")),
        *(ServingCall("decode", "bfloat16", gate=gate) for gate in ("", "scalar", "channel")),
        ServingCall("prefill", gate="scalar", heads=1),
        ServingCall("prefill", "bfloat16", gate="scalar", heads=128),
        ServingCall("prefill", "bfloat16", gate="channel", heads=128),
        ServingCall("prefill", gate="scalar", heads=2, segments=4),
        ServingCall("prefill", gate="channel", heads=2, segments=4),
        ServingCall("decode", "bfloat16", gate="scalar", v_first=False),
        ServingCall("decode", "bfloat16", gate="channel", v_first=False, tested=HOPPER),
    ),
    "sm_100": (
        Call("chunk_delta_rule", "float32", options=GPU_CHUNKS),
        Call("chunk_gated_delta_rule", K=256, V=256, options=GPU_CHUNKS, wrt=("initial_state",)),
    ),
    "sm_120": tuple(
        Call("chunk_gated_delta_rule", dtype, 256, 256, options=GPU_CHUNKS, wrt=("initial_state",))
        for dtype in ("bfloat16", "float16")
    ),
}
"""Architecture -> calls for rows that only it has, and for kernels that must fit there."""

EXTENDED = (
    Call("chunk_gated_delta_rule"),
    Call("chunk_gated_delta_rule", "float32", 64, 64),
    Call("chunk_gated_delta_rule", "float16", options=GPU_CHUNKS),
    *(Call("chunk_gated_delta_rule", dtype, 256, 256, options=GPU_CHUNKS) for dtype in ("bfloat16", "float16")),
    Call("chunk_gated_delta_rule", K=256, V=256),
    Call("chunk_gated_delta_rule", "float16"),
    Call("chunk_gated_delta_rule", K=64, V=64),
    Call("chunk_kda"),
    Call("chunk_kda", K=256, V=256),
    Call("chunk_kda", options=(("chunk_size", 64),), heads=128),
    Call("chunk_gated_delta_rule", "float32"),
    *(Call("chunk_gated_delta_rule", dtype, 256, 256) for dtype in ("float16", "float32")),
    Call("chunk_kda", "float32"),
    Call("chunk_kda", "float32", 256, 256),
    Call("chunk_kda", K=64, V=64),
    *(
        Call("chunk_gated_delta_rule", dtype, options=(("chunk_size", 64),), segments=4)
        for dtype in ("bfloat16", "float16", "float32")
    ),
    Call("chunk_kda", K=64, V=64, segments=8),
    Call("chunk_kda", "float32", segments=8),
    Call("chunk_scaled_dot_kkt", "float32"),
    Call("chunk_ttt_linear", K=64, V=64, options=(("chunk_size", 16), ("eta_col", 0.5), ("residual", "q"))),
    *(Call(name, "float32") for name in ("causal_conv1d", "l2norm", "rms_norm_gated", "fused_kda_gate")),
)
"""Calls that `make compile` compiles in addition: other widths and dtypes on the same rows."""


SERVING_CALLS = (
    ServingCall("prefill", "bfloat16"),
    ServingCall("prefill", "bfloat16", between=True, tested=HOPPER),
    ServingCall("conv1d_update", "bfloat16", tested=HOPPER),
    ServingCall("ttt_decode"),
    ServingCall("ttt_decode", "bfloat16", tested=HOPPER),
)
"""Calls for kernels that the differentiable operators do not use."""


RANK_CALLS = RankCall(tested=HOPPER), RankCall("float32", 24, 40)


def calls(architecture: str) -> tuple[Call | ServingCall | RankCall, ...]:
    """Calls that are compiled for one architecture."""
    more = PER_ARCHITECTURE.get(kernel_configs.borrowed_from(architecture), ())
    return *CALLS, *SERVING_CALLS, *RANK_CALLS, *more


def pretend_rocm() -> None:
    """Make this process that of PyTorch for ROCm, before a device function is imported."""
    assert "wyfold.tile.index.triton" not in sys.modules, "device functions have been imported for NVIDIA"
    torch.version.hip = "6.4"


def compile_call(task: tuple[str, Call | ServingCall | RankCall]) -> list[Usage] | str:
    """Resources of a call's kernels on an architecture, or the reason why they did not compile."""
    architecture, call = task
    try:
        return compiled(call, architecture)
    except Exception as error:  # the compiler's passes, its front end and the assembler each raise their own
        traceback.print_exc()
        return f"does not compile: {type(error).__name__}: {error}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-a", "--architecture", action="append", choices=SHARED)
    parser.add_argument("-c", "--call", default="", help="only calls whose name contains this")
    parser.add_argument("--allow", action="store_true", help="record the spills that were found as allowed")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="processes (default: %(default)s)")
    args = parser.parse_args()
    wrong, allowed = [], allowances()
    minor = ".".join(triton_support.triton_version().split(".")[:2])
    tasks = [
        (architecture, call)
        for architecture in args.architecture or SHARED
        for call in (*calls(architecture), *EXTENDED)
        if args.call in str(call)
    ]
    for amd, prepare in ((False, None), (True, pretend_rocm)):
        chosen = [task for task in tasks if task[0].startswith(AMD) is amd]
        with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn"), initializer=prepare) as workers:
            made = workers.map(compile_call, chosen)
            for (architecture, call), found in zip(chosen, made, strict=True):
                wrong += report(architecture, call, found)
                if args.allow and not amd and not isinstance(found, str):
                    record(allowed.setdefault(minor, {}).setdefault(architecture, {}), call, found)
    if args.allow:
        ALLOWANCES.write_text(json.dumps(allowed, indent=1, sort_keys=True) + "\n")
    print(*wrong, f"{len(wrong)} failed or over what is allowed", sep="\n")
    return 1 if wrong else 0


def report(architecture: str, call: Call | ServingCall | RankCall, found: list[Usage] | str) -> list[str]:
    """Print a line for each kernel of a call, and return what is wrong with them."""
    if isinstance(found, str):
        print(f"{architecture:7} {call!s:60} does not compile", flush=True)
        return [f"{architecture} {call}: {found}"]
    for u in found:
        marks = f"{u.registers:4d} registers {u.shared:7d} shared {u.spilled:6d} spilled"
        print(f"{architecture:7} {call!s:60} {u.kernel:32} {marks}{'  serialized' * u.serialized}", flush=True)
    return [f"{architecture} {call}: {text}" for text in violations(call, architecture, found)]


def record(allowed: dict[str, int], call: Call | ServingCall | RankCall, kernels: list[Usage]) -> None:
    """Record the spills of a call as allowed: the worst launch of each kernel, plus 25 %, in steps of 64 bytes."""
    for u in kernels:
        for name in (f"{call}: {u.kernel}", f"{call}: {u.kernel}: serialized"):
            allowed.pop(name, None)
    for u in kernels:
        if u.spilled:
            name = f"{call}: {u.kernel}"
            allowed[name] = max(allowed.get(name, 0), math.ceil(u.spilled * 1.25 / 64) * 64)
        if u.serialized:
            allowed[f"{call}: {u.kernel}: serialized"] = 1


if __name__ == "__main__":
    sys.exit(main())
