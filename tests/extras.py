"""What only an extra of the package installs, and some tests need."""

import pytest


def need_plotly() -> None:
    """Skip the rest of the running test where plotly is missing: without it `wyfold report` draws no page."""
    pytest.importorskip("plotly", reason="plotly, with which a report is drawn, is not installed")
