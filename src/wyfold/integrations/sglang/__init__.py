"""Plug-in for SGLang: its Triton kernels of GDN and KDA are replaced by Wyfold's serving operators.

SGLang loads `register` through the entry point group `sglang.srt.plugins` in each of its processes. `WYFOLD_SGLANG=0`
turns it off. docs/serving_engines.md says what is replaced and what was tested.
"""

import logging
from pathlib import Path

from wyfold.integrations.engine_hooks import Install, Record, plug_in
from wyfold.integrations.sglang import classes

__all__ = ["register"]

VARIABLE = "WYFOLD_SGLANG"
"""Environment variable; "0" leaves every kernel to SGLang."""

SIGNATURES = Record.read(Path(__file__).with_name("signatures.json"))
"""Functions of SGLang that are replaced or called."""

log = logging.getLogger("wyfold.sglang")


def register() -> None:
    """Replace SGLang's GDN and KDA kernels once SGLang imports the modules that define them. Raises nothing.

    Examples:
        >>> from wyfold.integrations import sglang
        >>> sglang.register()  # SGLang does this itself; modules that are never imported are never changed
    """
    installs: dict[str, Install] = {
        classes.GDN: classes.install_gdn,
        classes.KDA: classes.install_kda,
        classes.GDN_DEFAULT: classes.install_gdn_default,
    }
    plug_in(SIGNATURES, installs, VARIABLE, log)
