"""Plans: equality by value, the text, and the end of a call that is explained."""

import dataclasses

import pytest

from wyfold.runtime.plan import Launch, Plan, announce_plan, plan_of

PLAN = Plan(
    "op", "eager", ("a (m.eager)", "b (m.eager)"), ("c (m.gluon)",), {"triton": "not here", "gluon": "x"}, 16, 3, ("x",)
)


def test_its_text_names_everything_that_says_something():
    assert str(PLAN).splitlines() == [
        "operator     op",
        "backend      eager (PyTorch)",
        "forward      a, b",
        "backward     c (gluon)",
        "chunk size   16 tokens",
        "parts        3, one after another, to bound memory",
        "copied       x",
        "not triton   not here",
    ]
    full = Plan(
        "op", "triton", ("a (m.triton)",), (), {}, None, 0, (), ("all-gather",), (Launch("a", "fp32 K8", "default"),),
        ("kernel_a",), 4, "K 5 as 8", "not run",
    )  # fmt: skip
    assert str(full).splitlines() == [
        "operator     op",
        "backend      triton (GPU kernels)",
        "forward      a",
        "widths       K 5 as 8",
        "parts        0: no tokens",
        "segments     up to 4 of a sequence, in parallel",
        "sent         all-gather",
        "settings     a (fp32 K8): default",
        "to compile   kernel_a",
        "self-check   not run",
    ]


def test_its_text_leaves_out_what_says_nothing():
    bare = Plan("op", "eager", ("a",), (), {"gluon": "cannot be chosen"})
    assert str(bare).splitlines() == ["operator     op", "backend      eager (PyTorch)", "forward      a"]


def test_it_is_a_frozen_value():
    assert dataclasses.replace(PLAN) == PLAN != dataclasses.replace(PLAN, parts=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PLAN.parts = 4


def test_announcing_does_nothing_outside_plan_of():
    assert announce_plan(PLAN) is PLAN


def test_announcing_ends_an_explained_call():
    after = []

    def call():
        announce_plan(PLAN)
        after.append("ran on")

    assert plan_of(call) is PLAN and after == []
    assert announce_plan(PLAN) is PLAN


def test_an_error_in_an_explained_call_is_the_callers():
    with pytest.raises(KeyError):
        plan_of(lambda: {}["x"])
    assert announce_plan(PLAN) is PLAN
    with pytest.raises(TypeError, match="settled on no plan"):
        plan_of(lambda: 1)


def test_the_end_of_a_call_is_no_exception_that_code_in_between_catches():
    def call():
        try:
            announce_plan(PLAN)
        except Exception:
            return None

    assert plan_of(call) is PLAN
