"""Argument checks: what each check accepts, and the messages of its errors."""

import math

import pytest
import torch

from wyfold.runtime import check
from wyfold.runtime.check import UnsupportedError


def test_letters_bind_and_must_agree():
    q, v = torch.zeros(2, 7, 3, 8), torch.zeros(2, 7, 6, 5)
    assert check.shapes("op", optional=("g",), q=(q, "B T H K"), g=(None, "B T HV"), v=(v, "B T HV V")) == {
        "B": 2, "T": 7, "H": 3, "K": 8, "HV": 6, "V": 5,
    }  # fmt: skip
    with pytest.raises(TypeError, match=r"^op: g must be a torch.Tensor, got NoneType$"):
        check.shapes("op", optional=("beta",), q=(q, "B T H K"), g=(None, "B T HV"))
    with pytest.raises(ValueError, match=r"^op: S must be \[N, HV\] = \[4, HV\], got \[3, 6\]$"):
        check.shapes("op", known={"N": 4}, S=(torch.zeros(3, 6), "N HV"))
    with pytest.raises(ValueError, match=r"^op: v must be \[B, T, H, V\] = \[2, 7, 3, V\], got \[2, 7, 6, 5\]$"):
        check.shapes("op", q=(q, "B T H K"), v=(v, "B T H V"))
    with pytest.raises(ValueError, match=r"^op: q must have 2 dimensions, \[B, T\], got \[2, 7, 3, 8\]$"):
        check.shapes("op", q=(q, "B T"))
    with pytest.raises(ValueError, match=r"^op: g must have 1 dimension, \[H\] = \[3\], got \[2, 7\]$"):
        check.shapes("op", q=(q, "B T H K"), g=(torch.zeros(2, 7), "H"))


def test_overlapping_elements():
    x = torch.zeros(4, 6, 5)
    each = [x, x.mT, x[::2, 1:, ::3], x[:0], x[:, :1].expand(4, 1, 5), torch.zeros(3, 1, 5)[:0].expand(0, 7, 5)]
    check.no_overlap("op", nothing=None, **{f"x{n}": y for n, y in enumerate(each)})
    for bad in (x[:1].expand(4, 6, 5), torch.zeros(9).unfold(0, 3, 2), torch.zeros(99).as_strided((2, 3), (4, 4))):
        with pytest.raises(ValueError, match=r"^op: x must hold no two numbers in one place, got strides \("):
            check.no_overlap("op", x=bad)


def test_a_letter_twice_in_one_shape_must_agree_too():
    check.shapes("op", S=(torch.zeros(4, 4), "D D"))
    with pytest.raises(ValueError, match=r"S must be \[D, D\]"):
        check.shapes("op", S=(torch.zeros(4, 5), "D D"))


def test_a_digit_stands_for_itself():
    assert check.shapes("op", eta=(torch.zeros(5, 1), "T 1")) == {"T": 5}
    with pytest.raises(ValueError, match=r"eta must be \[T, 1\], got \[5, 2\]"):
        check.shapes("op", eta=(torch.zeros(5, 2), "T 1"))


@pytest.mark.parametrize("x", [None, 1.0, [1.0], "x"], ids=repr)
def test_no_tensor(x):
    with pytest.raises(TypeError, match=f"op: q must be a torch.Tensor, got {type(x).__name__}"):
        check.tensor("op", "q", x)


def test_a_tensor_without_strides():
    with pytest.raises(ValueError, match="op: q must be strided, got a tensor of layout sparse_coo"):
        check.tensor("op", "q", torch.eye(3).to_sparse())
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert check.tensor("op", "q", parameter) is parameter


def test_flags():
    check.flag("op", a=True, b=False)
    for bad in (1, 0, None, "True", torch.tensor(True)):
        with pytest.raises(TypeError, match="op: b must be True or False, got "):
            check.flag("op", a=True, b=bad)


def test_of_a_tensor_in_place_of_a_flag_or_choice_the_type_is_named():
    """Messages had its numbers, on many lines, which are waited for if they are on a GPU."""
    given = torch.ones(4, 4, device="meta")
    for call in (lambda: check.flag("op", a=given), lambda: check.choice("op", "a", given, (1, 2))):
        with pytest.raises((TypeError, ValueError), match=r"op: a must be .*, got Tensor$"):
            call()


def test_numbers():
    assert check.number("op", "scale", 2) == 2.0 and isinstance(check.number("op", "scale", 2), float)
    for bad in (True, "1", None, torch.tensor(1.0), 1j):
        with pytest.raises(TypeError, match=f"op: scale must be a number, got {type(bad).__name__}"):
            check.number("op", "scale", bad)
    for bad in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match="op: scale must be finite, got"):
            check.number("op", "scale", bad)


def test_integers():
    assert check.integer("op", "n", 3, least=3) == 3
    for bad in (True, 1.0, "1", None):
        with pytest.raises(TypeError, match=f"op: n must be an int, got {type(bad).__name__}"):
            check.integer("op", "n", bad, least=0)
    with pytest.raises(ValueError, match="op: n must be at least 3, got 2"):
        check.integer("op", "n", 2, least=3)


def test_a_choice_is_of_type_and_value():
    check.choice("op", "size", 16, (16, 32))
    check.choice("op", "backend", None, (None, "eager"))
    for bad in (16.0, True, "16", None):
        with pytest.raises(ValueError, match="op: size must be one of 16, 32, got"):
            check.choice("op", "size", bad, (16, 32))
    with pytest.raises(ValueError, match="op: one must be one of 1, got True"):
        check.choice("op", "one", True, (1,))


def test_dtypes():
    check.floating("op", x=torch.zeros(1, dtype=torch.bfloat16), y=None)
    with pytest.raises(ValueError, match="op: y must be float32, float64, bfloat16 or float16, got int64"):
        check.floating("op", x=torch.zeros(1), y=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="op: y must be float32, got float64"):
        check.floating("op", (torch.float32,), y=torch.zeros(1).double())
    check.dtype_option("op", "out", None)
    with pytest.raises(TypeError, match=r"op: out must be a torch.dtype or None, got str"):
        check.dtype_option("op", "out", "float32")
    with pytest.raises(ValueError, match="op: out must be float32 or float16, got float64"):
        check.dtype_option("op", "out", torch.float64, (torch.float32, torch.float16))


def test_same_attribute():
    x, wide, elsewhere = torch.zeros(1), torch.zeros(1).double(), torch.zeros(1, device="meta")
    check.same_attribute("op", "dtype", x=None, y=wide, z=wide)
    with pytest.raises(ValueError, match="op: z must have the dtype of x, float32, got float64"):
        check.same_attribute("op", "dtype", x=x, y=None, z=wide)
    with pytest.raises(ValueError, match="op: z must have the device of x, cpu, got meta"):
        check.same_attribute("op", "device", x=x, z=elsewhere)


@pytest.mark.parametrize("H, HV", [(1, 1), (2, 6), (3, 3)])
def test_legal_head_groups(H: int, HV: int):
    check.head_groups("op", H, HV)


@pytest.mark.parametrize("H, HV", [(0, 0), (2, 1), (2, 3), (4, 2), (1, 0)])
def test_illegal_head_groups(H: int, HV: int):
    with pytest.raises(
        ValueError, match=f"op: v must have a multiple of the {H} heads of q and k, got {HV} value heads"
    ):
        check.head_groups("op", H, HV)


def test_widths():
    for legal in range(8, 257, 8):
        check.width("op", "K", "q and k", legal)
    for illegal in (0, 1, 7, 9, 60, 100, 257, 264, -8):
        with pytest.raises(
            ValueError, match=f"op: q and k must have width K a multiple of 8 from 8 to 256, got {illegal}"
        ):
            check.width("op", "K", "q and k", illegal)
    with pytest.raises(ValueError, match="from 8 to 128, got 136"):
        check.width("op", "K", "v", 136, most=128)


def test_unsupported_is_a_value_error_with_reasons():
    error = UnsupportedError("op: nobody serves this", {"eager": "too slow", "triton": "not here"})
    assert isinstance(error, ValueError)
    assert error.reasons == {"eager": "too slow", "triton": "not here"}
    assert str(error) == "op: nobody serves this\n  eager: too slow\n  triton: not here"


def test_contents_may_be_read_of_real_tensors_only():
    assert check.readable(torch.zeros(1)) and check.readable(torch.nn.Parameter(torch.zeros(1)))
    assert not check.readable(torch.zeros(1, device="meta"))
    with check.checked():
        assert not check.readable(torch.zeros(1, device="meta"))
    with torch._subclasses.FakeTensorMode():
        assert not check.readable(torch.zeros(1))


def test_checked_nests_and_ends():
    assert not check.checking_contents()
    with check.checked():
        with check.checked():
            pass
        assert check.checking_contents()
    assert not check.checking_contents()
