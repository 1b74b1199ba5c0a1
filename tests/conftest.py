"""Fixtures and settings that every test shares.

- Memory is poisoned: with deterministic algorithms on, PyTorch fills `torch.empty` and similar functions with NaN (the
  largest value for integers), so an element that was never written cannot pass for a result. The same setting makes an
  operator that is not deterministic raise.
- The random seed is fixed and PyTorch runs one thread. A test may change both; the next test finds them reset.
- Warnings are errors (pyproject.toml names the few that PyTorch itself emits).
- A test runs for every backend that this process offers. No environment variable disables one, and a skip must state
  its condition. A test that runs a kernel takes the fixture `device`: the GPU if there is one, or the CPU in a process
  that was started with TRITON_INTERPRET=1. Such a process runs only those tests; the others run in another process.

The tolerance of a test comes from `wyfold.reference.error`. Absolute bounds on operators in float64 are in
`float64_bounds`. Where bits are promised, tests use `torch.equal`.
"""

import collections
import functools
import gc
import itertools
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

SEED = 20260101
FAMILY_OUTPUT = 1e-12  # float64, chunk form against token loop: outputs and states
FAMILY_GRADIENT = 1e-10  # every gradient; relative RMS per tensor
GC_THRESHOLD = 20_000  # allocations per garbage collection; Python's default of 700 took a tenth of the tests' time


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("wyfold")
    group.addoption("--backend", action="append", help="run only this backend; an error where it is not offered")
    group.addoption("--draws", type=int, help="draw this many fresh examples per property instead of the fixed ones")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this process distributes tests and runs none
    gc.set_threshold(GC_THRESHOLD)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(1)
    draws = config.getoption("--draws")
    hypothesis.settings.register_profile(
        "wyfold",
        deadline=None,  # no test has a time limit
        database=None,  # a failure is added as a named case instead
        derandomize=draws is None,
        max_examples=draws or 15,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    )
    hypothesis.settings.load_profile("wyfold")
    trust_kernels()
    if interpreting():
        repair_interpreter()
        for module in NUMPY_WARNING_MODULES:
            config.addinivalue_line("filterwarnings", f"ignore::RuntimeWarning:{module}")
        config.addinivalue_line("filterwarnings", f"ignore:{BOUNDS_WARNING}:DeprecationWarning")


NUMPY_WARNING_MODULES = ("triton.runtime.interpreter", "numpy", "tests.triton_shortcuts")
"""Modules of the interpreter that warn: kernels compute with invalid values in rows that are masked later."""

BOUNDS_WARNING = "Conversion of an array with ndim > 0"
"""Start of the deprecation warning the interpreter emits for a size-1 array used as a loop bound."""


def trust_kernels() -> None:
    """Make no self-check of kernels: the tests are how a card is verified."""
    from wyfold.kernels import self_check

    self_check.trust_kernels()


def repair_interpreter() -> None:
    """Make Triton's interpreter correct for bfloat16, and faster."""
    from tests import triton_bf16, triton_shortcuts

    triton_bf16.repair()
    triton_shortcuts.install()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exclude tests and imported modules, which live until the end, from garbage collection."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print every skip condition once, with the number and folders of its tests, instead of one line per test."""
    skips: dict[str, collections.Counter[str]] = {}
    for report in terminalreporter.getreports("skipped"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        skips.setdefault(reason, collections.Counter())[report.nodeid.rpartition("/")[0]] += 1
    if skips:
        terminalreporter.section("skipped, and why")
    for reason, counts in skips.items():
        where = ", ".join(f"{folder} {count}" for folder, count in sorted(counts.items()))
        terminalreporter.line(f"{counts.total()} skipped: {reason} ({where})")


@functools.cache
def interpreting() -> bool:
    """Whether this process runs kernels in Triton's interpreter."""
    from wyfold.runtime import triton_support

    return triton_support.can_interpret()


@functools.cache
def no_kernel_reason() -> str:
    """Why no kernel can run in this process; empty if kernels do."""
    from wyfold.runtime import triton_support

    if interpreting():
        return ""
    refusal = triton_support.support_of(torch.device("cuda")).refusal
    return refusal and f"{refusal}, and the process was not started with TRITON_INTERPRET=1"


def offered_backends(fixtures: Iterable[str]) -> tuple[str, ...]:
    """The levels of `kernels/table.py` for which this process runs a test with these fixtures, lowest first."""
    if "device" not in fixtures or no_kernel_reason():
        return ("eager",)
    return ("triton",) if interpreting() else ("eager", "triton")


KERNEL_FIXTURES = re.compile(r'[(,]\s*(device|interpreter)\s*(: [\w. |]+)?[,)]|usefixtures\(.*"(device|interpreter)"')
"""Source of a test that runs kernels: it takes one of these fixtures."""


@functools.cache
def runs_kernels(file: Path) -> bool:
    return KERNEL_FIXTURES.search(file.read_text()) is not None


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """In an interpreting process, do not import test files that run no kernel."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    return (is_test and interpreting() and not runs_kernels(collection_path)) or None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("--backend")
    possible = offered_backends(["device"])
    for name in asked or ():
        if name not in possible:
            raise pytest.UsageError(f"--backend {name}: this process offers {', '.join(possible)}")
    offered = offered_backends(metafunc.fixturenames)
    metafunc.parametrize("backend", [name for name in offered if not asked or name in asked])


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In an interpreting process, deselect tests that run no kernel. Long tests come first."""
    hidden = {item.path for item in items if "device" in item.fixturenames and not runs_kernels(item.path)}
    if hidden:
        raise pytest.UsageError(f"an interpreting process would not collect {', '.join(map(str, hidden))}")
    if interpreting():
        for item in items:
            if item.get_closest_marker("release_if_interpreted"):
                item.add_marker("release")
        others = [item for item in items if "device" not in item.fixturenames]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if "device" in item.fixturenames]
    items[:] = long_first(items, getattr(config, "workerinput", {}).get("workercount", 1))


def long_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Order tests so that the tests marked `long` are dealt out to the workers and run first.

    Each worker begins with an equally long run of tests, and steals from the end of another's run when it is done.
    """
    long = [item for item in items if item.get_closest_marker("long")]
    short = (item for item in items if not item.get_closest_marker("long"))
    dealt: list[pytest.Item] = []
    for n in range(workers):
        mine = long[n::workers]
        dealt += [*mine, *itertools.islice(short, max(0, len(items) // workers - len(mine)))]
    return [*dealt, *short]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped").strip(": ")
        if reason in ("", "unconditional skip"):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid}: a skip must print the condition that holds"


@pytest.fixture(autouse=True)
def fresh_process_state():
    """Reset the seed, thread count, default dtype and replay cache, so that no test depends on an earlier one."""
    from wyfold.runtime import replay_cache

    replay_cache.forget()  # a test may patch what recorded calls depend on
    random.seed(SEED)
    # `torch.manual_seed` keeps the call stack for every kind of device that is not initialised.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(SEED)
    yield
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest) -> int:
    """Thread counts under which results must have the same bits."""
    torch.set_num_threads(request.param)
    return request.param


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device of the test's backend. A test without `backend` needs kernels, and is skipped where none can run."""
    backend = request.getfixturevalue("backend") if "backend" in request.fixturenames else "triton"
    if backend == "eager":
        return torch.device("cpu")
    if no_kernel_reason():
        pytest.skip(no_kernel_reason())
    return torch.device("cpu" if interpreting() else "cuda")


@pytest.fixture
def interpreter(device: torch.device) -> None:
    """Skip a test of Triton's interpreter in a process that does not interpret."""
    if not interpreting():
        pytest.skip("the process was not started with TRITON_INTERPRET=1")


@pytest.fixture
def drawn() -> None:
    """Makes `undrawn` draw: for a test of the drawing itself."""


@pytest.fixture
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training runs write an empty curve: drawing it takes more than half the time of a run of a few steps."""
    if "drawn" not in request.fixturenames:
        from matplotlib.figure import Figure

        monkeypatch.setattr(Figure, "savefig", lambda figure, file, **_: file.write_bytes(b""))


GUARD = 512
"""Elements on either side of a guarded tensor: past the widest row, and a multiple of what loads align to."""


class Guards:
    """Tensors between guard rows of NaN, which expose reads outside a tensor and are checked for writes."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def between(self, x: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of x inside a guarded buffer."""
        buffer = torch.full((GUARD + x.numel() + GUARD,), torch.nan, dtype=x.dtype, device=x.device)
        self.buffers.append(buffer)
        return buffer[GUARD : GUARD + x.numel()].view(x.shape).copy_(x)

    def check(self) -> None:
        for buffer in self.buffers:
            for guard in (buffer[:GUARD], buffer[-GUARD:]):
                assert guard.isnan().all(), "something was written outside a tensor"


@pytest.fixture
def guarded() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """`guarded(x)`: x between guards, which are checked at the end of the test."""
    guards = Guards()
    yield guards.between
    guards.check()


@pytest.fixture
def planned_as_cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """Record (operator, requested backend) of each call, while planning treats every tensor as a CUDA tensor.

    No kernel runs on CUDA.
    """
    from wyfold.kernels import table
    from wyfold.runtime import replay_cache, triton_support

    calls, plan = [], table.plan
    monkeypatch.setattr(replay_cache, "_entries", {})  # no cached plan for the actual device
    monkeypatch.setattr(replay_cache, "_alike", {})
    monkeypatch.setattr(
        triton_support, "support_of", lambda device: triton_support.Support("", "", False, "no kernel is wanted")
    )

    def plan_for_cuda(operator: str, device: torch.device, backend: str | None, **rest: Any):
        calls.append((operator, backend))
        return plan(operator, torch.device("cuda"), backend, **rest)

    monkeypatch.setattr(table, "plan", plan_for_cuda)
    return calls


class Float64Bounds:
    """Absolute bounds on float64 results, as relative RMS; results must be exactly zero where the truth is zero."""

    def output(self, name: str, got: torch.Tensor, truth: torch.Tensor) -> None:
        """Check an output or state of an operator."""
        self.within(name, got, truth, FAMILY_OUTPUT)

    def gradient(self, name: str, got: torch.Tensor, truth: torch.Tensor) -> None:
        """Check the gradient of an argument."""
        self.within(name, got, truth, FAMILY_GRADIENT)

    def within(self, name: str, got: torch.Tensor, truth: torch.Tensor, bound: float) -> None:
        """Require `|got - truth| <= bound * |truth|`, both in float64 and of one shape."""
        assert got.dtype == truth.dtype == torch.float64, f"{name}: {got.dtype} against {truth.dtype}"
        assert got.shape == truth.shape, f"{name}: {tuple(got.shape)} against {tuple(truth.shape)}"
        error, size = torch.linalg.vector_norm(got - truth).item(), torch.linalg.vector_norm(truth).item()
        assert error <= bound * size, f"{name}: |got - truth| = {error:.3e}, allowed {bound:.0e} * {size:.3e}"


@pytest.fixture(scope="session")
def float64_bounds() -> Float64Bounds:
    """Checks `.output(name, got, truth)` and `.gradient(name, got, truth)`."""
    return Float64Bounds()


def results(
    op: Callable[..., Any],
    arguments: Mapping[str, Any],
    wrt: Iterable[str] | None = None,
    incoming: Mapping[str, torch.Tensor] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Results of one call of a delta rule by name: "o", "state", "states" and, for each x in `wrt`, "dx".

    Args:
        op: A public operator or its token loop.
        arguments: Keyword arguments. Tensors are not changed, and keep their strides.
        wrt: Arguments to differentiate; None is every floating tensor. Gradients of arguments without effect are zeros.
        incoming: Gradients of "o" and "state". A missing one takes no part in the backward. None draws both.
        options: More keyword arguments.
    """
    from wyfold.reference import inputs

    given = {**arguments, **options}
    floating = [name for name, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()]
    wanted = floating if wrt is None else list(wrt)
    for name in wanted:
        given[name] = given[name].detach().requires_grad_()
    returned = dict(zip(("o", "state", "states"), op(**given), strict=False))
    found = {name: x for name, x in returned.items() if x is not None}
    if wanted:
        if incoming is None:
            incoming = {
                name: inputs.incoming(found[name], seed) for seed, name in enumerate(("o", "state")) if name in found
            }
        arrows = {name: dx for name, dx in incoming.items() if found[name].requires_grad}
        leaves = [given[name] for name in wanted]
        gradients = torch.autograd.grad(
            [found[name] for name in arrows], leaves, list(arrows.values()), allow_unused=True
        )
        for name, leaf, dx in zip(wanted, leaves, gradients, strict=True):
            found[f"d{name}"] = torch.zeros_like(leaf) if dx is None else dx
    return {name: x.detach() for name, x in found.items()}


@pytest.fixture(scope="session", name="results")
def results_fixture() -> Callable[..., dict[str, torch.Tensor]]:
    """The function `results(op, arguments, ...)`."""
    return results
