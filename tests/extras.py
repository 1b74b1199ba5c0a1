"""Skips for tests that need an optional extra of the package."""

import pytest


def need_plotly() -> None:
    """Skip the running test if plotly, which `wyfold report` draws with, is missing."""
    pytest.importorskip("plotly", reason="plotly, with which a report is drawn, is not installed")
