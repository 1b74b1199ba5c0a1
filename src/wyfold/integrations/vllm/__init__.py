"""Plug-in for vLLM: its GDN and KDA layers use Wyfold's serving operators.

vLLM loads `register` through the entry point group `vllm.general_plugins` in each of its processes. `WYFOLD_VLLM=0`
turns it off. docs/serving_engines.md says what is replaced and what was tested.
"""

import logging
from pathlib import Path

from wyfold.integrations.engine_hooks import Record, plug_in
from wyfold.integrations.vllm import gdn, glm, kda, olmo

__all__ = ["register"]

VARIABLE = "WYFOLD_VLLM"
"""Environment variable; "0" leaves every kernel to vLLM."""

SIGNATURES = Record.read(Path(__file__).with_name("signatures.json"))
"""Functions of vLLM that are replaced or called."""

# vLLM prints the lines of loggers below its own.
log = logging.getLogger("vllm.wyfold")


def register() -> None:
    """Replace vLLM's GDN and KDA kernels once vLLM imports the modules that call them. Raises nothing.

    Examples:
        >>> from wyfold.integrations import vllm
        >>> vllm.register()  # vLLM does this itself; modules that are never imported are never changed
    """
    installs = {part.MODULE: part.install for part in (gdn, olmo, kda, glm)}
    plug_in(SIGNATURES, installs, VARIABLE, log)
