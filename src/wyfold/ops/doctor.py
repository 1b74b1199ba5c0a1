"""Report on the machine, its software, and the backend of every operator."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import formatdate  # of a file; reads no clock
from pathlib import Path
from typing import Any

import torch

from wyfold.kernels import table
from wyfold.kernels.self_check import remembered_here
from wyfold.ops.comba import chunk_comba, fused_recurrent_comba
from wyfold.ops.conv import causal_conv1d
from wyfold.ops.delta_product import chunk_gated_delta_product, fused_recurrent_gated_delta_product
from wyfold.ops.delta_rule import chunk_delta_rule, fused_recurrent_delta_rule
from wyfold.ops.dplr import (
    chunk_dplr_delta_rule,
    chunk_iplr_delta_rule,
    fused_recurrent_dplr_delta_rule,
    fused_recurrent_iplr_delta_rule,
)
from wyfold.ops.explain import explain
from wyfold.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from wyfold.ops.gates import fused_beta_sigmoid, fused_gdn_gate, fused_kda_gate
from wyfold.ops.gdn2 import chunk_gdn2, fused_recurrent_gdn2
from wyfold.ops.gla import chunk_gla, fused_recurrent_gla
from wyfold.ops.kda import chunk_kda, fused_recurrent_kda
from wyfold.ops.norm import l2norm, rms_norm_gated
from wyfold.ops.path_attention import parallel_path_attn
from wyfold.ops.rwkv7 import chunk_rwkv7, fused_mul_recurrent_rwkv7, fused_recurrent_rwkv7
from wyfold.ops.solve import chunk_scaled_dot_kkt, solve_tril
from wyfold.ops.ttt_linear import chunk_ttt_linear, fused_recurrent_ttt_linear
from wyfold.runtime import extras, triton_support, user_cache
from wyfold.runtime.check import UnsupportedError, checking_contents

OLDEST_TORCH = (2, 11)

OPTIONAL = {package: extra for extra in ("report", "cli", "transformers") for package in sorted(extras.EXTRAS[extra])}
"""Optional package -> the smallest extra that brings it."""


@dataclass(frozen=True)
class Service:
    """Backend of one operator on one device.

    Attributes:
        operator: Public name.
        device: Device type.
        backend: Backend of a call without `backend=`. None: such a call is refused.
        forward, backward: Launches, as "stage (module)".
        refused: Every other backend -> reason against it.
    """

    operator: str
    device: str
    backend: str | None
    forward: tuple[str, ...]
    backward: tuple[str, ...]
    refused: Mapping[str, str]


@dataclass(frozen=True)
class DoctorReport:
    """Result of `doctor`.

    Attributes:
        hardware: Processor, cores, memory; name and architecture of each GPU.
        versions: Installed package -> version.
        known_bad: Sentences about installed versions that are known not to work.
        services: Backend of each operator on each device of this machine.
        cells: Stage -> backend -> evidence for its results.
        extras: Optional package -> its version, or the command that installs it.
        settings: Process-wide settings that affect calls.
        self_checks: Self-checks of kernels that are remembered for this toolchain, the latest last: operator, card,
            seconds since 1970, whether it passed, and the refusal otherwise.
    """

    hardware: Mapping[str, Any]
    versions: Mapping[str, str]
    known_bad: tuple[str, ...]
    services: tuple[Service, ...]
    cells: Mapping[str, Mapping[str, str]]
    extras: Mapping[str, str]
    settings: Mapping[str, Any]
    self_checks: tuple[Mapping[str, Any], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The report as nested dictionaries, lists and plain values."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        core = {name: version for name, version in self.versions.items() if name not in self.extras}
        gpus = "; ".join(
            f"{gpu['name']} ({gpu['architecture']}, {gpu['memory_gib']} GiB): {gpu['triton']}"
            for gpu in self.hardware["gpus"]
        )
        lines = [*self._summary(), "", *_listed("hardware", {**self.hardware, "gpus": gpus or "none"})]
        lines += _listed("versions", core)
        if self.known_bad:
            lines += ["known bad versions", *(f"  {text}" for text in self.known_bad)]
        lines += [*_listed("extras", self.extras), *_listed("settings", self.settings), "operators"]
        lines += [
            f"  {name:<32} {device:<5} {backend or 'refused'}"
            for device in dict.fromkeys(service.device for service in self.services)
            for name, backend in self._backends_on(device)
        ]
        lines += self._reasons_in_words()
        if self.self_checks:
            lines.append("self-checks of kernels")
        for check in self.self_checks:
            when, answer = formatdate(check["when"]), "passed" if check["passed"] else check["refusal"]
            lines.append(f"  {when}  {check['operator']} on {check['card']}: {answer}")
        return "\n".join(lines)

    def _summary(self) -> list[str]:
        """One line on the backend of the operators for each kind of GPU call, or for the CPU alone."""
        backends = {
            device: [service.backend for service in self.services if service.device == device]
            for device in dict.fromkeys(service.device for service in self.services)
        }
        if "cuda" not in backends:
            if set(backends.get("cpu", ())) == {"eager"}:
                return ['CPU only: every operator runs in PyTorch (backend "eager"); this is normal without a GPU']
            return ["CPU only: not every operator runs; the reasons are below"]
        found, kernels = backends["cuda"], backends["cuda"].count("triton")
        refused = found.count(None)
        rest = f'; {refused} run on it only with backend="eager", in PyTorch' if refused else ""
        return [f'GPU: {kernels} of {len(found)} operators run in kernels (backend "triton"){rest}']

    def _reasons_in_words(self) -> list[str]:
        """Why operators do not run on the other backends.

        Left out are operators in PyTorch on the CPU, where no other backend runs, and Gluon, which no call can choose.
        """
        services = [service for service in self.services if (service.device, service.backend) != ("cpu", "eager")]
        lines = []
        for backend, operators in dataclasses.replace(self, services=tuple(services)).reasons().items():
            if backend == "gluon":
                continue
            lines.append(f"not {backend}")
            for reason, names in operators.items():
                if 2 * len(names) > len(services):
                    names = ["all operators" if len(names) == len(services) else "all other operators"]
                lines.append(f"  {reason}: {', '.join(names)}")
        return lines

    def _backends_on(self, device: str) -> list[tuple[str, str | None]]:
        """(operator, backend) on a device; a single row if all have one backend."""
        found = [(service.operator, service.backend) for service in self.services if service.device == device]
        alike = len({backend for _, backend in found}) == 1
        return [(f"all {len(found)} operators", found[0][1])] if alike else found

    def reasons(self) -> dict[str, dict[str, list[str]]]:
        """Backend -> reason -> operators it was not chosen for, with their device if there are several devices."""
        several = len({service.device for service in self.services}) > 1
        found: dict[str, dict[str, list[str]]] = {}
        for service in self.services:
            for backend, reason in service.refused.items():
                name = f"{service.operator} on {service.device}" if several else service.operator
                found.setdefault(backend, {}).setdefault(reason, []).append(name)
        return found


def doctor() -> DoctorReport:
    """Report hardware, versions, and for each operator its backend and the reasons against the others.

    Runs no operator, changes nothing and downloads nothing. The text of the report begins with what runs where, and
    leaves out what says nothing on this machine.

    Returns:
        DoctorReport, with fields for programs and `str` for people.

    Examples:
        >>> import wyfold
        >>> report = wyfold.doctor()
        >>> {service.backend for service in report.services if service.device == "cpu"}
        {'eager'}
    """
    found = versions()
    return DoctorReport(
        hardware(), found, _known_bad(), _services(), _cells(), _extras(found), _settings(), _self_checks()
    )


def hardware() -> dict[str, Any]:
    """Processor, cores and memory of this machine, and its GPUs."""
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "vector_instructions": torch.backends.cpu.get_cpu_capability(),
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
    }


def versions() -> dict[str, str]:
    """Versions of Python, wyfold, torch, CUDA, Triton and installed optional packages."""
    found = {"python": platform.python_version(), "wyfold": _own_version(), "torch": torch.__version__}
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for package in ("triton", *OPTIONAL):
        if importlib.util.find_spec(package) is not None:
            found[package] = importlib.metadata.version(package)
    return found


def _own_version() -> str:
    """Version of the loaded package, which may be a source tree that is not installed."""
    return str(sys.modules["wyfold"].__version__)


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "architecture": triton_support.architecture(torch.device("cuda", index)),
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "triton": _kernels_on(torch.device("cuda", index)),
    }


def _gpus() -> list[torch.device]:
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]


def _kernels_on(device: torch.device) -> str:
    """Status of the kernels on a GPU: verified, checked at first use, or refused."""
    support = triton_support.support_of(device)
    if support.refusal:
        return f"refused: {support.refusal}"
    where = f"{support.architecture} under Triton {support.version}"
    if support.verified:
        return f"verified on {where}"
    if user_cache.self_check_setting() == "refuse":
        return f"not verified on {where}; only kernels that passed a self-check run ({user_cache.SELF_CHECK}=refuse)"
    return f"not verified on {where}: each kernel is checked at its first use; `wyfold verify` checks all of them now"


def _known_bad() -> tuple[str, ...]:
    found = []
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        found.append(f"torch {torch.__version__} is older than {oldest}, the oldest that wyfold is made for")
    # A CPU build of torch neither installs nor needs Triton.
    if (triton_support.triton_version() or torch.version.cuda) and (
        reason := triton_support.version_refusal(triton_support.triton_version())
    ):
        found.append(f"every GPU kernel is refused: {reason}")
    for reason in dict.fromkeys(triton_support.support_of(gpu).refusal for gpu in _gpus()):
        if reason and not any(reason in text for text in found):
            found.append(f"every GPU kernel is refused: {reason}")
    if refusal := triton_support.interpreter_refusal():
        found.append(refusal)
    return tuple(found)


def _cells() -> dict[str, dict[str, str]]:
    """Stage -> backend -> evidence for its results."""
    kernels = (
        "; ".join(dict.fromkeys(map(_kernels_on, _gpus()))) or triton_support.support_of(torch.device("cuda")).refusal
    )
    proof = {
        "eager": "PyTorch on any device; `wyfold verify` measures it on this one",
        "triton": kernels,
        "gluon": f"in place of Triton's on sm_90; {kernels}",
    }
    found: dict[str, dict[str, str]] = {}
    for row in table.ENTRIES:
        found.setdefault(row.stage, {})[row.backend] = proof[row.backend]
    return found


def _self_checks() -> tuple[Mapping[str, Any], ...]:
    names = "operator", "card", "passed", "refusal"
    return tuple({"when": when} | {name: record.get(name) for name in names} for when, record in remembered_here())


def _extras(found: Mapping[str, str]) -> dict[str, str]:
    return {
        package: found.get(package, f'not installed; pip install {package}, or ".[{extra}]" in a clone')
        for package, extra in OPTIONAL.items()
    }


def _settings() -> dict[str, Any]:
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "autocast_cpu": torch.is_autocast_enabled("cpu"),
        "checked": checking_contents(),
        "self_check": user_cache.self_check_setting(),
        "cache_folder": str(user_cache.cache_folder()),
        "environment_variables": f"{user_cache.FOLDER}, XDG_CACHE_HOME and {user_cache.SELF_CHECK} are read",
    }


def _services() -> tuple[Service, ...]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    return tuple(_service(op, arguments, device) for device in devices for op, arguments in _calls(device).items())


def _service(op: Callable[..., Any], arguments: tuple[Any, ...], device: str) -> Service:
    try:
        plan = explain(op, *arguments)
    except UnsupportedError as refusal:
        return Service(op.__name__, device, None, (), (), refusal.reasons)
    return Service(op.__name__, device, plan.backend, plan.forward, plan.backward, plan.refused)


def _calls(device: str) -> dict[Callable[..., Any], tuple[Any, ...]]:
    """Every public operator with the smallest arguments it accepts."""
    q = torch.zeros(1, 16, 1, 16, device=device)  # also k, v, a channel gate and an A
    g = torch.zeros(1, 16, 1, device=device)  # also beta and eta
    rows = torch.zeros(1, 16, device=device)
    return {
        chunk_delta_rule: (q, q, q, g),
        chunk_gated_delta_rule: (q, q, q, g, g),
        chunk_gated_delta_product: (q, q, q, g, g),
        chunk_gla: (q, q, q, q),
        chunk_kda: (q, q, q, q, g),
        chunk_dplr_delta_rule: (q, q, q, q, q, q),
        chunk_iplr_delta_rule: (q, q, q, q, q),
        chunk_rwkv7: (q, q, q, q, q, q),
        chunk_gdn2: (q, q, q, q, q, q),
        chunk_comba: (q, q, q, q, g, g),
        chunk_ttt_linear: (q, q, q, rows, rows, g),
        fused_recurrent_delta_rule: (q, q, q, g),
        fused_recurrent_gated_delta_rule: (q, q, q, g, g),
        fused_recurrent_gated_delta_product: (q, q, q, g, g),
        fused_recurrent_gla: (q, q, q, q),
        fused_recurrent_kda: (q, q, q, q, g),
        fused_recurrent_dplr_delta_rule: (q, q, q, q, q, q),
        fused_recurrent_iplr_delta_rule: (q, q, q, q, q),
        fused_recurrent_rwkv7: (q, q, q, q, q, q),
        fused_mul_recurrent_rwkv7: (q, q, q, q, q, q),
        fused_recurrent_gdn2: (q, q, q, q, q, q),
        fused_recurrent_comba: (q, q, q, q, g, g),
        fused_recurrent_ttt_linear: (q, q, q, rows, rows, g),
        parallel_path_attn: (q, q, q, q, g),
        solve_tril: (q,),
        chunk_scaled_dot_kkt: (q, g),
        causal_conv1d: (g, rows[:, :4]),
        rms_norm_gated: (q, q, rows[0]),
        l2norm: (q,),
        fused_gdn_gate: (g,),
        fused_kda_gate: (q,),
        fused_beta_sigmoid: (g,),
    }


def _listed(title: str, values: Mapping[str, Any]) -> list[str]:
    width = max(map(len, values), default=0)
    return [title, *(f"  {name:<{width}}  {value}" for name, value in values.items())]
