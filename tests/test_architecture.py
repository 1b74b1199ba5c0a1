"""The laws that a machine can read, held by syntax tree (docs/architecture.md says why each exists).

A rule is a function from one parsed file to the lines that break it. `PLANTED` gives every rule a file it must refuse,
so that a rule that has gone blind fails as well. What needs a running interpreter stands at the end, each in a fresh
process.
"""

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOUSE = ROOT / "src" / "wyfold"
TESTS = ROOT / "tests"
LANGUAGES = ("triton", "gluon")


@dataclass(frozen=True)
class File:
    """One parsed source file; `path` is relative to the repository."""

    path: Path
    text: str

    @property
    def room(self) -> str:
        return self.path.parts[2].removesuffix(".py") if self.path.parts[0] == "src" else ""

    @property
    def tree(self) -> ast.Module:
        return _parse(self.text)

    def calls(self) -> Iterator[tuple[ast.Call, str]]:
        """Every call with the dotted name it calls, empty where that is no name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield node, dotted(node.func)

    def imports(self) -> Iterator[tuple[ast.stmt, str]]:
        """Every import statement, wherever it stands, with the module it names."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


@cache
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def dotted(node: ast.AST) -> str:
    """`a.b.c` of nested attributes, empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


def files(folder: Path) -> list[File]:
    return [File(p.relative_to(ROOT), p.read_text(encoding="utf-8")) for p in sorted(folder.rglob("*.py"))]


def joins_ranks(file: File) -> bool:
    """Whether a file may use `torch.distributed`."""
    return file.room == "context_parallel" or file.path.stem in ("distributed", "sharded_checkpoint")


def holds_kernels(path: Path) -> bool:
    """`triton.py`, or a file of the package `triton` where one file would be long; gluon likewise."""
    return path.stem in LANGUAGES or path.parent.name in LANGUAGES


# --- rules for every file of the package -----------------------------------------------------------------------------


def environment(file: File) -> Iterator[ast.AST]:
    """Nothing is read from the environment."""
    for node in ast.walk(file.tree):
        if dotted(node) in ("os.environ", "os.getenv") or (isinstance(node, ast.ImportFrom) and node.module == "os"):
            yield node


def atomics_and_tuning(file: File) -> Iterator[ast.AST]:
    """No atomics, no autotuning, no configuration lists in decorators."""
    for node in ast.walk(file.tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name.startswith("atomic_") or name in ("autotune", "heuristics"):
            yield node


def pickle_shell_network(file: File) -> Iterator[ast.AST]:
    """Nothing is unpickled, evaluated, given to a shell or fetched; only the command line starts processes."""
    unpickles = {"cloudpickle", "dill", "marshal", "multiprocessing", "pickle", "shelve"}
    talks = {"ftplib", "http", "httpx", "pty", "requests", "smtplib", "socket", "socketserver", "ssl", "urllib"}
    for node, module in file.imports():
        root = module.partition(".")[0]
        if root in unpickles | talks or (root == "subprocess" and file.room != "cli"):
            yield node
    for call, name in file.calls():
        shell = any(k.arg == "shell" for k in call.keywords)
        code = ("eval", "exec", "__import__", "os.system", "os.popen", "torch.load", "torch.save", "torch.hub.load")
        if shell or name in code:
            yield call


def libraries_that_unpickle(file: File) -> Iterator[ast.AST]:
    """No library is asked for a loader that unpickles or loads code; only ranks of one job exchange objects.

    `torch.distributed.checkpoint` does unless it is given its safetensors storage.
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
        elif last in exchanges and not joins_ranks(file):
            yield call
        elif any(keyword.arg in keywords for keyword in call.keywords):
            yield call
        elif name in ("checkpoint.load", "checkpoint.save") and file.path.stem == "sharded_checkpoint":
            if not any(keyword.arg in ("storage_reader", "storage_writer") for keyword in call.keywords):
                yield call


def star_imports(file: File) -> Iterator[ast.AST]:
    """Names come one by one, and by their full path."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ImportFrom) and (node.level or any(alias.name == "*" for alias in node.names)):
            yield node


def clocks(file: File) -> Iterator[ast.AST]:
    """Only the command line looks at a clock. A length of time is none."""
    for node, module in file.imports():
        if (
            module != "datetime.timedelta"
            and file.room != "cli"
            and module.partition(".")[0] in ("time", "timeit", "datetime")
        ):
            yield node


def torch_distributed(file: File) -> Iterator[ast.AST]:
    """Only `context_parallel`, `integrations` and two files of `cli` know that there are other ranks."""
    for node, module in file.imports():
        if f"{module}.".startswith("torch.distributed.") and not (joins_ranks(file) or file.room == "integrations"):
            yield node


def strangers(file: File) -> Iterator[ast.AST]:
    """Outside the command line nothing but torch and the standard library is imported when a module is."""
    for node in file.tree.body:
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        for module in modules:
            root = module.partition(".")[0]
            kernel = holds_kernels(file.path) and root == "triton"
            if file.room != "cli" and root not in {"torch", "wyfold", *sys.stdlib_module_names} and not kernel:
                yield node


def keyword_sinks(file: File) -> Iterator[ast.AST]:
    """What users call writes its signature out: an unknown keyword is Python's own TypeError."""
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.FunctionDef) or file.room not in ("ops", "layers", "models"):
            continue
        private = node.name.startswith("_") and node.name != "__init__"
        asks = node.name == "explain"  # passes an operator's own arguments on
        if node.args.kwarg and not private and not asks:
            yield node


def asserts(file: File) -> Iterator[ast.AST]:
    """A user's mistake is a ValueError or TypeError that names the argument, with and without -O."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Assert):
            yield node


def undocumented(file: File) -> Iterator[ast.AST]:
    """A file says what it is for in its first line."""
    if file.text.strip() and not ast.get_docstring(file.tree):
        yield file.tree.body[0]


def gate_kind(file: File) -> Iterator[ast.AST]:
    """Which gate it is, a number per head or a vector over channels, is asked in tile/decay alone.

    `ops` makes records out of the user's arguments and may look at them; `runtime` checks them; `reference` and
    `layers` have recurrences and projections of their own. Everything between hands the gate on. That none was given
    may be asked, as of any optional tensor; its rank, or anything else about it that decides what is done, may not.
    """
    if file.room not in ("context_parallel", "autograd", "kernels", "tile") or "decay" in file.path.parts:
        return
    for node in ast.walk(file.tree):
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


def nameless_results(file: File) -> Iterator[ast.AST]:
    """More than three results of a function of ours travel in a named record.

    Not ours to shape are functions registered with torch, whose results are what their schema says, the methods of an
    autograd.Function, and the public operators. A device function's are tiles in registers, which no record holds. A
    row of text cells is no record either.
    """
    shaped_by_others = set(PUBLIC)
    for call, name in file.calls():
        if name.rpartition(".")[2] == "register":
            shaped_by_others |= {dotted(argument) for argument in call.args}
    methods = {
        id(method)
        for node in ast.walk(file.tree)
        if isinstance(node, ast.ClassDef) and any(dotted(base).endswith("autograd.Function") for base in node.bases)
        for method in node.body
    }
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef) and on_device(node):
            continue
        if isinstance(node, ast.FunctionDef) and node.name not in shaped_by_others and id(node) not in methods:
            yield from (part for part in promised(node) if len(part.elts) > 3)
            if node.returns is None or ast.unparse(node.returns) != "tuple[str, ...]":
                yield from (value for value in returned(node) if isinstance(value, ast.Tuple) and len(value.elts) > 3)


def on_device(function: ast.FunctionDef) -> bool:
    """Whether it is a kernel or a device function."""
    names = (dotted(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list)
    return any(name in ("triton.jit", "gluon.jit") for name in names)


def promised(function: ast.FunctionDef) -> Iterator[ast.Tuple]:
    """The parts of every `tuple[...]` in what a function is annotated to return."""
    for node in ast.walk(function.returns) if function.returns else ():
        if isinstance(node, ast.Subscript) and dotted(node.value) == "tuple" and isinstance(node.slice, ast.Tuple):
            yield node.slice


def returned(node: ast.AST) -> Iterator[ast.expr]:
    """What a function's own return statements return, not those of functions inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return) and child.value:
            yield child.value
        elif not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            yield from returned(child)


def loose_ends(file: File) -> Iterator[ast.AST]:
    """A TODO carries a link or a version."""
    for number, line in enumerate(file.text.splitlines(), 1):
        if re.search(r"#.*\b(TO(?:DO)|FIX(?:ME))\b", line) and not re.search(r"https?://|#\d+|\d+\.\d+", line):
            yield ast.Pass(lineno=number)


HOUSE_RULES = (
    environment,
    atomics_and_tuning,
    pickle_shell_network,
    libraries_that_unpickle,
    star_imports,
    clocks,
    torch_distributed,
    strangers,
    keyword_sinks,
    asserts,
    undocumented,
    gate_kind,
    nameless_results,
    loose_ends,
)


# --- rules for the tests ---------------------------------------------------------------------------------------------


def switches(file: File) -> Iterator[ast.AST]:
    """No environment variable decides what is tested; handing the environment to a child process is not reading it."""
    handed_on = set()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Dict):
            handed_on |= {id(value) for key, value in zip(node.keys, node.values, strict=True) if key is None}
        elif isinstance(node, ast.Call) and dotted(node.func) in ("dict", "os.environ.copy"):
            handed_on |= {id(part) for part in [*node.args, getattr(node.func, "value", None)]}
    for node in ast.walk(file.tree):
        if dotted(node) == "os.getenv" or (dotted(node) == "os.environ" and id(node) not in handed_on):
            yield node


def typed_in_tolerances(file: File) -> Iterator[ast.AST]:
    """Tolerances are derived (reference.error) or promised (torch.equal), never typed in.

    The measures themselves are tested against hand-made numbers, in one file.
    """
    for call, name in file.calls() if file.path.name != "test_error.py" else ():
        if name.rpartition(".")[2] in ("allclose", "isclose", "assert_close", "approx"):
            yield call
        elif any(k.arg in ("rtol", "atol") for k in call.keywords):
            yield call


TEST_RULES = (switches, typed_in_tolerances, loose_ends)


PLANTED = {
    environment: ("runtime/plan.py", "import os\nflag = os.environ.get('X')"),
    atomics_and_tuning: ("kernels/scan/triton.py", "tl.atomic_add(p, x)"),
    pickle_shell_network: ("layers/cache.py", "state = torch.load(path)"),
    libraries_that_unpickle: ("cli/sharded_checkpoint.py", "checkpoint.load(tensors, checkpoint_id=folder)"),
    star_imports: ("ops/kda.py", "from wyfold.runtime.check import *"),
    clocks: ("runtime/kernel_configs.py", "from time import perf_counter"),
    torch_distributed: ("autograd/delta.py", "import torch.distributed as dist"),
    strangers: ("models/disk.py", "import safetensors.torch"),
    keyword_sinks: ("ops/kda.py", "def chunk_kda(q, **kwargs): ..."),
    asserts: ("runtime/check.py", "def shape(x):\n    assert x.dim() == 4"),
    undocumented: ("tile/dot/eager.py", "x = 1"),
    gate_kind: ("kernels/scan/eager.py", "decay = exp(G) if G.shape[-1] == K else None"),
    nameless_results: ("kernels/ttt/eager.py", "def back(x) -> tuple[Tensor, Tensor, Tensor, State]: ..."),
    loose_ends: ("ops/kda.py", f"# {'TO' + 'DO'}: later"),
    switches: ("tests/ops/test_kda.py", "slow = 'SLOW' in os.environ"),
    typed_in_tolerances: ("tests/ops/test_kda.py", "assert torch.allclose(a, b)"),
}


@pytest.mark.parametrize("rule", PLANTED, ids=lambda rule: rule.__name__)
def test_every_rule_can_fail(rule: Callable[[File], Iterator[ast.AST]]):
    path, text = PLANTED[rule]
    where = Path(path) if path.startswith("tests/") else Path("src/wyfold") / path
    assert list(rule(File(where, text)))


@pytest.mark.parametrize(
    ("path", "text", "refused"),
    [
        ("cli/sharded_checkpoint.py", "checkpoint.load(tensors)", True),
        ("cli/sharded_checkpoint.py", "checkpoint.load(tensors, storage_reader=safetensors_storage)", False),
        ("cli/sharded_checkpoint.py", "metadata = checkpoint.FileSystemReader(folder).read_metadata()", True),
        ("cli/sharded_checkpoint.py", "from torch.distributed.checkpoint import FileSystemReader as Reader", True),
        ("cli/distributed.py", "dist.all_gather_object(heard, said)", False),
        ("cli/trainer.py", "dist.all_gather_object(heard, said)", True),
        ("cli/corpus.py", "numpy.load(path, allow_pickle=True)", True),
        ("cli/corpus.py", "numpy.load(path)", False),
        ("cli/bench/__init__.py", "from concurrent.futures import ProcessPoolExecutor", True),
        ("cli/bench/__init__.py", "from concurrent.futures import ThreadPoolExecutor", False),
        ("cli/bench/peers.py", "AutoModel.from_pretrained(name, trust_remote_code=True)", True),
        ("models/disk.py", "torch.jit.load(path)", True),
    ],
)
def test_loaders_of_libraries_are_told_apart(path: str, text: str, refused: bool):
    assert bool(list(libraries_that_unpickle(File(Path("src/wyfold") / path, text)))) is refused


def test_every_rule_has_its_planted_file():
    assert set(PLANTED) == {*HOUSE_RULES, *TEST_RULES}


def test_results_that_torch_or_users_shape_need_no_name():
    """`nameless_results` sees a display as well as an annotation, and lets pass what it says it lets pass."""
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
        assert bool(list(nameless_results(File(Path("src/wyfold/autograd/delta.py"), text)))) is refused, text


def broken(rule: Callable[[File], Iterator[ast.AST]], folder: Path) -> list[str]:
    places = (f"{file.path}:{getattr(node, 'lineno', 1)}" for file in files(folder) for node in rule(file))
    return list(dict.fromkeys(places))


@pytest.mark.parametrize("rule", HOUSE_RULES, ids=lambda rule: rule.__name__)
def test_house(rule: Callable[[File], Iterator[ast.AST]]):
    assert not broken(rule, HOUSE), rule.__doc__


@pytest.mark.parametrize("rule", TEST_RULES, ids=lambda rule: rule.__name__)
def test_tests(rule: Callable[[File], Iterator[ast.AST]]):
    assert not broken(rule, TESTS), rule.__doc__


# --- the house as a whole --------------------------------------------------------------------------------------------


def folders(room: str) -> list[Path]:
    return sorted(p for p in (HOUSE / room).iterdir() if p.is_dir() and p.name != "__pycache__")


# PyTorch's products come in one kind; a device's in several, and which one is a decision made in one place.
WITHOUT_A_TWIN = {HOUSE / "tile" / "dot"}


@pytest.mark.parametrize("room", ["kernels", "tile"])
def test_every_step_has_an_eager_file_and_a_test_of_its_name(room: str):
    for folder in set(folders(room)) - WITHOUT_A_TWIN:
        assert (folder / "eager.py").exists(), f"{folder} has no eager.py"
        assert (TESTS / room / f"test_{folder.name}.py").exists(), f"no tests/{room}/test_{folder.name}.py"


def test_every_operator_file_has_a_test_of_its_name():
    for file in files(HOUSE / "ops"):
        public = {node.name for node in file.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)} & set(
            PUBLIC
        )
        if public:
            assert (TESTS / "ops" / f"test_{file.path.name}").exists(), f"no tests/ops/test_{file.path.name}"


def test_every_kernel_file_has_its_twin():
    for path in (p for name in LANGUAGES for p in (*HOUSE.rglob(f"{name}.py"), *HOUSE.rglob(name))):
        if path.parent not in WITHOUT_A_TWIN:
            assert path.with_name("eager.py").exists(), f"{path} has no eager twin"


def kernel_names(sources: list[File]) -> list[str]:
    return [
        node.name
        for file in sources
        for node in ast.walk(file.tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("wyfold_")
    ]


def test_kernel_names_lead_to_one_place():
    twice = [name for name, count in Counter(kernel_names(files(HOUSE))).items() if count > 1]
    assert not twice, twice


def test_file_names_say_what_is_inside():
    banned = {"utils", "util", "common", "misc", "helper", "helpers", "new", "old", "v2", "fast", "fused"}
    cards = re.compile(r"(sm_?\d\d|hopper|blackwell|ampere|[abh][12]00)")
    for path in HOUSE.rglob("*.py"):
        words = set(path.relative_to(HOUSE).with_suffix("").as_posix().replace("/", "_").split("_"))
        assert not words & banned, path
        assert not cards.search(path.stem), path


def test_operators_are_named_in_ops_and_above():
    below = ("context_parallel", "autograd", "kernels", "tile", "runtime")
    operators = ("delta_rule", "delta_net", "gdn", "kda")
    for path in (p for room in below for p in (HOUSE / room).rglob("*.py")):
        assert not any(name in path.relative_to(HOUSE).as_posix() for name in operators), path


def test_every_contract_of_the_import_order_is_there():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    assert {c["type"] for c in contracts} == {"layers", "independence", "protected", "forbidden"}
    rooms = {p.stem for p in HOUSE.iterdir() if (p / "__init__.py").exists() or p.suffix == ".py"}
    line = next(c for c in contracts if c["type"] == "layers")["layers"]
    placed = {name.strip(" ()").removeprefix("wyfold.") for layer in line for name in layer.split("|")}
    assert rooms - {"__init__", "__main__"} <= placed, "a room or door that the line does not place"


# --- in a fresh process ----------------------------------------------------------------------------------------------

PUBLIC = """
    chunk_delta_rule chunk_gated_delta_rule chunk_gdn chunk_kda chunk_ttt_linear fused_chunk_ttt_linear
    fused_recurrent_delta_rule fused_recurrent_gated_delta_rule fused_recurrent_gdn fused_recurrent_kda
    fused_recurrent_ttt_linear TTTState solve_tril chunk_scaled_dot_kkt l2norm fused_gdn_gate fused_kda_gate
    fused_beta_sigmoid causal_conv1d rms_norm_gated SequenceLayout explain checked doctor UnsupportedError
""".split()


def run(code: str) -> str:
    """stdout of a fresh interpreter, which must end well."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_public_names_are_importable_from_the_package():
    import wyfold

    missing = [name for name in PUBLIC if not hasattr(wyfold, name)]
    assert not missing, missing
    assert set(wyfold.__all__) >= set(PUBLIC)


def test_importing_needs_nothing_but_torch_and_starts_no_device():
    """Torch is loaded first; from then on an import of anything that torch does not itself require is an error."""
    run("""
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
        for name in wyfold.__all__:  # each is imported when it is first used
            getattr(wyfold, name)
        assert not torch.cuda.is_initialized()
    """)


def test_eager_runs_where_triton_cannot_be_imported():
    run("""
        import sys
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
    """)
