"""`wyfold --help` waited seconds for PyTorch, and README's `wyfold.integrations.transformers` was an AttributeError.

Names of the package are imported at their first use. Help, refusals and checks of files do not import torch.
"""

import ast
import inspect
import json
import pickle
import subprocess
import sys
import textwrap

import pytest

import wyfold
from wyfold import cli


def fresh(code: str) -> str:
    """Run code in a new process, which must succeed, and return its standard output."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_wyfold_imports_no_torch():
    assert fresh("import sys, wyfold; print(wyfold.__version__, 'torch' in sys.modules)").split()[1] == "False"


def test_help_of_every_verb_needs_no_torch():
    fresh(f"""
        import sys
        from wyfold.cli import main
        for words in (["--help"], ["--version"], *([verb, "--help"] for verb in {tuple(cli.VERBS)!r})):
            assert main(words) == 0, words
            assert not {{"torch", "numpy", "matplotlib", "triton"}} & set(sys.modules), words
    """)


REFUSED = (
    "polish",
    "train --stepz 3",
    "train --steps 0",
    "train --device",
    "train --device 9",
    "train --data nowhere",
    "train --data binary",
    "train --data empty",
    "train --data text --out text/run",
    "train --backend cuda",
    "tasks --task go",
    "tasks --out text",
    "generate nowhere",
    "generate text",
    "generate . --prompts nowhere",
    "generate . --prompts binary",
    "generate . --prompts blank",
    "generate . --prompt x --out nowhere/file",
    "generate . --prompt x --out .",
    "generate . --top-p 1.5",
    "bench gru",
    "bench gdn --shapes 1,64,2",
    "bench gdn --gates odd",
    "bench gdn --dtype float8",
    "bench gdn --peers flax",
    "bench solve --chunk 48",
    "bench gdn --out text",
    "verify --device 9",
    "verify --out text",
    "report nowhere",
    "report text",
    "tune skan",
)


@pytest.fixture(scope="module")
def refused_commands(tmp_path_factory) -> dict[str, list[str]]:
    """For every refused command, in a folder with a few files: exit code, whether torch was imported, and message."""
    folder = tmp_path_factory.mktemp("refused")
    for name, content in (("text", b"some text\n" * 9), ("binary", b"a\0b"), ("empty", b""), ("blank", b"\n\n")):
        (folder / name).write_bytes(content)
    said = fresh(
        f"""
        import contextlib, io, json, os, sys
        from wyfold.cli import main
        os.chdir({str(folder)!r})
        ends = {{}}
        for words in {REFUSED!r}:
            with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()):
                code = main(words.split())
            ends[words] = [code, "torch" in sys.modules, said.getvalue()]
        print(json.dumps(ends))
        """
    )
    return json.loads(said)


@pytest.mark.parametrize("words", REFUSED)
def test_a_refusal_needs_no_torch(words: str, refused_commands: dict[str, list[str]]):
    code, torch_imported, said = refused_commands[words]
    assert code == 2, said
    assert said.startswith("wyfold") and said.count("\n") == 1
    assert not torch_imported


def test_names_in_the_readme_are_reachable_after_import_wyfold():
    fresh("""
        import sys, wyfold
        wyfold.integrations.transformers.patch
        wyfold.integrations.fla.chunk_kda
        wyfold.integrations.dtensor.parallelize
        wyfold.serving.decode
        wyfold.layers.GatedDeltaNet
        wyfold.models.Decoder
        wyfold.cp.build_cp_context
        wyfold.chunk_gdn
        assert "transformers" not in sys.modules
    """)


def test_type_checkers_and_python_see_the_same_names():
    """The imports under `TYPE_CHECKING`, the run-time table and `__all__` list the same names."""
    tree = ast.parse(inspect.getsource(wyfold))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    read = {alias.name: node.module for node in typed.body for alias in node.names}
    submodules = {name for name, module in read.items() if module == "wyfold"}
    assert submodules == set(wyfold._SUBMODULES)
    assert {name: module for name, module in read.items() if module != "wyfold"} == wyfold._SOURCES
    assert set(wyfold.__all__) == {*wyfold._SOURCES, *wyfold._SUBMODULES}


def test_every_public_name_is_listed_and_importable():
    assert set(wyfold.__all__) <= set(dir(wyfold))
    everything: dict[str, object] = {}
    exec("from wyfold import *", everything)
    for name in wyfold.__all__:
        found = getattr(wyfold, name)
        assert found is everything[name]
        if not inspect.ismodule(found):
            assert pickle.loads(pickle.dumps(found)) is found
    assert set(wyfold.integrations.__all__) <= set(dir(wyfold.integrations))


@pytest.mark.parametrize("module", ["wyfold", "wyfold.integrations"])
def test_an_unknown_name_is_an_attribute_error(module: str):
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'chunk_gnd'"):
        sys.modules[module].chunk_gnd  # noqa: B018
    assert not hasattr(sys.modules[module], "__wrapped__")


@pytest.mark.parametrize(
    "first",
    [
        "import torch, wyfold",
        *(
            pytest.param(x, marks=pytest.mark.release)
            for x in ("import wyfold.layers", "import wyfold; wyfold.chunk_kda")
        ),
        "import wyfold; wyfold.integrations.flops.register()",
    ],
)
def test_operators_are_registered_by_the_first_import_of_one(first: str):
    """An exported program looks up operators by name."""
    fresh(f"""
        {first}
        import torch
        for name in ("delta_fwd", "ttt_fwd", "causal_conv1d_fwd", "solve_tril", "gate_fwd", "l2norm_fwd", "serve"):
            assert hasattr(torch.ops.wyfold, name), name
    """)


@pytest.mark.long
def test_a_first_use_inside_a_compiled_function_has_no_graph_break():
    fresh("""
        import sys
        import wyfold, torch
        @torch.compile(fullgraph=True, backend="aot_eager")
        def call(q, g):
            return wyfold.chunk_gdn(q, q, q, g, g.exp())[0]
        assert "wyfold.ops" not in sys.modules
        q, g = torch.randn(1, 20, 2, 8), -torch.rand(1, 20, 2)
        assert torch.equal(call(q, g), wyfold.chunk_gdn(q, q, q, g, g.exp())[0])
    """)


def test_unsupported_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(wyfold.UnsupportedError("op: no", {"triton": "no card"})))
    assert (str(error), error.reasons) == ("op: no\n  triton: no card", {"triton": "no card"})
