"""Invalid arguments to the delta rules: the error of each kind, raised before anything runs.

A row of the table changes one legal call. The message must name the operator, the argument, the expected and the actual
value. No kernel module of `kernels/table.py` may have been looked up.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import wyfold
from wyfold import SequenceLayout, UnsupportedError
from wyfold.kernels import table
from wyfold.reference.shapes import GROUPS, INVALID_CHUNK_SIZES, INVALID_PACKINGS, WIDTHS

CHUNK = (wyfold.chunk_delta_rule, wyfold.chunk_gated_delta_rule, wyfold.chunk_kda)
RECURRENT = (wyfold.fused_recurrent_delta_rule, wyfold.fused_recurrent_gated_delta_rule, wyfold.fused_recurrent_kda)
GATED = (*CHUNK[1:], *RECURRENT[1:])
KDA = (CHUNK[2], RECURRENT[2])
ALL = (*CHUNK, *RECURRENT)
B, T, H, HV, K, V, N = 2, 20, 2, 4, 16, 24, 3


def legal(op: Callable, packed: bool = False) -> dict[str, Any]:
    rows = 1 if packed else B
    a = {
        "q": torch.randn(rows, T, H, K),
        "k": torch.randn(rows, T, H, K),
        "v": torch.randn(rows, T, HV, V),
        "beta": torch.rand(rows, T, HV),
        "initial_state": torch.randn(N if packed else B, HV, K, V),
    }
    if op in GATED:
        a["g"] = -torch.rand(rows, T, HV, *([K] if op in KDA else []))
    if packed:
        a["cu_seqlens"] = torch.tensor([0, 5, 11, 20])
    return a


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """Stages looked up so far."""
    asked = []
    launches = table.kernel_module

    def counted(stage: str, backend: str):
        asked.append(stage)
        return launches(stage, backend)

    monkeypatch.setattr(table, "kernel_module", counted)
    return asked


# kind: (operators, whether packed, what is changed, error, argument it names, what it expects, what it got)
Kind = tuple[tuple[Callable, ...], bool, dict[str, Any], type[Exception], str, str, str]
KINDS: dict[str, Kind] = {}


def kind(
    name: str, argument: str, expects: str, got: str, change: dict[str, Any], *, ops=ALL, packed=False, error=ValueError
) -> None:
    assert name not in KINDS
    KINDS[name] = (ops, packed, change, error, argument, expects, got)


# --- Python types ---
for bad in ([[1.0]], 1.0, "q"):
    kind(f"q is {type(bad).__name__}", "q", "torch.Tensor", type(bad).__name__, {"q": bad}, error=TypeError)
kind("k missing", "k", "torch.Tensor", "NoneType", {"k": None}, error=TypeError)
kind("v missing", "v", "torch.Tensor", "NoneType", {"v": None}, error=TypeError)
kind("g is a number", "g", "torch.Tensor", "float", {"g": -0.1}, ops=GATED, error=TypeError)
kind("beta is a number", "beta", "torch.Tensor", "float", {"beta": 0.5}, error=TypeError)
kind("initial_state is a list", "initial_state", "torch.Tensor", "list", {"initial_state": []}, error=TypeError)
kind(
    "A_log is a number",
    "A_log",
    "torch.Tensor",
    "float",
    {"A_log": 1.0, "use_gate_in_kernel": True},
    ops=GATED,
    error=TypeError,
)
kind(
    "dt_bias is a list",
    "dt_bias",
    "torch.Tensor",
    "list",
    {"dt_bias": [0.0], "use_gate_in_kernel": True},
    ops=GATED,
    error=TypeError,
)
kind("scale is a tensor", "scale", "number", "Tensor", {"scale": torch.tensor(1.0)}, error=TypeError)
kind("scale is a word", "scale", "number", "str", {"scale": "1"}, error=TypeError)
kind("scale is a flag", "scale", "number", "bool", {"scale": True}, error=TypeError)
kind(
    "cu_seqlens is a list",
    "cu_seqlens",
    "torch.Tensor",
    "list",
    {"cu_seqlens": [0, 5, 20]},
    packed=True,
    error=TypeError,
)
kind(
    "cu_seqlens_cpu is a list",
    "cu_seqlens_cpu",
    "torch.Tensor",
    "list",
    {"cu_seqlens_cpu": [0, 5, 11, 20]},
    ops=CHUNK,
    packed=True,
    error=TypeError,
)
kind(
    "checkpoint_every is a float",
    "checkpoint_every",
    "int",
    "float",
    {"return_intermediate_states": True, "checkpoint_every": 64.0},
    error=TypeError,
)
kind("state_dtype is a word", "state_dtype", "torch.dtype", "str", {"state_dtype": "float32"}, error=TypeError)
kind(
    "lower_bound is a word",
    "lower_bound",
    "number",
    "str",
    {"lower_bound": "-5", "safe_gate": True},
    ops=KDA,
    error=TypeError,
)
for flag in (
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "state_v_first",
    "return_intermediate_states",
    "batch_invariant",
):
    kind(f"{flag} is a number", flag, "True or False", "1", {flag: 1}, error=TypeError)
kind(
    "use_gate_in_kernel is a word",
    "use_gate_in_kernel",
    "True or False",
    "'yes'",
    {"use_gate_in_kernel": "yes"},
    ops=GATED,
    error=TypeError,
)
kind("safe_gate is None", "safe_gate", "True or False", "None", {"safe_gate": None}, ops=KDA, error=TypeError)
kind(
    "disable_recompute is a number",
    "disable_recompute",
    "True or False",
    "0",
    {"disable_recompute": 0},
    ops=CHUNK,
    error=TypeError,
)

# --- shapes ---
kind("q has three axes", "q", "[B, T, H, K]", "[2, 20, 16]", {"q": torch.randn(B, T, K)})
kind("k has another width", "k", "[2, 20, 2, 16]", "[2, 20, 2, 24]", {"k": torch.randn(B, T, H, 24)})
kind("k has other heads", "k", "[2, 20, 2, 16]", "[2, 20, 4, 16]", {"k": torch.randn(B, T, HV, K)})
kind("k is longer", "k", "[2, 20, 2, 16]", "[2, 21, 2, 16]", {"k": torch.randn(B, T + 1, H, K)})
kind("v is shorter", "v", "[2, 20, HV, V]", "[2, 19, 4, 24]", {"v": torch.randn(B, T - 1, HV, V)})
kind("v has another batch", "v", "[2, 20, HV, V]", "[3, 20, 4, 24]", {"v": torch.randn(3, T, HV, V)})
kind("v has three axes", "v", "[B, T, HV, V]", "[2, 20, 24]", {"v": torch.randn(B, T, V)})
kind("v head first", "v", "[2, 20, HV, V]", "[2, 4, 20, 24]", {"v": torch.randn(B, HV, T, V)})
kind(
    "v has no multiple of the heads",
    "v",
    "multiple of the 2 heads",
    "3 value heads",
    {"v": torch.randn(B, T, 3, V), "g": None, "beta": None, "initial_state": None},
)
kind(
    "v has fewer heads",
    "v",
    "multiple of the 2 heads",
    "1 value heads",
    {"v": torch.randn(B, T, 1, V), "g": None, "beta": None, "initial_state": None},
)
kind(
    "g per channel for a scalar gate",
    "g",
    "[B, T, HV]",
    "[2, 20, 4, 16]",
    {"g": torch.zeros(B, T, HV, K)},
    ops=(CHUNK[1], RECURRENT[1]),
)
kind("g scalar for a channel gate", "g", "[2, 20, 4, 16]", "[2, 20, 4]", {"g": torch.zeros(B, T, HV)}, ops=KDA)
kind("g of the key heads", "g", "[2, 20, 4, 16]", "[2, 20, 2, 16]", {"g": torch.zeros(B, T, H, K)}, ops=KDA)
kind("beta of the key heads", "beta", "[2, 20, 4]", "[2, 20, 2]", {"beta": torch.rand(B, T, H)})
kind("beta with a column", "beta", "[B, T, HV]", "[2, 20, 4, 1]", {"beta": torch.rand(B, T, HV, 1)})
kind(
    "initial_state V-first unasked",
    "initial_state",
    "[2, 4, 16, 24]",
    "[2, 4, 24, 16]",
    {"initial_state": torch.randn(B, HV, V, K)},
)
kind(
    "initial_state K-first",
    "initial_state",
    "[N, HV, V, K] = [2, 4, 24, 16]",
    "[2, 4, 16, 24]",
    {"state_v_first": True},
)
kind(
    "initial_state of one sequence",
    "initial_state",
    "[2, 4, 16, 24]",
    "[1, 4, 16, 24]",
    {"initial_state": torch.randn(1, HV, K, V)},
)
kind(
    "initial_state per batch row of a packed call",
    "initial_state",
    "[3, 4, 16, 24]",
    "[1, 4, 16, 24]",
    {"initial_state": torch.randn(1, HV, K, V)},
    packed=True,
)
kind(
    "initial_state of the key heads",
    "initial_state",
    "[2, 4, 16, 24]",
    "[2, 2, 16, 24]",
    {"initial_state": torch.randn(B, H, K, V)},
)
kind(
    "A_log of another length",
    "A_log",
    "HV = 4 elements",
    "[2]",
    {"A_log": torch.zeros(2), "use_gate_in_kernel": True},
    ops=GATED,
)
kind(
    "dt_bias of another length",
    "dt_bias",
    "[HV] = [4]",
    "[2]",
    {"dt_bias": torch.zeros(2), "use_gate_in_kernel": True},
    ops=(CHUNK[1], RECURRENT[1]),
)
kind(
    "dt_bias per head for a channel gate",
    "dt_bias",
    "[HV, K] or [HV * K] = [4, 16] or [64]",
    "[4]",
    {"dt_bias": torch.zeros(HV), "use_gate_in_kernel": True},
    ops=KDA,
)
kind(
    "dt_bias turned",
    "dt_bias",
    "[4, 16]",
    "[16, 4]",
    {"dt_bias": torch.zeros(K, HV), "use_gate_in_kernel": True},
    ops=KDA,
)
for width in (0, 257):
    kind(
        f"width K = {width}",
        "q and k",
        "from 1 to 256",
        str(width),
        {"q": torch.randn(B, T, H, width), "k": torch.randn(B, T, H, width), "g": None, "initial_state": None},
    )
for width in (0, 513):
    kind(
        f"width V = {width}",
        "v",
        "from 1 to 512",
        str(width),
        {"v": torch.randn(B, T, HV, width), "initial_state": None},
    )

# --- dtypes and devices ---
for dtype in (torch.int64, torch.bool, torch.complex64):
    name = str(dtype).removeprefix("torch.")
    kind(f"q is {name}", "q", "float32", name, {"q": torch.zeros(B, T, H, K, dtype=dtype)})
kind("k is narrower than q", "k", "dtype of q, float32", "bfloat16", {"k": torch.randn(B, T, H, K).bfloat16()})
kind("v is wider than q", "v", "dtype of q, float32", "float64", {"v": torch.randn(B, T, HV, V).double()})
kind(
    "g is an integer",
    "g",
    "float32",
    "int64",
    {"g": torch.zeros(B, T, HV, dtype=torch.int64)},
    ops=(CHUNK[1], RECURRENT[1]),
)
kind("beta is an integer", "beta", "float32", "int32", {"beta": torch.ones(B, T, HV, dtype=torch.int32)})
kind(
    "initial_state is an integer",
    "initial_state",
    "float32",
    "int64",
    {"initial_state": torch.zeros(B, HV, K, V, dtype=torch.int64)},
)
kind(
    "initial_state is wider than the arithmetic",
    "initial_state",
    "float32, bfloat16 or float16",
    "float64",
    {"initial_state": torch.zeros(B, HV, K, V).double()},
)
kind(
    "A_log is an integer",
    "A_log",
    "float32",
    "int64",
    {"A_log": torch.zeros(HV).long(), "use_gate_in_kernel": True},
    ops=GATED,
)
kind("state_dtype is an integer", "state_dtype", "float32, bfloat16 or float16", "int32", {"state_dtype": torch.int32})
kind(
    "state_dtype is wider than the arithmetic",
    "state_dtype",
    "float32, bfloat16 or float16",
    "float64",
    {"state_dtype": torch.float64},
)
kind("k on another device", "k", "device of q, cpu", "meta", {"k": torch.empty(B, T, H, K, device="meta")})
kind("beta on another device", "beta", "device of q, cpu", "meta", {"beta": torch.empty(B, T, HV, device="meta")})
kind(
    "initial_state on another device",
    "initial_state",
    "device of q, cpu",
    "meta",
    {"initial_state": torch.empty(B, HV, K, V, device="meta")},
)
kind(
    "A_log on another device",
    "A_log",
    "device of q, cpu",
    "meta",
    {"A_log": torch.empty(HV, device="meta"), "use_gate_in_kernel": True},
    ops=GATED,
)
kind(
    "cu_seqlens on another device",
    "cu_seqlens",
    "on cpu",
    "meta",
    {"cu_seqlens": torch.empty(4, dtype=torch.int64, device="meta")},
    packed=True,
)
kind("q is sparse", "q", "strided", "sparse_coo", {"q": torch.randn(B, T, H, K).to_sparse()})

# --- boundaries ---
kind("cu_seqlens with a batch", "cu_seqlens", "B = 1", "B = 2", {"cu_seqlens": torch.tensor([0, 20])})
kind(
    "cu_seqlens is a float",
    "cu_seqlens",
    "int32 or int64",
    "float32",
    {"cu_seqlens": torch.tensor([0.0, 5, 11, 20])},
    packed=True,
)
kind(
    "cu_seqlens is int16",
    "cu_seqlens",
    "int32 or int64",
    "int16",
    {"cu_seqlens": torch.tensor([0, 5, 11, 20]).short()},
    packed=True,
)
kind(
    "cu_seqlens has two axes",
    "cu_seqlens",
    "[N+1]",
    "[1, 4]",
    {"cu_seqlens": torch.tensor([[0, 5, 11, 20]])},
    packed=True,
)
kind(
    "cu_seqlens is empty",
    "cu_seqlens",
    "at least one entry",
    "[0]",
    {"cu_seqlens": torch.zeros(0, dtype=torch.int64)},
    packed=True,
)
kind(
    "cu_seqlens decreases",
    "cu_seqlens",
    "not decrease",
    "[0, 11, 5, 20]",
    {"cu_seqlens": torch.tensor([0, 11, 5, 20])},
    packed=True,
)
kind(
    "cu_seqlens not from 0",
    "cu_seqlens",
    "begin with 0",
    "1",
    {"cu_seqlens": torch.tensor([1, 5, 11, 20])},
    packed=True,
)
kind(
    "cu_seqlens beyond the buffer",
    "cu_seqlens",
    "at most at T = 20",
    "21",
    {"cu_seqlens": torch.tensor([0, 5, 11, 21])},
    packed=True,
)
kind(
    "a layout of another buffer",
    "cu_seqlens",
    "T = 20 tokens",
    "19",
    {"cu_seqlens": SequenceLayout.from_lengths([5, 6, 8])},
    packed=True,
)
kind(
    "cu_seqlens_cpu alone",
    "cu_seqlens_cpu",
    "cu_seqlens",
    "cu_seqlens=None",
    {"cu_seqlens_cpu": torch.tensor([0, 20])},
    ops=CHUNK,
)
kind(
    "cu_seqlens_cpu of another length",
    "cu_seqlens_cpu",
    "[4]",
    "[3]",
    {"cu_seqlens_cpu": torch.tensor([0, 5, 20])},
    ops=CHUNK,
    packed=True,
)
kind(
    "cu_seqlens_cpu not on the CPU",
    "cu_seqlens_cpu",
    "on the CPU",
    "meta",
    {"cu_seqlens_cpu": torch.empty(4, dtype=torch.int64, device="meta")},
    ops=CHUNK,
    packed=True,
)
kind(
    "cu_seqlens_cpu decreases",
    "cu_seqlens_cpu",
    "not decrease",
    "[0, 11, 5, 20]",
    {"cu_seqlens_cpu": torch.tensor([0, 11, 5, 20])},
    ops=CHUNK,
    packed=True,
)

# --- ranges and combinations ---
for size in INVALID_CHUNK_SIZES:
    kind(f"chunk_size {size}", "chunk_size", "16, 32, 64", str(size), {"chunk_size": size}, ops=CHUNK)
kind("chunk_size is a float", "chunk_size", "16, 32, 64", "64.0", {"chunk_size": 64.0}, ops=CHUNK)
kind("max_splits 0", "max_splits", "at least 1", "0", {"max_splits": 0}, ops=CHUNK)
kind("max_splits is a float", "max_splits", "int", "float", {"max_splits": 4.0}, ops=CHUNK, error=TypeError)
kind("scale is not a number", "scale", "finite", "nan", {"scale": float("nan")})
kind("scale is infinite", "scale", "finite", "inf", {"scale": float("inf")})
kind(
    "A_log without the gate in the kernel",
    "A_log",
    "use_gate_in_kernel=True",
    "False",
    {"A_log": torch.zeros(HV)},
    ops=GATED,
)
kind(
    "dt_bias without the gate in the kernel",
    "dt_bias",
    "use_gate_in_kernel=True",
    "False",
    {"dt_bias": torch.zeros(HV)},
    ops=GATED,
)
kind("lower_bound without a flag", "lower_bound", "use_gate_in_kernel=True", "False", {"lower_bound": -5.0}, ops=KDA)
kind(
    "gate in the kernel without a gate",
    "g",
    "use_gate_in_kernel=True",
    "None",
    {"g": None, "use_gate_in_kernel": True},
    ops=GATED,
)
kind("safe gate without a gate", "g", "safe_gate=True", "None", {"g": None, "safe_gate": True}, ops=KDA)
kind("lower_bound of 0", "lower_bound", "below 0", "0.0", {"lower_bound": 0, "use_gate_in_kernel": True}, ops=KDA)
kind("lower_bound above 0", "lower_bound", "below 0", "1.0", {"lower_bound": 1.0, "use_gate_in_kernel": True}, ops=KDA)
kind(
    "lower_bound is not a number",
    "lower_bound",
    "finite",
    "nan",
    {"lower_bound": float("nan"), "use_gate_in_kernel": True},
    ops=KDA,
)
kind(
    "lower_bound too steep for a safe gate",
    "lower_bound",
    "[-5, 0)",
    "-5.5",
    {"lower_bound": -5.5, "safe_gate": True},
    ops=KDA,
)
kind(
    "sigmoid without a strength",
    "beta",
    "use_beta_sigmoid_in_kernel=True",
    "None",
    {"beta": None, "use_beta_sigmoid_in_kernel": True},
)
kind(
    "negative eigenvalues without the sigmoid",
    "allow_neg_eigval",
    "use_beta_sigmoid_in_kernel=True",
    "use_beta_sigmoid_in_kernel=False",
    {"allow_neg_eigval": True},
)
kind("checkpoint_every alone", "checkpoint_every", "return_intermediate_states=True", "64", {"checkpoint_every": 64})
kind(
    "checkpoint_every off the grid",
    "checkpoint_every",
    "multiple of chunk_size = 32",
    "48",
    {"return_intermediate_states": True, "checkpoint_every": 48, "chunk_size": 32},
    ops=CHUNK,
)
kind(
    "checkpoint_every of 0",
    "checkpoint_every",
    "at least 1",
    "0",
    {"return_intermediate_states": True, "checkpoint_every": 0},
)
kind("an unknown backend", "backend", "'eager', 'triton', 'gluon'", "'cuda'", {"backend": "cuda"})
kind(
    "a backend that stands in",
    "backend",
    "cannot serve",
    "cannot be chosen",
    {"backend": "gluon"},
    error=UnsupportedError,
)


@pytest.mark.parametrize("name", KINDS)
def test_kind(name: str, launched: list[str]):
    ops, packed, change, error, argument, expects, got = KINDS[name]
    for op in ops:
        call = legal(op, packed) | change
        if op not in GATED:
            call.pop("g", None)
        with pytest.raises(error) as raised:
            op(**call)
        text = str(raised.value)
        assert type(raised.value) is error, text
        assert text.startswith(f"{op.__name__}: ") and argument in text and expects in text and got in text, text
    assert launched == []


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.__name__)
def test_the_legal_calls_are_legal(op: Callable, launched: list[str]):
    for packed in (False, True):
        o, _ = op(**legal(op, packed))
        assert o.isfinite().all()
    assert launched


def test_there_are_enough_kinds():
    assert len(KINDS) >= 60


@pytest.mark.parametrize("op", ALL, ids=lambda op: op.__name__)
def test_unknown_keywords_raise_type_error(op: Callable, launched: list[str]):
    strangers = ["head_first", "transpose_state_layout", "chunk_indices", "cu_seq_lens_q"]
    of_chunks = ["chunk_size", "max_splits", "disable_recompute", "cu_seqlens_cpu", "cp_context"]
    strangers += [] if op in CHUNK else of_chunks
    strangers += [] if op in KDA else ["safe_gate", "lower_bound"]
    for name in strangers:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            op(**legal(op), **{name: None})
    assert launched == []


@pytest.mark.parametrize("name", INVALID_PACKINGS)
def test_boundaries_of_the_catalogue(name: str, launched: list[str]):
    packing = INVALID_PACKINGS[name]
    cu = torch.tensor(packing.cu_seqlens)
    q = torch.randn(1, packing.tokens, 1, 8)
    for op in ALL:
        with pytest.raises(ValueError, match=f"{op.__name__}: cu_seqlens must "):
            op(q, q, q, cu_seqlens=cu)
    with pytest.raises(ValueError, match="cu_seqlens must "):
        SequenceLayout(cu, packing.tokens)
    assert launched == []


@pytest.mark.parametrize("op", CHUNK, ids=lambda op: op.__name__)
def test_legal_widths_and_groups_are_not_refused(op: Callable):
    for width in WIDTHS:
        q = torch.randn(1, 3, 1, width)
        assert op(q, q, q)[0].shape == q.shape
    for group in GROUPS:
        q, v = torch.randn(1, 3, 2, 8), torch.randn(1, 3, 2 * group, 16)
        assert op(q, q, v)[0].shape == v.shape


# --- contents, inside checked() --------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", GATED, ids=lambda op: op.__name__)
def test_checked_refuses_a_positive_gate(op: Callable, launched: list[str]):
    a = legal(op)
    a["g"][1, 3, 2] = 1e-3
    with (
        wyfold.checked(),
        pytest.raises(ValueError, match=rf"{op.__name__}: g must be <= 0, .*got a largest value of 0\.001"),
    ):
        op(**a)
    assert launched == []
    assert op(**a)[0].isfinite().all()
    with wyfold.checked():
        op(**a, use_gate_in_kernel=True)  # a pre-activation may have any sign


@pytest.mark.parametrize("op", GATED, ids=lambda op: op.__name__)
def test_checked_refuses_a_nan_gate(op: Callable):
    a = legal(op)
    a["g"][1, 3, 2] = math.nan
    with wyfold.checked(), pytest.raises(ValueError, match=rf"{op.__name__}: g must be <= 0, .*got .* nan"):
        op(**a)


@pytest.mark.parametrize("op", KDA, ids=lambda op: op.__name__)
def test_checked_refuses_a_gate_under_the_asserted_bound(op: Callable, launched: list[str]):
    a = legal(op)
    a["g"][1, 3, 2, 5] = -2.5
    with wyfold.checked():
        op(**a, safe_gate=True)
        launched.clear()
        with pytest.raises(ValueError, match=rf"{op.__name__}: g must be at least -2.0 .*got a least value of -2\.5"):
            op(**a, safe_gate=True, lower_bound=-2.0)
    assert launched == []


@pytest.mark.parametrize("op", GATED, ids=lambda op: op.__name__)
def test_checked_reads_no_rows_past_the_last_boundary(op: Callable):
    a = legal(op, packed=True) | {"cu_seqlens": torch.tensor([0, 5, 11, 17])}
    a["g"][:, 17:] = 1.0
    with wyfold.checked():
        assert op(**a)[0].isfinite().all()


def test_checked_ends_with_its_context():
    a = legal(wyfold.chunk_gdn)
    a["g"].fill_(0.1)
    with wyfold.checked(), wyfold.checked():
        pass
    wyfold.chunk_gdn(**a)
    with pytest.raises(RuntimeError), wyfold.checked():
        raise RuntimeError
    wyfold.chunk_gdn(**a)
