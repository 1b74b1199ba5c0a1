"""Compiles what a launch would compile, for GPUs that are not there, and reads what it takes of them.

`compiled(call, architecture)` makes a public operator's call on small CPU tensors, forward and backward, with every
launch of a kernel stopped after its compilation. So what is compiled is what a card of that architecture would run:
the row of its configurations, the arguments of the real launch and what Triton makes of their values.

    python -m tests.compile.aot                            every call for every architecture, as a table
    python -m tests.compile.aot -a sm_90 -c float32        some of them
    python -m tests.compile.aot --allow                    records in allowances.json what they spill
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
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
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

if importlib.util.find_spec("triton") is not None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    RUN = JITFunction.run

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / ".cache" / "triton"
ALLOWANCES = HERE / "allowances.json"

RECORDED = "3.6"
"""The Triton whose spills are allowed to one that has none recorded for an architecture."""

UNNAMED = '"cuda:any"'
"""Stands for an architecture's name in what is kept for all of them."""

OPTIONS_OF_THE_LANGUAGE = (
    "allowed_dot_input_precisions",
    "debug",
    "default_dot_input_precision",
    "sanitize_overflow",
)
"""What Triton's front end reads of the options, float8 aside: the same for every architecture and row."""

TARGET = re.compile(r"^\.target (\w+)", re.MULTILINE)
"""The line of PTX that names an architecture."""

KIB = 1024
SHARED = {
    "sm_80": 163 * KIB,
    "sm_86": 99 * KIB,
    "sm_89": 99 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_120": 99 * KIB,
}
"""Bytes of shared memory that one block may ask for."""

SAME_CODE = {"sm_89": "sm_80"}
"""Architecture -> the one whose PTX is its own but for the target's name; registers are given out by the assembler."""


@dataclass(frozen=True)
class Call:
    """One call of an operator: what a user would ask for, small.

    Attributes:
        subject: Of `wyfold.cli.operators`: the operator, and the way to use it.
        dtype: Of the inputs, by torch's name.
        K, V: Widths.
        options: Keywords beside the drawn arguments.
        packed: Whether boundaries are given.
        heads: Value heads; with two of them programs are few.
        wrt: Arguments whose gradients are wanted; empty for all of them.
        segments: That the sequence is cut into.
        askew: Whether tokens lie where no box of the copy engine begins.
        scalar: Whether a gate over channels is left with the first of them.
        projected: Whether the gate is of the inputs' dtype, as a projection leaves it that is activated inside.
        only: Kernels, as tables name them, that `make test` compiles of it; empty for all. The rest other calls have.
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
    askew: bool = False
    scalar: bool = False
    projected: bool = False
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = [self.subject, self.dtype, f"K{self.K}", f"V{self.V}"]
        words += [f"{name}={value}" for name, value in self.options] + (["packed"] if self.packed else [])
        words += [f"HV{self.heads}"] if self.heads != 2 else []
        words += [f"d{name}" for name in self.wrt]
        words += [f"in {self.segments} segments"] if self.segments != 1 else []
        words += ["askew"] if self.askew else []
        words += ["scalar"] if self.scalar else []
        words += ["projected"] if self.projected else []
        return " ".join(words)

    def arguments(self) -> dict[str, Any]:
        """What the operator is given, on the CPU."""
        subject = OPERATOR_SPECS[self.subject]
        T = 64 * self.segments
        arguments = subject.arguments(Shape(1, T, 1, self.heads, self.K, self.V), getattr(torch, self.dtype), 0)
        if self.packed:
            arguments["cu_seqlens"] = torch.tensor([0, T])
        arguments |= self.moved(arguments)
        if self.scalar:
            arguments["g"] = arguments["g"][..., 0].contiguous()
        if self.projected:
            arguments["g"] = arguments["g"].to(arguments["q"].dtype)
        for name, x in arguments.items():
            if subject.backward and isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_(not self.wrt or name in self.wrt)
        return {**arguments, **dict(self.options), "backend": "triton"}

    def moved(self, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
        """The tokens, one element behind an address that is a multiple of 16, if they are to be askew."""
        tokens = {name: arguments[name] for name in ("q", "k", "v")} if self.askew else {}
        return {name: x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x) for name, x in tokens.items()}

    def run(self) -> None:
        """Forward, and backward where there is one."""
        subject = OPERATOR_SPECS[self.subject]
        with self.cut():
            outputs = subject.ours(self.arguments())
        if subject.backward:
            torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])

    def cut(self) -> contextlib.AbstractContextManager[None]:
        """Within, the sequence is cut."""
        return contextlib.nullcontext() if self.segments == 1 else segment_rule.forced(self.segments)


@dataclass(frozen=True)
class Served:
    """One call of a serving operator, over a pool of two slots.

    Attributes:
        operator: Its name.
        stored: Dtype of the pool.
        between: Whether boundaries are given, and states on the way stored in a pool of their own.
        gate: Kind of the gate of a call whose heads have 128 channels; empty: neither is.
        heads: Of bfloat16 tokens in chunks of 64, as a card picks them, some sequences starting from zeros and all left
            elsewhere; 0: one head of float32 tokens.
        v_first: Whether the states of a call with a gate are.
        wide: Whether the output is float32 beside tokens of 16 bits.
        only: As of a `Call`.
    """

    operator: str
    stored: str = "float32"
    between: bool = False
    gate: str = ""
    heads: int = 0
    v_first: bool = True
    wide: bool = False
    only: tuple[str, ...] = ()

    def __str__(self) -> str:
        wide = f", a {self.gate} gate, 128 channels, {'V' if self.v_first else 'K'}-first" if self.gate else ""
        wide += f", bfloat16 tokens, {self.heads} heads" if self.heads else ""
        wide += ", float32 output" if self.wide else ""
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
            T, more = 64, {"has_initial_state": torch.ones(1, dtype=torch.bool), "output_state_indices": slots - 1}
        if self.between:
            T, more = 64, {"cu_seqlens": torch.tensor([0, 64]), "checkpoint_every": 64}
            more |= {"checkpoint_pool": torch.zeros_like(pool), "checkpoint_indices": torch.tensor([1])}
        g = {"": None, "scalar": torch.zeros(1, T, H), "channel": torch.zeros(1, T, H, D)}[self.gate]
        q, k, v = (torch.randn(1, T, H, D, dtype=torch.bfloat16 if self.heads else None) for _ in range(3))
        more |= {"state_v_first": bool(self.gate) and self.v_first, "backend": "triton"}
        if self.wide:
            more |= {"out": torch.empty(v.shape)}
        with mock.patch.object(serving_call, "best_chunk_size", lambda *_, **__: 64 if self.heads else 16):
            getattr(serving, self.operator)(q, k, v, g, torch.rand(1, T, H), pool, slots, **more)


@dataclass(frozen=True)
class Share:
    """A call of the second of three ranks: its tokens come from another one and go on at one, behind a full chunk.

    Attributes:
        dtype: Of the inputs, by torch's name.
        K, V: Widths.
        only: As of a `Call`, and of `make compile` as well.
    """

    dtype: str = "bfloat16"
    K: int = 128
    V: int = 128
    only: tuple[str, ...] = ("rank_carry.triton",)

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
    """What a compiled kernel takes.

    Attributes:
        kernel: Name.
        shared: Bytes of shared memory of a block.
        registers: Of a thread.
        spilled: Bytes stored to and loaded from memory because registers ran out, counted in the code once each.
        tensor_memory: Columns, on architectures that have such a memory.
        serialized: Whether asynchronous matrix products wait for each other because registers ran out.
        reused: What may lie where a barrier was (docs/facts/hopper.md, KDA-NAN-1).
    """

    kernel: str
    shared: int
    registers: int
    spilled: int
    tensor_memory: int
    serialized: bool
    reused: list[str]


class PretendDriver:
    """Answers what a launch asks of a GPU's driver before it compiles; has no device."""

    def __init__(self, architecture: str):
        from triton.backends.compiler import GPUTarget

        self.number = int(architecture.removeprefix("sm_"))
        self.target = GPUTarget("cuda", self.number, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.number  # kernels are kept by device: one for each architecture

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)


@contextlib.contextmanager
def pretending(architecture: str, launched: Callable[..., None], code_of: str = "") -> Iterator[None]:
    """Kernels serve CPU tensors, as on this architecture; `launched(kernel, *arguments)` in place of a launch.

    Calls and configurations are this architecture's; what is compiled, is compiled for `code_of` where one is named.
    """

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched(self, *arguments, grid=grid, **options)

    with (
        mock.patch.object(driver, "_active", PretendDriver(code_of or architecture)),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(triton_support, "architecture", lambda device: architecture),
        mock.patch.object(table, "_device_refusal", lambda device, demand: ""),
    ):
        yield


def named(kernel: Any) -> str:
    """A kernel as tables name it: its stage and its language."""
    return ".".join(kernel.fn.__module__.split(".")[2:4])


def wanted(call: Call | Served | Share, kernel: str) -> bool:
    """Whether `make test` compiles this kernel of a call."""
    return not call.only or kernel in call.only


def compiled(call: Call | Served | Share, architecture: str, code_of: str = "", *, whole: bool = False) -> list[Usage]:
    """A call's kernels, or `only` some unless it is wanted whole; of `code_of`, assembled for this architecture."""
    found: list[Usage] = []

    everything = whole and not isinstance(call, Share)

    def launched(kernel: Any, *arguments: Any, **options: Any) -> None:
        if not everything and not wanted(call, named(kernel)):
            return
        ready, log = code(kernel, *arguments, **options)
        found.append(usage(ready, log) if code_of in ("", architecture) else usage(ready, "", architecture))

    with pretending(architecture, launched, code_of):
        call.run()
    return found


def compile_one(kernel: Any, *arguments: Any, **options: Any) -> Usage:
    """What a launch with these arguments compiles; inside `pretending`."""
    return usage(*code(kernel, *arguments, **options))


def code(kernel: Any, *arguments: Any, **options: Any) -> tuple[Any, str]:
    """The kernel that Triton makes of a launch, and the assembler's log; inside `pretending`."""
    from triton import knobs

    log = io.StringIO()
    with (
        knobs.cache.scope(),
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(log),
        read_once(),
        accesses_laid_out_once(),
    ):
        knobs.cache.dir, knobs.nvidia.dump_ptxas_log = str(CACHE), True
        ready = RUN(kernel, *arguments, warmup=True, **options)
    return ready, log.getvalue()


def keeps_modules() -> bool:
    """Whether this Triton's passes are those that `read_once` and `accesses_laid_out_once` were written for."""
    return triton_support.triton_version().startswith(f"{RECORDED}.")


def module_kept(kind: str, source: str, make: Callable[[], Any], context: Any, name: str = UNNAMED) -> Any:
    """The module that `make` leaves of `source`: made once, and read in place of that from then on.

    `name` is the architecture's, in what is made and in what is returned.
    """
    from triton._C.libtriton import ir

    kept = CACHE / f"{hashlib.sha256(f'{triton_support.triton_version()} {source}'.encode()).hexdigest()}.{kind}"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        unfinished.write_text(str(make()).replace(name, UNNAMED))
        unfinished.rename(kept)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as named:
        named.write(kept.read_text().replace(UNNAMED, name))
        named.flush()
        module = ir.parse_mlir_module(named.name, context)
    module.context = context
    return module


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Triton's front end: what it makes of a kernel's source, kept for all architectures.

    It is shown no architecture, neither by name nor in an option, and fails where it asks for one. Gluon's is left
    alone: layouts are checked there, for the one architecture that has such kernels.
    """
    from triton.compiler.compiler import ASTSource

    if not keeps_modules():
        yield
        return
    usual = ASTSource.make_ir

    def make_ir(self: Any, target: Any, options: Any, functions: dict[str, Any], modules: Any, context: Any) -> Any:
        shown = {name: getattr(options, name) for name in OPTIONS_OF_THE_LANGUAGE}
        least = {"min_dot_size": functions["min_dot_size"]}

        def make() -> Any:
            with mock.patch.object(driver, "_active", object()):
                return usual(self, None, SimpleNamespace(**shown), least, modules, context)

        return module_kept("read", f"{self.hash()} {shown}", make, context)

    with mock.patch.object(ASTSource, "make_ir", make_ir):
        yield


@contextlib.contextmanager
def accesses_laid_out_once() -> Iterator[None]:
    """Triton's first two passes over tiles: made of a kernel for one architecture, and kept for the others.

    All they know of an architecture is its name. The second walks the whole kernel for every access to memory (TRITON-4
    in docs/facts/compilers.md), longer than everything after it where there are many. Of a Triton whose passes nobody
    has looked at nothing is kept.
    """
    from triton._C.libtriton import ir, passes
    from triton.backends.nvidia.compiler import CUDABackend

    if not keeps_modules():
        yield
        return
    usual, convert, lay_out = CUDABackend.make_ttgir, passes.ttir.add_convert_to_ttgpuir, passes.ttgpuir.add_coalesce

    def make_ttgir(module: Any, metadata: dict[str, Any], options: Any, capability: int) -> Any:
        name, context = f'"cuda:{capability}"', module.context

        def make() -> Any:
            manager = ir.pass_manager(context)
            convert(manager, name.strip('"'), options.num_warps, 32, options.num_ctas)
            lay_out(manager)
            manager.run(module, "accesses_laid_out_once")
            return module

        source = f"{options.num_warps} {options.num_ctas} {module}"
        module = module_kept("laid_out", source, make, context, name)
        with (
            mock.patch.object(passes.ttir, "add_convert_to_ttgpuir", lambda *_: None),
            mock.patch.object(passes.ttgpuir, "add_coalesce", lambda *_: None),
        ):
            return usual(module, metadata, options, capability)

    with mock.patch.object(CUDABackend, "make_ttgir", staticmethod(make_ttgir)):
        yield


def rows_of(call: Call | Served | Share, architecture: str) -> set[tuple[str, str]]:
    """(kernel, row) of every configuration that a call takes; nothing is compiled."""
    found, usual = set(), kernel_configs.row

    def row(architecture: str, kernel: str, key: str) -> str:
        name = usual(architecture, kernel, key)
        found.add((kernel, name))
        return name

    with mock.patch.object(kernel_configs, "row", row), pretending(architecture, lambda *_, **__: None):
        call.run()
    return found


def rows_explained(call: Call, architecture: str) -> set[tuple[str, str]]:
    """The same from the plan of a call that is not made."""
    with pretending(architecture, lambda *_, **__: None), call.cut():
        plan = wyfold.explain(getattr(wyfold, OPERATOR_SPECS[call.subject].operator), **call.arguments())
    return {
        (f"{stage}.{table.selected_backend(stage, plan.backend, key, torch.device('cpu'))}", row)
        for stage, key, row in plan.rows
    }


def usage(kernel: Any, log: str, architecture: str = "") -> Usage:
    """Of a compiled kernel; read once, from the assembler's log, and kept beside the compiler's own cache."""
    kept = CACHE / f"{kernel.hash}{architecture}.use.json"
    if not kept.exists():
        log = log if "spill stores" in log else assembled(kernel, architecture)
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


def assembled(kernel: Any, architecture: str = "") -> str:
    """The assembler's log of a kernel that was compiled before, for its own target or another one."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source, ptx = Path(folder, "kernel.ptx"), kernel.asm["ptx"]
        if architecture:
            ptx = TARGET.sub(f".target {architecture}", ptx)
        source.write_text(ptx)
        gpu = TARGET.search(ptx)[1]
        command = [get_ptxas(kernel.metadata.target.arch).path, "-v", f"--gpu-name={gpu}", source]
        done = subprocess.run([*command, "-o", Path(folder, "kernel")], capture_output=True, text=True, check=True)
        return done.stderr


@functools.cache
def allowances() -> dict[str, dict[str, dict[str, int]]]:
    """Triton's minor version -> architecture -> "call: kernel" -> bytes it may spill; "...: serialized" -> 1."""
    return json.loads(ALLOWANCES.read_text()) if ALLOWANCES.exists() else {}


def complaints(call: Call | Served | Share, architecture: str, found: list[Usage]) -> list[str]:
    """What is wrong with a call's kernels; empty if they fit."""
    recorded = allowances()
    minor = ".".join(triton_support.triton_version().split(".")[:2])
    allowed = recorded.get(minor, {}).get(architecture) or recorded.get(RECORDED, {}).get(architecture, {})
    wrong = []
    for u in found:
        if u.shared > SHARED[architecture]:
            wrong.append(f"{u.kernel}: {u.shared} bytes of shared memory, {SHARED[architecture]} are there")
        if u.spilled > allowed.get(f"{call}: {u.kernel}", 0):
            wrong.append(f"{u.kernel}: spills {u.spilled} bytes, {allowed.get(f'{call}: {u.kernel}', 0)} are allowed")
        if u.serialized and not allowed.get(f"{call}: {u.kernel}: serialized"):
            wrong.append(f"{u.kernel}: its matrix products are serialized")
        wrong += [f"{u.kernel}: where a barrier was may lie {taken}" for taken in u.reused]
        if u.tensor_memory > 512:
            wrong.append(f"{u.kernel}: {u.tensor_memory} columns of tensor memory, 512 are there")
    return wrong


CARD = (("chunk_size", 64),)
"""What a card picks for the gates that all channels share; these tensors are on the CPU, which picks fewer rows."""

SCANS = ("scan.triton", "scan_bwd.triton")
SEGMENTS = ("segment_summary.triton", "segment_fold.triton")
"""What a call has of its own: if its widths or its rows' places are unusual; if its sequence is cut."""

CALLS = (
    Call("chunk_gated_delta_rule, gate inside", options=(("chunk_size", 64),), packed=True, heads=128),
    Call("chunk_kda, gate inside", packed=True),
    # Without what goes through K in slices: at 256 there are more of them (WIDE has the whole call).
    Call("chunk_kda", K=256, V=256, wrt=("initial_state",), only=SCANS),
    Call("chunk_delta_rule", K=24, V=40, options=(("chunk_size", 32),)),
    Call("chunk_gated_delta_rule", "float16", 64, 64),
    Call("chunk_gated_delta_rule", "float32", options=CARD),
    Call("chunk_kda, bounded gate", "float16", 64, 64, options=(("chunk_size", 16),)),
    Call("chunk_kda", "float32", 64, 64),
    # With the gate inside as in the second call, whose `prepare` it has: made once.
    Call("chunk_kda, gate inside", packed=True, wrt=("initial_state",), segments=8),
    Call("chunk_gated_delta_rule", "float32", 64, 64, wrt=("initial_state",), segments=4, only=SEGMENTS),
    *(
        Call("chunk_ttt_linear", dtype, D, D, options=(("chunk_size", C),), packed=packed)
        for dtype, D, C, packed in (
            ("bfloat16", 64, 16, False),
            ("bfloat16", 64, 64, False),
            ("bfloat16", 128, 16, True),
            ("float32", 64, 16, False),
            ("float16", 128, 16, False),
        )
    ),
    Call("fused_recurrent_kda", packed=True),
    Call(
        "fused_recurrent_gated_delta_rule",
        "float32",
        256,
        256,
        options=(("state_v_first", True), ("initial_state", None)),
    ),
    *(Call("solve_tril", dtype) for dtype in ("bfloat16", "float32")),
    *(Call("chunk_scaled_dot_kkt", options=(("chunk_size", C),)) for C in (16, 32, 64)),
    *(
        Call("chunk_scaled_dot_kkt", dtype, options=(("chunk_size", C), *gate), scalar=not gate)
        for gate in ((("g", None),), ())
        for dtype in ("bfloat16", "float32")
        for C in (16, 32, 64)
    ),
    *(
        Call(name)
        for name in (
            "causal_conv1d",
            "l2norm",
            "rms_norm_gated",
            "fused_gdn_gate",
            "fused_kda_gate",
            "fused_beta_sigmoid",
        )
    ),
)
"""What `make test` compiles for each architecture: every row of its table, every kind of gate and dtype.

Of a call whose other kernels take rows that another call has too, only its own; `make compile` compiles it whole.
"""

STATES = (("chunk_size", 64), ("state_v_first", True), ("return_intermediate_states", True))
"""With states on the way, which cost shared memory beside that of the tokens in flight."""

OWN: dict[str, tuple[Call | Served | Share, ...]] = {
    "sm_90": (
        Call("chunk_kda, gate inside", options=(("chunk_size", 64),), packed=True),
        Call("chunk_delta_rule", options=(("chunk_size", 64),), heads=128, only=("scan.gluon",)),
        Call("chunk_gated_delta_rule", options=(("chunk_size", 64),), wrt=("initial_state",)),
        Call("chunk_kda", options=STATES, packed=True, heads=128, only=("scan.triton",)),
        Call("chunk_kda", options=STATES, packed=True, wrt=("initial_state",), only=("scan.triton",)),
        Call("chunk_delta_rule", K=64, V=64, options=(("chunk_size", 64),), wrt=("initial_state",)),
        Call("chunk_kda", K=64, V=64, options=(("chunk_size", 64),), wrt=("initial_state",)),
        Call("chunk_delta_rule", options=(("chunk_size", 64),), heads=1),
        Call(
            "chunk_gated_delta_rule, gate inside",
            options=(("chunk_size", 64),),
            packed=True,
            heads=1,
            only=("scan.gluon", "gradients.gluon"),
        ),
        Call(
            "chunk_gated_delta_rule",
            options=(("chunk_size", 64), ("use_qk_l2norm_in_kernel", True)),
            heads=1,
            only=("prepare.gluon",),
        ),
        Call("chunk_kda", options=(("chunk_size", 64),), heads=1),
        Call("chunk_kda", options=(("chunk_size", 64),), heads=128, wrt=("initial_state",), only=("scan.gluon",)),
        Call(
            "chunk_kda, gate inside",
            options=(("chunk_size", 64), ("use_qk_l2norm_in_kernel", True)),
            packed=True,
            heads=1,
            only=("prepare.gluon", "gradients.gluon"),
        ),
        Call(
            "chunk_kda, gate inside",
            options=(("chunk_size", 64), ("use_qk_l2norm_in_kernel", True)),
            heads=1,
            projected=True,
            only=("gradients.gluon",),
        ),
        Call("chunk_gated_delta_rule", "float16", 256, 256, wrt=("initial_state",), only=SCANS),
        Call("chunk_gated_delta_rule", "float32", 256, 256, wrt=("initial_state",)),
        Call(
            "chunk_gated_delta_rule",
            options=(("chunk_size", 64),),
            wrt=("initial_state",),
            askew=True,
            only=("scan.gluon", "scan_bwd.gluon"),
        ),
        Served("prefill", gate="scalar", heads=1, wide=True, only=("scan.triton",)),
        Served("prefill", gate="channel", heads=128, wide=True, only=("scan.triton",)),
        Call("chunk_ttt_linear", "float32", options=(("chunk_size", 16),)),
        Call(
            "chunk_gated_delta_rule",
            options=(("chunk_size", 64),),
            heads=32,
            wrt=("initial_state",),
            segments=4,
            only=("segment_summary.gluon", "segment_fold.triton", "scan.gluon", "scan_bwd.gluon"),
        ),
        Call(
            "chunk_kda",
            options=(("chunk_size", 64),),
            heads=32,
            wrt=("initial_state",),
            segments=4,
            only=("segment_summary.gluon",),
        ),
        Call(
            "chunk_gated_delta_rule",
            V=64,
            options=(("chunk_size", 64),),
            wrt=("initial_state",),
            segments=4,
            only=("segment_summary.triton",),
        ),
        *(Call(f"fused_recurrent_{name}", options=(("state_v_first", True),)) for name in ("gated_delta_rule", "kda")),
        *(Served("decode", "bfloat16", gate=gate) for gate in ("", "scalar", "channel")),
        Served("prefill", gate="scalar", heads=1),
        Served("prefill", "bfloat16", gate="scalar", heads=128, only=("scan.gluon",)),
        Served("prefill", "bfloat16", gate="channel", heads=128),
        *(Served("decode", "bfloat16", gate=gate, v_first=False) for gate in ("scalar", "channel")),
    ),
    "sm_100": (
        Call("chunk_delta_rule", "float32", options=CARD),
        Call("chunk_gated_delta_rule", K=256, V=256, options=CARD, wrt=("initial_state",), only=SCANS),
    ),
    "sm_120": tuple(
        Call("chunk_gated_delta_rule", dtype, 256, 256, options=CARD, wrt=("initial_state",), only=SCANS)
        for dtype in ("bfloat16", "float16")
    ),
}
"""For rows that only one architecture has, and for what has to fit there."""

WIDE = (
    Call("chunk_gated_delta_rule"),
    Call("chunk_gated_delta_rule", "float32", 64, 64),
    Call("chunk_gated_delta_rule", "float16", options=CARD),
    *(Call("chunk_gated_delta_rule", dtype, 256, 256, options=CARD) for dtype in ("bfloat16", "float16")),
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
"""What `make compile` compiles beside it: widths and dtypes that take the same rows."""


SERVED = (
    Served("prefill", "bfloat16", only=("scan.triton",)),
    Served("prefill", "bfloat16", between=True),
    Served("conv1d_update", "bfloat16"),
    Served("ttt_decode"),
    Served("ttt_decode", "bfloat16"),
)
"""For kernels that the differentiable operators have no use for."""


SHARES = Share(), Share("float32", 24, 40)


def calls(architecture: str) -> tuple[Call | Served | Share, ...]:
    """What is compiled for one architecture."""
    return *CALLS, *SERVED, *SHARES, *OWN.get(architecture, ())


def looked_at(architecture: str, word: str, wide: bool) -> list[tuple[Call | Served | Share, list[Usage]]]:
    """Every call whose name holds the word, with its kernels, for one architecture."""
    found = [call for call in (*calls(architecture), *(WIDE if wide else ())) if word in str(call)]
    return [(call, compiled(call, architecture, whole=wide)) for call in found]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-a", "--architecture", action="append", choices=SHARED)
    parser.add_argument("-c", "--call", default="", help="only calls whose name holds this")
    parser.add_argument("--narrow", action="store_true", help="only what `make test` compiles")
    parser.add_argument("--allow", action="store_true", help="record the spills that were found as allowed")
    args = parser.parse_args()
    architectures, wrong, allowed = args.architecture or list(SHARED), [], allowances()
    minor = ".".join(triton_support.triton_version().split(".")[:2])
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as workers:
        for architecture, found in zip(
            architectures, workers.map(partial(looked_at, word=args.call, wide=not args.narrow), architectures)
        ):
            for call, kernels in found:
                for u in kernels:
                    marks = f"{u.registers:4d} registers {u.shared:7d} shared {u.spilled:6d} spilled"
                    print(f"{architecture:7} {call!s:60} {u.kernel:32} {marks}{'  serialized' * u.serialized}")
                if args.allow:
                    record(allowed.setdefault(minor, {}).setdefault(architecture, {}), call, kernels)
                wrong += [f"{architecture} {call}: {text}" for text in complaints(call, architecture, kernels)]
    if args.allow:
        ALLOWANCES.write_text(json.dumps(allowed, indent=1, sort_keys=True) + "\n")
    print(*wrong, f"{len(wrong)} over what is allowed", sep="\n")
    return 1 if wrong else 0


def record(allowed: dict[str, int], call: Call | Served | Share, kernels: list[Usage]) -> None:
    """A call's spills as what it may spill: the worst of a kernel's launches, a quarter more, in steps of 64 bytes."""
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
