"""What the tests of the serving engines' plug-ins share: a float64 token loop, and reading an engine's sources."""

import ast
import contextlib
import importlib.util
import inspect
import logging
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from tests import processes
from torch import Tensor

from wyfold.integrations import engine_hooks
from wyfold.integrations.engine_hooks import Record
from wyfold.reference import error

ROOT = Path(__file__).resolve().parents[2]

ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest error of outputs and states, which are of size 1, by the coarsest dtype of the inputs and of the pool."""


class Gates(NamedTuple):
    """Gate parameters of a layer: A_log [HV], dt_bias [HV] or [HV * K], and the bound of KDA's bounded gate."""

    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None = None

    def decay(self, raw: Tensor) -> Tensor:
        """exp(g) of the pre-activations raw [T, HV] or [T, HV, K]."""
        rate = self.A_log.double().exp()
        bias = self.dt_bias.double().view(raw.shape[1:])
        if raw.ndim == 3:
            rate = rate[:, None]
        x = raw.double() + bias
        if self.lower_bound is not None:
            return torch.exp(self.lower_bound * torch.sigmoid(rate * x))
        return torch.exp(-rate * torch.nn.functional.softplus(x))


def token_loop(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, *, l2norm: bool = True
) -> tuple[Tensor, Tensor]:
    """One sequence in float64, token by token, with the state as engines keep it: [HV, V, K].

    Returns:
        o: [T, HV, V].
        states: [T, HV, V, K] after each token.
    """
    q, k, v, decay, beta, state = (x.double() for x in (q, k, v, decay, beta, state))
    if l2norm:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    group = v.shape[1] // q.shape[1]
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    outputs, states = [], []
    for t in range(len(q)):
        state = state * (decay[t][:, None, None] if decay.ndim == 2 else decay[t][:, None, :])
        error = v[t] - torch.einsum("hvk,hk->hv", state, k[t])
        state = state + torch.einsum("hv,hk->hvk", beta[t][:, None] * error, k[t])
        outputs.append(torch.einsum("hvk,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


def paged_pool(slots: int, HV: int, V: int, K: int, dtype: torch.dtype) -> Tensor:
    """A pool of random states whose slots lie apart, like an engine's pages."""
    page = HV * V * K + 64
    return torch.randn(slots, page).mul(0.3).to(dtype).as_strided((slots, HV, V, K), (page, V * K, K, 1))


def assert_near(actual: Tensor, expected: Tensor, *dtypes: torch.dtype) -> None:
    """Compare with a float64 result, up to the rounding of the coarsest dtype."""
    bound = max(ROUNDING[dtype] for dtype in dtypes)
    found = error.largest(actual, expected)
    assert found <= bound * max(1.0, expected.abs().max().item()), found


def assert_same(name: str, actual: Tensor, expected: Tensor) -> None:
    """Compare results in float64 of which one computes its gates and norm in float32, as trainers do."""
    found = error.rms(actual, expected.double())
    assert found <= 2.0**-20, f"{name}: {found}"


def parameters(function: Callable[..., object]) -> list[str]:
    return list(inspect.signature(function).parameters)


def sources(package: str) -> Path:
    """Folder that contains an installed package, found without importing it. Skips where it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed: its released signatures are not compared")
    return Path(spec.origin).parents[1]


def check_sources(record: Record) -> None:
    """Compare a record with the released sources of its package, read but not imported."""
    root = sources(record.package)
    for module, functions in record.modules.items():
        for name, expected in functions.items():
            assert _parameters_in_source(root, module, name) == expected, f"{module}: {name}"


def _parameters_in_source(root: Path, module: str, name: str) -> list[str]:
    file = root / (module.replace(".", "/") + ".py")
    folder = file.with_suffix("")
    is_package = not file.exists()
    tree = ast.parse((folder / "__init__.py" if is_package else file).read_text(encoding="utf-8"))
    first, _, rest = name.partition(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and any((x.asname or x.name) == first for x in node.names):
            original = next(x.name for x in node.names if (x.asname or x.name) == first)
            package = module.split(".") if is_package else module.split(".")[:-1]
            package = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*package, *([node.module] if node.module else [])])
            return _parameters_in_source(root, source, f"{original}.{rest}" if rest else original)
    node: ast.AST = tree
    for part in name.split("."):
        kinds = (ast.FunctionDef, ast.ClassDef)
        node = next(x for x in node.body if isinstance(x, kinds) and x.name == part)  # type: ignore[attr-defined]
    assert isinstance(node, ast.FunctionDef)
    arguments = node.args
    found = [x.arg for x in (*arguments.posonlyargs, *arguments.args)]
    found += [arguments.vararg.arg] if arguments.vararg else []
    found += [x.arg for x in arguments.kwonlyargs]
    found += [arguments.kwarg.arg] if arguments.kwarg else []
    is_classmethod = any(isinstance(x, ast.Name) and x.id == "classmethod" for x in node.decorator_list)
    return found[1:] if is_classmethod else found


def stub_source(record: Record, module: str, results: dict[str, object] | None = None) -> str:
    """Source of a stub of an engine's module: the recorded functions, which return their results or their names.

    Each call's name is appended to the module's list `calls`.
    """
    classes: dict[str, list[str]] = {"": ["import types", "calls = []"]}
    for name, names in record.modules[module].items():
        owner, _, function = name.rpartition(".")
        body = f"calls.append({name!r}); return {(results or {}).get(name, name)!r}"
        if function == "__init__":
            body = f"calls.append({name!r})"
        arguments = ", ".join("**kwargs" if x == "kwargs" else f"{x}=None" for x in names)
        indent = "    " if owner else ""
        classes.setdefault(owner, []).append(f"{indent}def {function}({arguments}): {body}")
    lines = classes.pop("")
    for owner, functions in classes.items():
        lines += [f"class {owner}:", *functions]
    return "\n".join(lines) + "\n"


@contextlib.contextmanager
def logged(name: str) -> Iterator[list[tuple[str, str]]]:
    """(level, message) of each line that a logger gets inside the block."""
    found: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@contextlib.contextmanager
def stub_module(folder: Path, stubs: dict[str, str]) -> Iterator[Callable[[str], ModuleType]]:
    """Importer of stubs of an engine's modules, name -> source, which are removed from `sys.modules` afterwards."""
    for name, source in stubs.items():
        file = folder / (name.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        for package in file.relative_to(folder).parents[:-1]:
            (folder / package / "__init__.py").touch()
        file.write_text(source, encoding="utf-8")
    root = next(iter(stubs)).partition(".")[0]
    kept = {key: sys.modules.pop(key) for key in list(sys.modules) if key.partition(".")[0] == root}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(folder))
        for key in [key for key in sys.modules if key.partition(".")[0] == root]:
            del sys.modules[key]
        sys.modules.update(kept)
        engine_hooks._waiting.clear()


def run_script(module: str, last_line: str) -> None:
    """Run a script in another process, because an engine changes its process. Skips where it exits with 77."""
    ran = processes.fresh().run(["-m", module], cwd=ROOT)
    if ran.returncode == 77:
        pytest.skip(ran.stdout.strip().splitlines()[-1])
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert ran.stdout.strip().splitlines()[-1] == last_line


def entry_point(group: str) -> object:
    """The object that pyproject.toml names in a group of entry points."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        value = tomllib.load(file)["project"]["entry-points"][group]["wyfold"]
    module, _, name = value.partition(":")
    return getattr(importlib.import_module(module), name)
