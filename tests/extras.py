"""Skips for tests that need an optional extra of the package."""

import warnings
from types import ModuleType

import pytest


def need_plotly() -> None:
    """Skip the running test if plotly, which `wyfold report` draws with, is missing."""
    pytest.importorskip("plotly", reason="plotly, with which a report is drawn, is not installed")


def need_fla() -> ModuleType:
    """Import the installed fla, or skip the running test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla warns on machines without a GPU
        fla = pytest.importorskip("fla", reason="fla, which is accelerated, is not installed")
        pytest.importorskip("fla.models", reason="fla's layers and models, which are accelerated, are not installed")
    return fla
