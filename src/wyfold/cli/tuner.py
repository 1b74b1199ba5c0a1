"""Launch configurations for one GPU: candidates near the shipped one are compiled, checked and timed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import wyfold
from wyfold.cli import results
from wyfold.cli.bench.cases import Case, leaves
from wyfold.cli.bench.timing import Gpu
from wyfold.cli.catalog import OPS
from wyfold.cli.operators import OPERATOR_SPECS, Arguments, measured, verdicts
from wyfold.kernels import table
from wyfold.runtime import kernel_configs, triton_support
from wyfold.runtime.kernel_configs import Config, LaunchKey
from wyfold.runtime.plan import Launch

REPEATS = 20
WARPS, LOOKAHEAD, TILES, REGISTERS = (1, 2, 4, 8, 16), (1, 2, 3, 4), range(16, 257), (None, 255)
SPARE = 1.25
"""Largest ratio of a candidate's spills to those of the candidate that spills least."""


@dataclass
class Candidate:
    """A configuration and its outcome.

    Attributes:
        config: Launch configuration.
        refusal: Why it was dropped; empty if it was not.
        spilled: Bytes that its kernels spill.
        milliseconds: Time of the launch; 0 before it is timed.
    """

    config: Config
    refusal: str = ""
    spilled: int = 0
    milliseconds: float = 0.0

    def as_row(self) -> dict[str, Any]:
        """Fields of a row of the configuration table."""
        limit = {} if self.config.registers is None else {"registers": self.config.registers}
        return {**self.config.blocks, "warps": self.config.warps, "stages": self.config.stages, **limit}

    def as_dict(self) -> dict[str, Any]:
        outcome = {"refused": self.refusal} if self.refusal else {"milliseconds": self.milliseconds}
        return {**self.as_row(), "spilled": self.spilled, **outcome}


def launches(stage: str, case: Case) -> list[Launch]:
    """Distinct launches of a stage in a case."""
    plan = wyfold.explain(getattr(wyfold, OPS[case.op]), **case.arguments(), backend="triton")
    return [row for row in dict.fromkeys(plan.rows) if row.stage == stage]


class Tuner:
    """Search over the candidates of one launch."""

    def __init__(self, launched: Launch, case: Case, device: torch.device, rounds: int):
        self.launched, self.case, self.device, self.rounds = launched, case, device, rounds
        self.kernel, self.architecture = f"{launched.stage}.triton", triton_support.architecture(device)
        self.module = table.kernel_module(launched.stage, "triton")

    def tune(self) -> list[Candidate]:
        """All candidates with a refusal or a time; the shipped configuration is the first."""
        candidates = [Candidate(config) for config in neighbours(self.shipped())]
        steps: tuple[tuple[str, Callable[[list[Candidate]], None]], ...] = (
            ("compiling", self._compile),
            ("proving", self._prove),
            ("timing", self._time),
        )
        for what, step in steps:
            left = [c for c in candidates if not c.refusal]
            results.say(f"{self.launched.stage} ({self.launched.key}): {what} {len(left)} of {len(candidates)}")
            step(left)
        return candidates

    def shipped(self) -> Config:
        return kernel_configs.tuned(self.kernel, LaunchKey.parse(self.launched.key), self.device)

    def trying(self, candidate: Candidate) -> Any:
        return kernel_configs.override_row(self.architecture, self.kernel, self.launched.key, candidate.config)

    def _compile(self, candidates: list[Candidate]) -> None:
        call = self.call(self.case)
        for candidate in shown(candidates, "compiling"):
            before = self.variants()
            with self.trying(candidate):
                try:
                    call()
                    torch.cuda.synchronize()
                except Exception as error:
                    if not type(error).__module__.startswith("triton"):
                        raise
                    candidate.refusal = f"does not compile or fit: {str(error).partition(chr(10))[0]}"
            new = [kernel for key, kernel in self.variants().items() if key not in before]
            candidate.spilled = sum(kernel.n_spills or 0 for kernel in new)
        least = min((c.spilled for c in candidates if not c.refusal), default=0)
        for candidate in candidates:
            if not candidate.refusal and candidate.spilled > SPARE * least:
                candidate.refusal = f"spills {candidate.spilled} bytes, where {least} will do"

    def variants(self) -> dict[Any, Any]:
        return {(name, key): kernel for name, made in self.compiled().items() for key, kernel in made.items()}

    def compiled(self) -> dict[str, dict[Any, Any]]:
        return kernel_configs.compiled(self.module, self.device)

    def _prove(self, candidates: list[Candidate]) -> None:
        """Check candidates against the token loop at a length that no tile divides, and for equal bits if repeated."""
        spec, shape = OPERATOR_SPECS[OPS[self.case.op]], dataclasses.replace(self.case.shape, B=1, T=130, H=2, HV=2)
        drawn = spec.arguments(shape, getattr(torch, self.case.dtype), 0)

        def ours(arguments: Arguments) -> tuple[torch.Tensor, ...]:
            return tuple(x.cpu() for x in spec.ours({**spec.on(self.device, arguments), "backend": "triton"}))

        def calls() -> Iterator[dict[str, torch.Tensor]]:
            for _ in range(REPEATS):
                yield measured(ours, drawn, spec.outputs, backward=spec.backward)

        for candidate in shown(candidates, "proving"):
            with self.trying(candidate):
                first, *others = calls()
            wrong = [v for v in verdicts(spec, drawn, first) if not v.passed]
            if wrong:
                candidate.refusal = f"wrong: {wrong[0]}"
            elif any(not torch.equal(first[name], other[name]) for other in others for name in first):
                candidate.refusal = f"other bits in {REPEATS} calls"

    def _time(self, candidates: list[Candidate]) -> None:
        gpu, call = Gpu(), self.call(self.case)
        names = tuple(self.compiled())
        for candidate in shown(candidates, "timing"):
            with self.trying(candidate):
                call()
                rounds = [gpu.kernels(call) for _ in range(self.rounds)]
            own = [sum(k.milliseconds for k in kernels if k.name in names) for kernels in rounds]
            candidate.milliseconds = sorted(own)[len(own) // 2]

    def call(self, case: Case) -> Callable[[], object]:
        """A function that calls the operator on a case's tensors, with its backward if it has one."""
        operator, arguments = getattr(wyfold, OPS[case.op]), case.arguments()
        if not OPERATOR_SPECS[OPS[case.op]].backward:
            return lambda: operator(**arguments, backend="triton")
        wanted, fed = leaves(arguments), case.incoming(arguments)

        def forward_and_backward() -> object:
            returned = operator(**{**arguments, **wanted}, backend="triton")
            o = returned[0] if isinstance(returned, tuple) else returned
            return torch.autograd.grad(o, list(wanted.values()), fed.to(o.dtype), allow_unused=True)

        return forward_and_backward


def neighbours(config: Config) -> list[Config]:
    """The configuration, then those with half, equal or double tile sizes and warps."""

    def sizes(block: str, size: int) -> tuple[int, ...]:
        return tuple(n for n in (size, size // 2, 2 * size) if n in TILES) if block.startswith("B") else (size,)

    blocks = itertools.product(*(sizes(name, size) for name, size in config.blocks.items()))
    warps = [n for n in (config.warps, config.warps // 2, 2 * config.warps) if n in WARPS]
    found = [
        Config(warp, stages, dict(zip(config.blocks, tiles, strict=True)), limit)
        for tiles, warp, stages, limit in itertools.product(blocks, warps, LOOKAHEAD, REGISTERS)
        if 32 * warp * (limit or 0) <= 65_536
    ]
    return [config, *(other for other in found if other != config)]


def shown(candidates: list[Candidate], what: str) -> Iterator[Candidate]:
    """Iterate over the candidates, with a progress bar on a terminal."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(candidates, what, console=console, transient=True, disable=not console.is_terminal)
