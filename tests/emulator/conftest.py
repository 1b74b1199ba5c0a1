"""Parametrises emulator tests: some cases in every run, all of them with `--draws`."""

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`case` takes every value of the module's CASES; without `--draws` those that are not default are skipped."""
    if "case" not in metafunc.fixturenames:
        return
    every = metafunc.config.getoption("--draws") is not None
    skip = pytest.mark.skip(reason="not a default case of an emulated kernel; --draws 1 runs every case")
    params = [
        pytest.param(
            case,
            id=str(case),
            marks=() if case.default or every else pytest.mark.release if case.release else skip,
        )
        for case in metafunc.module.CASES
    ]
    metafunc.parametrize("case", params)
