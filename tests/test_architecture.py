"""Architecture rules, checked on syntax trees. docs/architecture.md gives the reason for each.

A rule is a function from one parsed file to the nodes that violate it. `VIOLATIONS` has a file for every rule that the
rule must refuse, so a rule that no longer detects anything fails as well. Checks that need a running interpreter are at
the end; each starts a fresh process.
"""

import ast
import re
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from tests import processes

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "wyfold"
TESTS = ROOT / "tests"
LANGUAGES = ("triton", "gluon")


@dataclass(frozen=True)
class File:
    """One parsed source file; `path` is relative to the repository."""

    path: Path
    text: str

    @property
    def subpackage(self) -> str:
        return self.path.parts[2].removesuffix(".py") if self.path.parts[0] == "src" else ""

    @property
    def tree(self) -> ast.Module:
        return _parse(self.text)

    @property
    def nodes(self) -> tuple[ast.AST, ...]:
        """The tree's nodes, in the order of `ast.walk`."""
        return _nodes(self.text)

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Every call with the dotted name of its function, empty if the function is not a dotted name."""
        for node in self.nodes:
            if isinstance(node, ast.Call):
                yield node, dotted(node.func)

    def imports(self) -> Iterator[tuple[ast.stmt, str]]:
        """Every import statement at any depth, with the module it names."""
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def _nodes(text: str) -> tuple[ast.AST, ...]:
    """Found once for all rules: `ast.walk` takes longer than any of them."""
    return tuple(ast.walk(_parse(text)))


def dotted(node: ast.AST) -> str:
    """`a.b.c` for nested attributes, empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


@cache
def files(folder: Path) -> list[File]:
    """All Python files below a folder, parsed lazily."""
    return [File(p.relative_to(ROOT), p.read_text(encoding="utf-8")) for p in sorted(folder.rglob("*.py"))]


def may_use_distributed(file: File) -> bool:
    """Whether a file may use `torch.distributed`."""
    return file.subpackage == "context_parallel" or file.path.stem in ("distributed", "sharded_checkpoint")


def is_kernel_file(path: Path) -> bool:
    """Whether the file is `triton.py`, or in the package `triton` that replaces a long one; Gluon likewise."""
    return path.stem in LANGUAGES or bool({parent.name for parent in path.parents} & set(LANGUAGES))


# --- rules for every file of the package -----------------------------------------------------------------------------


def environment_reads(file: File) -> Iterator[ast.AST]:
    """Only the user's cache, and plug-ins, which engines load without options, read environment variables."""
    if file.path.name in ("user_cache.py", "engine_hooks.py"):
        return
    for node in file.nodes:
        if dotted(node) in ("os.environ", "os.getenv") or (isinstance(node, ast.ImportFrom) and node.module == "os"):
            yield node


def atomics_and_tuning(file: File) -> Iterator[ast.AST]:
    """No atomics, no autotuning, no configuration lists in decorators."""
    for node in file.nodes:
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name.startswith("atomic_") or name in ("autotune", "heuristics"):
            yield node


def contraction_left_to_triton(file: File) -> Iterator[ast.AST]:
    """A launch states whether products and sums are contracted: the default changes from Triton 3.9 to 3.10."""
    for node in file.nodes:
        if isinstance(node, ast.Call) and dotted(node.func) == "launch_kernel":
            unpacked = any(keyword.arg is None for keyword in node.keywords)  # such as `Config.options`, which has it
            if not unpacked and not any(keyword.arg == "enable_fp_fusion" for keyword in node.keywords):
                yield node


def pickle_shell_network(file: File) -> Iterator[ast.AST]:
    """No unpickling, evaluation of code, shell or network; only `cli` starts processes."""
    unpickles = {"cloudpickle", "dill", "marshal", "multiprocessing", "pickle", "shelve"}
    network = {"ftplib", "http", "httpx", "pty", "requests", "smtplib", "socket", "socketserver", "ssl", "urllib"}
    for node, module in file.imports():
        root = module.partition(".")[0]
        if root in unpickles | network or (root == "subprocess" and file.subpackage != "cli"):
            yield node
    for call, name in file.calls():
        shell = any(k.arg == "shell" for k in call.keywords)
        code = ("eval", "exec", "__import__", "os.system", "os.popen", "torch.load", "torch.save", "torch.hub.load")
        if shell or name in code:
            yield call


def libraries_that_unpickle(file: File) -> Iterator[ast.AST]:
    """No loader of a library that unpickles or loads code; only ranks of one job exchange objects.

    `torch.distributed.checkpoint` unpickles unless it is given its safetensors storage.
    """
    loaders = {"dcp_to_torch_save", "FileSystemReader", "FileSystemWriter", "FsspecReader", "FsspecWriter"}
    loaders |= {"add_safe_globals", "load_library", "ProcessPoolExecutor", "torch_save_to_dcp", "Unpickler"}
    modules = {"torch.distributed.checkpoint.format_utils", "torch.multiprocessing", "torch.package"}
    exchanges = {"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}
    exchanges |= {"recv_object_list", "send_object_list"}
    keywords = {"allow_pickle", "checkpoint_id", "pickle_module", "trust_remote_code"}
    for node, module in file.imports():
        if module.rpartition(".")[2] in loaders or any(f"{module}.".startswith(f"{name}.") for name in modules):
            yield node
    for call, name in file.calls():
        last = name.rpartition(".")[2]
        if last in loaders or name in ("torch.export.load", "torch.jit.load"):
            yield call
        elif last in exchanges and not may_use_distributed(file):
            yield call
        elif any(keyword.arg in keywords for keyword in call.keywords):
            yield call
        elif name in ("checkpoint.load", "checkpoint.save") and file.path.stem == "sharded_checkpoint":
            if not any(keyword.arg in ("storage_reader", "storage_writer") for keyword in call.keywords):
                yield call


def import_forms(file: File) -> Iterator[ast.AST]:
    """Imports are absolute and name every object."""
    for node in file.nodes:
        if isinstance(node, ast.ImportFrom) and (node.level or any(alias.name == "*" for alias in node.names)):
            yield node


def clock_reads(file: File) -> Iterator[ast.AST]:
    """Only `cli` reads a clock. `timedelta` is allowed everywhere."""
    for node, module in file.imports():
        if (
            module != "datetime.timedelta"
            and file.subpackage != "cli"
            and module.partition(".")[0] in ("time", "timeit", "datetime")
        ):
            yield node


def torch_distributed(file: File) -> Iterator[ast.AST]:
    """Only `context_parallel`, `integrations` and two files of `cli` import `torch.distributed`."""
    for node, module in file.imports():
        if f"{module}.".startswith("torch.distributed.") and not (
            may_use_distributed(file) or file.subpackage == "integrations"
        ):
            yield node


def third_party_imports(file: File) -> Iterator[ast.AST]:
    """Outside `cli`, importing a module imports only torch and the standard library.

    Exempt are the files that define models and caches of transformers, which are imported when they are asked for.
    """
    if file.path.parent.name == "fla" and file.path.name in ("cache.py", "models.py"):
        return
    for node in file.tree.body:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        for module in modules:
            root = module.partition(".")[0]
            kernel = is_kernel_file(file.path) and root == "triton"
            if file.subpackage != "cli" and root not in {"torch", "wyfold", *sys.stdlib_module_names} and not kernel:
                yield node


def patches_and_test_code(file: File) -> Iterator[ast.AST]:
    """The package imports nothing of the tests, and assigns no attribute of another of its modules."""
    modules = set()
    for node, name in file.imports():
        if name.partition(".")[0] in ("tests", "pytest", "hypothesis", "unittest"):
            yield node
        path = PACKAGE.parent.joinpath(*name.split("."))
        if path.with_suffix(".py").is_file() or path.is_dir():
            modules.add(name.rpartition(".")[2])
    for node in file.nodes:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Attribute) and dotted(target.value) in modules for target in targets):
            yield node


def keyword_arguments(file: File) -> Iterator[ast.AST]:
    """Public functions have no `**kwargs`: an unknown keyword raises Python's own TypeError."""
    for node in file.nodes:
        if not isinstance(node, ast.FunctionDef) or file.subpackage not in ("ops", "layers", "models"):
            continue
        private = node.name.startswith("_") and node.name != "__init__"
        is_explain = node.name == "explain"  # passes an operator's arguments on
        if node.args.kwarg and not private and not is_explain:
            yield node


def assert_statements(file: File) -> Iterator[ast.AST]:
    """No `assert`: a user's mistake is a ValueError or TypeError that names the argument, also under -O."""
    for node in file.nodes:
        if isinstance(node, ast.Assert):
            yield node


def missing_docstring(file: File) -> Iterator[ast.AST]:
    """Every file has a module docstring."""
    if file.text.strip() and not ast.get_docstring(file.tree):
        yield file.tree.body[0]


def gate_kind(file: File) -> Iterator[ast.AST]:
    """Code branches on the kind of gate (one number per head, or a vector over channels) in tile/decay alone.

    `ops` builds records from the user's arguments and may look at the gate, and `runtime` checks it. `reference` and
    `layers` have separate recurrences and projections. All other folders pass the gate on. A test for None is allowed,
    as for any optional tensor; a branch on the gate's rank or on any other property is not.
    """
    if file.subpackage not in ("context_parallel", "autograd", "kernels", "tile") or "decay" in file.path.parts:
        return
    for node in file.nodes:
        if isinstance(node, ast.Attribute) and node.attr in ("dim", "ndim") and is_gate(node.value):
            yield node
        elif isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert) and asks_about_gate(node.test):
            yield node
        elif isinstance(node, ast.Match) and asks_about_gate(node.subject):
            yield node


def asks_about_gate(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare) and all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
        return False
    return is_gate(node) or any(asks_about_gate(child) for child in ast.iter_child_nodes(node))


def is_gate(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name in ("g", "G", "dg", "dG", "gate", "GATE")


def unnamed_results(file: File) -> Iterator[ast.AST]:
    """A function with more than three results returns a named record.

    Exempt are functions registered with torch, whose results follow their schema, methods of an autograd.Function, and
    public operators. Device functions return tiles in registers, which cannot be in a record. A tuple of text cells is
    exempt too.
    """
    shaped_by_others = set(PUBLIC)
    for call, name in file.calls():
        if name.rpartition(".")[2] == "register":
            shaped_by_others |= {dotted(argument) for argument in call.args}
    methods = {
        id(method)
        for node in file.nodes
        if isinstance(node, ast.ClassDef) and any(dotted(base).endswith("autograd.Function") for base in node.bases)
        for method in node.body
    }
    for node in file.nodes:
        if isinstance(node, ast.FunctionDef) and on_device(node):
            continue
        if isinstance(node, ast.FunctionDef) and node.name not in shaped_by_others and id(node) not in methods:
            yield from (part for part in annotated_tuples(node) if len(part.elts) > 3)
            if node.returns is None or ast.unparse(node.returns) != "tuple[str, ...]":
                yield from (
                    value for value in returned_values(node) if isinstance(value, ast.Tuple) and len(value.elts) > 3
                )


def on_device(function: ast.FunctionDef) -> bool:
    """Whether the function is a kernel or a device function."""
    names = (dotted(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list)
    return any(name in ("triton.jit", "gluon.jit") for name in names)


def annotated_tuples(function: ast.FunctionDef) -> Iterator[ast.Tuple]:
    """The elements of every `tuple[...]` in a return annotation."""
    for node in ast.walk(function.returns) if function.returns else ():
        if isinstance(node, ast.Subscript) and dotted(node.value) == "tuple" and isinstance(node.slice, ast.Tuple):
            yield node.slice


def returned_values(node: ast.AST) -> Iterator[ast.expr]:
    """The values of a function's own return statements, without those of nested functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return) and child.value:
            yield child.value
        elif not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield from returned_values(child)


def shapes_from_records(file: File) -> Iterator[ast.AST]:
    """A shape in device code reads no field of a record of constants: Triton 3.6 and 3.7 refuse it (TRITON-13).

    The interpreter accepts it, so only a compilation of that very branch would show it.
    """
    for function in file.nodes:
        if isinstance(function, ast.FunctionDef) and on_device(function):
            records = {a.arg for a in arguments_of(function) if a.annotation and dotted(a.annotation) == "tl.constexpr"}
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
                for shape in (x for x in call.args if isinstance(x, ast.Tuple | ast.List)):
                    fields = (x for x in ast.walk(shape) if isinstance(x, ast.Attribute))
                    yield from (x for x in fields if dotted(x.value) in records)


def arguments_of(function: ast.FunctionDef) -> list[ast.arg]:
    return [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]


def unlinked_todos(file: File) -> Iterator[ast.AST]:
    """A TODO has a link or a version."""
    for number, line in enumerate(file.text.splitlines(), 1):
        if re.search(r"#.*\b(TO(?:DO)|FIX(?:ME))\b", line) and not re.search(r"https?://|#\d+|\d+\.\d+", line):
            yield ast.Pass(lineno=number)


PACKAGE_RULES = (
    environment_reads,
    atomics_and_tuning,
    contraction_left_to_triton,
    pickle_shell_network,
    libraries_that_unpickle,
    import_forms,
    clock_reads,
    torch_distributed,
    third_party_imports,
    patches_and_test_code,
    keyword_arguments,
    assert_statements,
    missing_docstring,
    gate_kind,
    unnamed_results,
    shapes_from_records,
    unlinked_todos,
)


# --- rules for the tests ---------------------------------------------------------------------------------------------


PASSING_ON = ("dict", "os.environ.copy", "os.environ.clear", "os.environ.update")


def environment_switches(file: File) -> Iterator[ast.AST]:
    """No environment variable selects what is tested. Passing the environment on, and becoming a child, are allowed."""
    passed_on = set()
    for node in file.nodes:
        if isinstance(node, ast.Dict):
            passed_on |= {id(value) for key, value in zip(node.keys, node.values, strict=True) if key is None}
        elif isinstance(node, ast.Call) and dotted(node.func) in PASSING_ON:
            passed_on |= {id(part) for part in [*node.args, getattr(node.func, "value", None)]}
    for node in file.nodes:
        if dotted(node) == "os.getenv" or (dotted(node) == "os.environ" and id(node) not in passed_on):
            yield node


def typed_in_tolerances(file: File) -> Iterator[ast.AST]:
    """No literal tolerances: they are derived (reference.error), or equality is exact (torch.equal).

    The error measures themselves are tested against hand-made numbers, in one file.
    """
    for call, name in file.calls() if file.path.name != "test_error.py" else ():
        if name.rpartition(".")[2] in ("allclose", "isclose", "assert_close", "approx"):
            yield call
        elif any(k.arg in ("rtol", "atol") for k in call.keywords):
            yield call


TEST_RULES = (environment_switches, typed_in_tolerances, unlinked_todos)


VIOLATIONS = {
    environment_reads: ("runtime/plan.py", "import os\nflag = os.environ.get('X')"),
    atomics_and_tuning: ("kernels/scan/triton.py", "tl.atomic_add(p, x)"),
    contraction_left_to_triton: ("kernels/scan/triton.py", "launch_kernel(wyfold_scan_triton, 4, q, num_warps=4)"),
    pickle_shell_network: ("layers/cache.py", "state = torch.load(path)"),
    libraries_that_unpickle: ("cli/train/sharded_checkpoint.py", "checkpoint.load(tensors, checkpoint_id=folder)"),
    import_forms: ("ops/kda.py", "from wyfold.runtime.check import *"),
    clock_reads: ("runtime/kernel_configs.py", "from time import perf_counter"),
    torch_distributed: ("autograd/delta.py", "import torch.distributed as dist"),
    third_party_imports: ("models/disk.py", "import safetensors.torch"),
    patches_and_test_code: ("cli/verify.py", "from wyfold.kernels import table\ntable.kernel_module = print"),
    keyword_arguments: ("ops/kda.py", "def chunk_kda(q, **kwargs): ..."),
    assert_statements: ("runtime/check.py", "def shape(x):\n    assert x.dim() == 4"),
    missing_docstring: ("tile/dot/eager.py", "x = 1"),
    gate_kind: ("kernels/scan/eager.py", "decay = exp(G) if G.shape[-1] == K else None"),
    unnamed_results: ("kernels/ttt/eager.py", "def back(x) -> tuple[Tensor, Tensor, Tensor, State]: ..."),
    shapes_from_records: (
        "kernels/scan/triton.py",
        "@triton.jit\ndef zeros(SIZES: tl.constexpr):\n    return tl.zeros((SIZES.BT, 16), tl.float32)",
    ),
    unlinked_todos: ("ops/kda.py", f"# {'TO' + 'DO'}: later"),
    environment_switches: ("tests/ops/test_kda.py", "slow = 'SLOW' in os.environ"),
    typed_in_tolerances: ("tests/ops/test_kda.py", "assert torch.allclose(a, b)"),
}


@pytest.mark.parametrize("rule", VIOLATIONS, ids=lambda rule: rule.__name__)
def test_every_rule_refuses_its_violation(rule: Callable[[File], Iterator[ast.AST]]):
    path, text = VIOLATIONS[rule]
    where = Path(path) if path.startswith("tests/") else Path("src/wyfold") / path
    assert list(rule(File(where, text)))


@pytest.mark.parametrize(
    ("path", "text", "refused"),
    [
        ("cli/train/sharded_checkpoint.py", "checkpoint.load(tensors)", True),
        ("cli/train/sharded_checkpoint.py", "checkpoint.load(tensors, storage_reader=safetensors_storage)", False),
        ("cli/train/sharded_checkpoint.py", "metadata = checkpoint.FileSystemReader(folder).read_metadata()", True),
        ("cli/train/sharded_checkpoint.py", "from torch.distributed.checkpoint import FileSystemReader as R", True),
        ("cli/distributed.py", "dist.all_gather_object(heard, said)", False),
        ("cli/train/trainer.py", "dist.all_gather_object(heard, said)", True),
        ("cli/train/corpus.py", "numpy.load(path, allow_pickle=True)", True),
        ("cli/train/corpus.py", "numpy.load(path)", False),
        ("cli/bench/__init__.py", "from concurrent.futures import ProcessPoolExecutor", True),
        ("cli/bench/__init__.py", "from concurrent.futures import ThreadPoolExecutor", False),
        ("cli/bench/peers.py", "AutoModel.from_pretrained(name, trust_remote_code=True)", True),
        ("models/disk.py", "torch.jit.load(path)", True),
    ],
)
def test_loaders_that_unpickle_are_refused(path: str, text: str, refused: bool):
    assert bool(list(libraries_that_unpickle(File(Path("src/wyfold") / path, text)))) is refused


def test_every_rule_has_a_violation():
    assert set(VIOLATIONS) == {*PACKAGE_RULES, *TEST_RULES}


def test_unnamed_results_has_exemptions():
    """`unnamed_results` checks displays and annotations, and honours every exemption that its docstring lists."""
    display = "def forward(*arguments):\n    return o, states, *kept, last"
    for text, refused in [
        (display, True),
        ("def outer():\n    def inner() -> tuple[str, ...]:\n        return a, b, c, d\n    return a, b, c, d", True),
        (f"{display}\nregister('forward(Tensor x) -> Tensor[]', forward, lambda x: x)", False),
        ("class Call(torch.autograd.Function):\n    def backward(ctx, dx):\n        return dx, dx, dx, dx", False),
        ("class Call:\n    def backward(self, dx):\n        return dx, dx, dx, dx", True),
        ("def chunk_kda(q):\n    return q, q, q, q", False),
        ("@triton.jit\ndef spans(q):\n    return q, q, q, q", False),
        ("@triton.jit(do_not_specialize=['T'])\ndef spans(q):\n    return q, q, q, q", False),
        ("def cells() -> tuple[str, ...]:\n    return a, b, c, d", False),
        ("def three() -> tuple[Tensor, Tensor, Tensor]:\n    return x, y, z", False),
    ]:
        assert bool(list(unnamed_results(File(Path("src/wyfold/autograd/delta.py"), text)))) is refused, text


def violations(rule: Callable[[File], Iterator[ast.AST]], folder: Path) -> list[str]:
    places = (f"{file.path}:{getattr(node, 'lineno', 1)}" for file in files(folder) for node in rule(file))
    return list(dict.fromkeys(places))


@pytest.mark.parametrize("rule", PACKAGE_RULES, ids=lambda rule: rule.__name__)
def test_package_follows_rule(rule: Callable[[File], Iterator[ast.AST]]):
    assert not violations(rule, PACKAGE), rule.__doc__


@pytest.mark.parametrize("rule", TEST_RULES, ids=lambda rule: rule.__name__)
def test_tests_follow_rule(rule: Callable[[File], Iterator[ast.AST]]):
    assert not violations(rule, TESTS), rule.__doc__


# --- the package as a whole ------------------------------------------------------------------------------------------


def folders(subpackage: str) -> list[Path]:
    return sorted(p for p in (PACKAGE / subpackage).iterdir() if p.is_dir() and p.name != "__pycache__")


def has_eager(folder: Path) -> bool:
    """Whether a folder has an `eager.py`, or the package `eager` that replaces a long one."""
    return (folder / "eager.py").exists() or (folder / "eager" / "__init__.py").exists()


# Without an eager version. PyTorch has one kind of product; a device has several, which `dot` chooses among. A ring of
# stages has no counterpart in PyTorch; its test is tests/emulator/test_pipeline.py.
WITHOUT_EAGER = {PACKAGE / "tile" / "dot", PACKAGE / "kernels" / "pipeline"}


@pytest.mark.parametrize("subpackage", ["kernels", "tile"])
def test_every_kernel_folder_has_an_eager_file_and_a_test(subpackage: str):
    for folder in set(folders(subpackage)) - WITHOUT_EAGER:
        assert has_eager(folder), f"{folder} has no eager.py"
        assert (TESTS / subpackage / f"test_{folder.name}.py").exists(), f"no tests/{subpackage}/test_{folder.name}.py"


def test_every_operator_file_has_a_test():
    for file in files(PACKAGE / "ops"):
        public = {node.name for node in file.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)} & set(
            PUBLIC
        )
        if public:
            assert (TESTS / "ops" / f"test_{file.path.name}").exists(), f"no tests/ops/test_{file.path.name}"


def test_every_kernel_file_has_an_eager_version():
    for path in (p for name in LANGUAGES for p in (*PACKAGE.rglob(f"{name}.py"), *PACKAGE.rglob(name))):
        if path.parent not in WITHOUT_EAGER:
            assert has_eager(path.parent), f"{path} has no eager twin"


def kernel_names(sources: list[File]) -> list[str]:
    return [
        node.name
        for file in sources
        for node in file.nodes
        if isinstance(node, ast.FunctionDef) and node.name.startswith("wyfold_")
    ]


def test_kernel_names_are_unique():
    duplicates = [name for name, count in Counter(kernel_names(files(PACKAGE))).items() if count > 1]
    assert not duplicates, duplicates


def test_file_names_are_descriptive():
    banned = {"utils", "util", "common", "misc", "helper", "helpers", "new", "old", "v2", "fast", "fused"}
    cards = re.compile(r"(sm_?\d\d|hopper|blackwell|ampere|[abh][12]00)")
    for path in PACKAGE.rglob("*.py"):
        words = set(path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "_").split("_"))
        assert not words & banned, path
        assert not cards.search(path.stem), path


def test_no_operator_names_below_ops():
    below = ("context_parallel", "autograd", "kernels", "tile", "runtime")
    operators = ("delta_rule", "delta_net", "gdn", "kda")
    for path in (p for subpackage in below for p in (PACKAGE / subpackage).rglob("*.py")):
        assert not any(name in path.relative_to(PACKAGE).as_posix() for name in operators), path


def test_every_module_is_in_the_import_layers():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {c["type"] for c in contracts} == {"layers", "independence", "protected", "forbidden"}
    names = {p.stem for p in PACKAGE.iterdir() if (p / "__init__.py").exists() or p.suffix == ".py"}
    line = next(c for c in contracts if c["type"] == "layers")["layers"]
    layered = {name.strip(" ()").removeprefix("wyfold.") for layer in line for name in layer.split("|")}
    assert names - {"__init__", "__main__"} <= layered, "a module of the package that is missing from the layers"


# --- in a fresh process ----------------------------------------------------------------------------------------------

PUBLIC = """
    chunk_delta_rule chunk_gated_delta_product chunk_gated_delta_rule chunk_gdn chunk_gla chunk_kda chunk_ttt_linear
    fused_chunk_ttt_linear fused_recurrent_delta_rule fused_recurrent_gated_delta_product
    fused_recurrent_gated_delta_rule fused_recurrent_gdn fused_recurrent_gla fused_recurrent_kda
    fused_recurrent_ttt_linear TTTState solve_tril chunk_scaled_dot_kkt l2norm fused_gdn_gate fused_kda_gate
    chunk_dplr_delta_rule chunk_iplr_delta_rule fused_recurrent_dplr_delta_rule fused_recurrent_iplr_delta_rule
    chunk_rwkv7 fused_recurrent_rwkv7 fused_mul_recurrent_rwkv7 chunk_gdn2 fused_recurrent_gdn2 chunk_comba
    fused_recurrent_comba fused_beta_sigmoid causal_conv1d rms_norm_gated parallel_path_attn PathKeys SequenceLayout
    explain checked doctor UnsupportedError
""".split()


def test_public_names_are_importable_from_the_package():
    import wyfold

    missing = [name for name in PUBLIC if not hasattr(wyfold, name)]
    assert not missing, missing
    assert set(wyfold.__all__) >= set(PUBLIC)


def test_importing_needs_only_torch_and_initialises_no_device():
    """Torch is imported first; then importing a module that torch does not itself require raises."""
    code = """
        import importlib.metadata, re, sys
        import torch
        names = [re.match(r"[A-Za-z0-9_]+", r.replace("-", "_")).group() for r in importlib.metadata.requires("torch")]
        allowed = {"torch", "wyfold", "numpy", "mpmath", "markupsafe", *(n.lower() for n in names)} - {"triton"}
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                root = name.partition(".")[0]
                if root not in allowed and root not in sys.stdlib_module_names:
                    raise ImportError(f"import wyfold wants {name}")
        sys.meta_path.insert(0, Refuse())
        import wyfold, wyfold.integrations.fla, wyfold.integrations.transformers
        import wyfold.integrations.sglang, wyfold.integrations.vllm
        for name in wyfold.__all__:  # each is imported when it is first used
            getattr(wyfold, name)
        assert not torch.cuda.is_initialized()
    """
    done = processes.fresh().run(["-c", textwrap.dedent(code)])
    assert done.returncode == 0, done.stderr


def test_eager_runs_where_triton_cannot_be_imported():
    """PyTorch without Triton imports it neither."""
    code = """
        import sys
        assert "triton" not in sys.modules
        class Refuse:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "triton":
                    raise ModuleNotFoundError("triton is blocked", name=name)
        sys.meta_path.insert(0, Refuse())
        import torch, wyfold
        q, k, v = (torch.randn(1, 20, 2, 8, requires_grad=True) for _ in range(3))
        beta = torch.rand(1, 20, 2)
        for call in (
            lambda: wyfold.chunk_delta_rule(q, k, v, beta),
            lambda: wyfold.chunk_gated_delta_rule(q, k, v, -torch.rand(1, 20, 2), beta),
            lambda: wyfold.chunk_kda(q, k, v, -torch.rand(1, 20, 2, 8), beta),
            lambda: wyfold.fused_recurrent_kda(q, k, v, -torch.rand(1, 20, 2, 8), beta),
            lambda: wyfold.chunk_ttt_linear(q, k, v, torch.ones(2, 8), torch.zeros(2, 8), torch.rand(1, 20, 2, 1)),
        ):
            call()[0].sum().backward()
        assert "triton" not in sys.modules
    """
    done = processes.fresh().run(["-c", textwrap.dedent(code)])
    assert done.returncode == 0, done.stderr
