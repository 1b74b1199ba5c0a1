"""What every test starts from.

- Memory is poisoned: with deterministic algorithms on, PyTorch fills `torch.empty` and its kin with NaN (the largest
  value for integers), so that a number nobody wrote cannot pass for a result. The same switch makes an operator that is
  not repeatable raise.
- Random numbers start at one seed, threads at one; a test may change both and finds them reset.
- Warnings are errors (pyproject.toml names the few that PyTorch itself emits).
- A test runs for every backend that this process offers; nothing in the environment switches one off, and a skip must
  say which condition holds. What runs a kernel takes the fixture `device`: the GPU where there is one, the CPU in a
  process that was started with TRITON_INTERPRET=1. Such a process runs those tests alone; the others have their own.

The tolerance of a test comes from `wyfold.reference.error`. Where the operators are held to an absolute bound in
float64, the bound is `float64_bounds`; where bits are promised, the test says `torch.equal`.
"""

import collections
import functools
import gc
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import hypothesis
import pytest
import torch

SEED = 20260101
FAMILY_OUTPUT = 1e-12  # float64, chunk form against token loop: outputs and states
FAMILY_GRADIENT = 1e-10  # and every gradient; relative RMS per tensor
YOUNG = 20_000  # objects made before Python looks for cycles among them; its own 700 took a tenth of the tests' time


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("wyfold")
    group.addoption("--backend", action="append", help="run only this backend; an error where it is not offered")
    group.addoption("--draws", type=int, help="draw this many fresh examples per property instead of the fixed ones")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return  # this process hands tests out and runs none
    gc.set_threshold(YOUNG)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.set_num_threads(1)
    draws = config.getoption("--draws")
    hypothesis.settings.register_profile(
        "wyfold",
        deadline=None,  # nothing in the tests is judged by a clock
        database=None,  # a failure found becomes a named case
        derandomize=draws is None,
        max_examples=draws or 25,
        print_blob=True,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    )
    hypothesis.settings.load_profile("wyfold")
    if interpreting():
        mend_interpreter()
        for module in NUMPYS_WARNINGS:
            config.addinivalue_line("filterwarnings", f"ignore::RuntimeWarning:{module}")
        config.addinivalue_line("filterwarnings", f"ignore:{BOUNDS_WARNING}:DeprecationWarning")


NUMPYS_WARNINGS = ("triton.runtime.interpreter", "numpy", "tests.triton_shortcuts")
"""Modules of the interpreter's: a kernel computes on in rows that are masked later, and numpy has something to say."""

BOUNDS_WARNING = "Conversion of an array with ndim > 0"
"""How the interpreter's begins of a loop's bound, which is an array of one number there."""


def mend_interpreter() -> None:
    """Make it right, and quicker."""
    from tests import triton_bf16, triton_shortcuts

    triton_bf16.repair()
    triton_shortcuts.take()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Thousands of tests and all that was imported for them are there to stay: cycles are not looked for among them."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Every skip's condition, once, with the number of tests and where they are: thousands of lines hide a failure."""
    rooms: dict[str, collections.Counter[str]] = {}
    for report in terminalreporter.getreports("skipped"):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        rooms.setdefault(reason, collections.Counter())[report.nodeid.rpartition("/")[0]] += 1
    if rooms:
        terminalreporter.section("skipped, and why")
    for reason, counts in rooms.items():
        where = ", ".join(f"{room} {count}" for room, count in sorted(counts.items()))
        terminalreporter.line(f"{counts.total()} skipped: {reason} ({where})")


@functools.cache
def interpreting() -> bool:
    """Whether this process runs kernels in Triton's interpreter."""
    from wyfold.runtime import triton_support

    return triton_support.can_interpret()


@functools.cache
def no_kernels() -> str:
    """Why no kernel can run in this process; empty if kernels do."""
    from wyfold.runtime import triton_support

    if interpreting():
        return ""
    refusal = triton_support.support_of(torch.device("cuda")).refusal
    return refusal and f"{refusal}, and the process was not started with TRITON_INTERPRET=1"


def offered_backends(fixtures: Iterable[str]) -> tuple[str, ...]:
    """The levels of `kernels/table.py` that a test with these fixtures runs for in this process, lowest first."""
    if "device" not in fixtures or no_kernels():
        return ("eager",)
    return ("triton",) if interpreting() else ("eager", "triton")


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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In an interpreting process, what runs no kernel is left to the other one. Long tests come first."""
    if interpreting():
        others = [item for item in items if "device" not in item.fixturenames]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if "device" in item.fixturenames]
    items[:] = long_first(items, getattr(config, "workerinput", {}).get("workercount", 1))


def long_first(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """The tests marked `long` dealt out to the workers, so that none runs while the others have nothing left to do.

    Each worker begins with a run of equally many, and takes from the end of another's when its own are done.
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
    """Seed, threads, default dtype and no call remembered, as every test expects it, whatever the test before did."""
    from wyfold.runtime import replay_cache

    replay_cache.forget()  # a test may plant what no call depends on by value
    random.seed(SEED)
    # `torch.manual_seed` keeps, of every kind of device that is not there yet, the stack it was called from.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(SEED)
    yield
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)


@pytest.fixture(params=[1, 2], ids=["1thread", "2threads"])
def threads(request: pytest.FixtureRequest) -> int:
    """Thread counts under which promised bits must agree."""
    torch.set_num_threads(request.param)
    return request.param


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the test's backend runs. A test without `backend` is about kernels, and skipped where none can run."""
    backend = request.getfixturevalue("backend") if "backend" in request.fixturenames else "triton"
    if backend == "eager":
        return torch.device("cpu")
    if no_kernels():
        pytest.skip(no_kernels())
    return torch.device("cpu" if interpreting() else "cuda")


@pytest.fixture
def interpreter(device: torch.device) -> None:
    """The test is about Triton's interpreter."""
    if not interpreting():
        pytest.skip("the process was not started with TRITON_INTERPRET=1")


GUARD = 512
"""Elements on either side of a guarded tensor: past the widest row, and a multiple of what loads align to."""


class Guards:
    """Tensors between rows of NaN: a read outside one meets them, a write outside one is seen at the end."""

    def __init__(self) -> None:
        self.rooms: list[torch.Tensor] = []

    def between(self, x: torch.Tensor) -> torch.Tensor:
        """x, contiguous, in a room of its own."""
        room = torch.full((GUARD + x.numel() + GUARD,), torch.nan, dtype=x.dtype, device=x.device)
        self.rooms.append(room)
        return room[GUARD : GUARD + x.numel()].view(x.shape).copy_(x)

    def check(self) -> None:
        for room in self.rooms:
            for guard in (room[:GUARD], room[-GUARD:]):
                assert guard.isnan().all(), "something was written outside a tensor"


@pytest.fixture
def guarded() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """`guarded(x)`: x between guards, which are looked at when the test is over."""
    guards = Guards()
    yield guards.between
    guards.check()


@pytest.fixture
def taken_for_cuda(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """(operator, backend it was asked for) of each call from now on; the table takes every tensor for one on CUDA.

    No kernel runs there.
    """
    from wyfold.kernels import table
    from wyfold.ops import plan_cache
    from wyfold.runtime import triton_support

    calls, plan = [], table.plan
    monkeypatch.setattr(plan_cache, "_plans", {})  # no plan made for tensors on the other device
    monkeypatch.setattr(
        triton_support, "support_of", lambda device: triton_support.Support("", "", "", "no kernel is wanted")
    )

    def planned(operator: str, device: torch.device, backend: str | None, **rest: Any):
        calls.append((operator, backend))
        return plan(operator, torch.device("cuda"), backend, **rest)

    monkeypatch.setattr(table, "plan", planned)
    return calls


class Float64Bounds:
    """The absolute bounds on float64 results; a relative RMS, and exact zeros where the truth is zero."""

    def output(self, name: str, got: torch.Tensor, truth: torch.Tensor) -> None:
        """Outputs and states of the operators."""
        self.within(name, got, truth, FAMILY_OUTPUT)

    def gradient(self, name: str, got: torch.Tensor, truth: torch.Tensor) -> None:
        """Gradients with respect to any argument."""
        self.within(name, got, truth, FAMILY_GRADIENT)

    def within(self, name: str, got: torch.Tensor, truth: torch.Tensor, bound: float) -> None:
        """`|got - truth| <= bound * |truth|`, both in float64 and of one shape."""
        assert got.dtype == truth.dtype == torch.float64, f"{name}: {got.dtype} against {truth.dtype}"
        assert got.shape == truth.shape, f"{name}: {tuple(got.shape)} against {tuple(truth.shape)}"
        error, size = torch.linalg.vector_norm(got - truth).item(), torch.linalg.vector_norm(truth).item()
        assert error <= bound * size, f"{name}: |got - truth| = {error:.3e}, allowed {bound:.0e} * {size:.3e}"


@pytest.fixture(scope="session")
def float64_bounds() -> Float64Bounds:
    """`.output(name, got, truth)` and `.gradient(name, got, truth)`."""
    return Float64Bounds()


def results(
    op: Callable[..., Any],
    arguments: Mapping[str, Any],
    wrt: Iterable[str] | None = None,
    incoming: Mapping[str, torch.Tensor] | None = None,
    **options: Any,
) -> dict[str, torch.Tensor]:
    """Everything one call of a delta rule gives, by name: "o", "state", "states" and, of each x in `wrt`, "dx".

    Args:
        op: A public operator or its token loop.
        arguments: Keyword arguments. Tensors are left as they are, and keep their strides.
        wrt: Arguments to differentiate; None is every floating tensor. What a result does not depend on gets zeros.
        incoming: Gradients of "o" and "state" to feed back; what is missing takes no part. None draws both.
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
    """`results(op, arguments, ...)`."""
    return results
