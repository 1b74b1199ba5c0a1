"""Plans: equality by value, the text, and the end of a call that is explained."""

import dataclasses

import pytest

from wyfold.runtime.plan import Plan, announce_plan, plan_of

PLAN = Plan("op", "eager", ("a (m.a)", "b (m.b)"), ("c (m.c)",), {"triton": "not here"}, 16, 3, ("x",))


def test_its_text_names_everything():
    lines = dict(line.split(None, 1) for line in str(PLAN).splitlines() if not line.startswith(("not", "chunk")))
    assert lines["operator"] == "op" and lines["forward"] == "a (m.a), b (m.b)" and lines["backward"] == "c (m.c)"
    assert lines["parts"] == "3" and lines["copies"] == "x" and lines["collectives"] == "none"
    assert "chunk size   16" in str(PLAN) and "not triton   not here" in str(PLAN)
    bare = Plan("op", "eager", ("a",), ())
    assert "backward     none" in str(bare) and "chunk size   none" in str(bare)


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
