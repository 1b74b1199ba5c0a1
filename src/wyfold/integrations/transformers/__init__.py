"""Run transformers models on Wyfold's operators, without a fork.

    with patch(model):
        model(input_ids, position_ids=...)

A patch rebinds the functions that a modelling file calls (transformers 5.15 and later). It also intercepts `forward` of
the text model's class, even if a hook or wrapper replaced it on an instance. Parameters, configurations, loading and
saving are unchanged.
"""

from __future__ import annotations

from torch import nn

from wyfold.integrations.transformers.families import FAMILIES, Family, chosen
from wyfold.integrations.transformers.hub import kernel_mapping, write_kernel_repository
from wyfold.integrations.transformers.installation import Installation, Options, installed, refuse_old
from wyfold.integrations.transformers.report import Replaced, Report
from wyfold.runtime import check

__all__ = [
    "FAMILIES",
    "Family",
    "Patch",
    "Replaced",
    "Report",
    "kernel_mapping",
    "patch",
    "write_kernel_repository",
]


class Patch:
    """Active patch; as a context manager it undoes itself at the end.

    Attributes:
        report: Replaced names and outcomes of calls.
    """

    def __init__(self, report: Report):
        self.report = report
        self._installations: list[Installation] = []

    def undo(self) -> Report:
        """Restore the names that no other patch still uses; a second call has no effect. Returns the report."""
        while self._installations:
            self._installations.pop().leave(self.report)
        return self.report

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def _join(self, installation: Installation, target: object) -> None:
        installation.join(self.report, target)
        self._installations.append(installation)


def patch(
    target: nn.Module | str | list[str] | tuple[str, ...] | None = None,
    *,
    packing: bool = True,
    norm: bool = False,
    on_unsupported: str = "raise",
) -> Patch:
    """Make transformers models run on Wyfold's operators.

    Replaces the chunked and the recurrent delta rule, the short convolution of a sequence and of one token, and
    optionally the gated norm. Each call is checked separately for support of its device, dtype and head size.

    The functions belong to a model type, so the patch affects every model of the type. A second patch of a type shares
    the first one's replacements if its options are the same; the last `undo` restores everything.

    Hooks and wrappers of the model may be added before or after the patch, and removed before or after `undo`:
    `accelerate.dispatch_model`, `cpu_offload`, `Accelerator.prepare`, peft, `torch.compile`, FSDP. A bound method saved
    before the patch (`f = model.model.forward`) is not intercepted.

    Args:
        target: A model; or names of model types ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid",
            "lara_mini", "kimi_linear", "bailing_hybrid", "glm5_next"); or None for each of these types that is
            imported.
        packing: Separate documents packed into a row, given by restarting `position_ids`, `cu_seq_lens_q` or `seq_idx`.
            Attention, convolution and recurrence get the same boundaries, and no cache is kept. Reading positions
            synchronises with the device once per forward. Packed documents of "qwen4_exp" and "glm5_next" are refused,
            because their attention selects tokens from the whole row.
        norm: Also replace the gated norm. A norm whose `forward` was wrapped before the patch, for example by a hook
            that loads its weight, keeps the stock function; `report.kept` lists those of target.
        on_unsupported: "raise": raise for an unsupported call. "stock": run the model's own code and count the call in
            the report. Calls with packed documents always raise.

    Returns:
        The patch, with `.report` and `.undo()`; also a context manager.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        TypeError: target is neither a model nor names.
        ValueError: A model type is unknown, there is nothing to patch, or an active patch of the type has other
            options.
        UnsupportedError: transformers is older than 5.15, lacks the model type, or keeps its functions elsewhere or
            with other parameters.

    A patched model raises ValueError for packed documents with a cache, with padding, or with a four-dimensional mask
    that connects documents; for positions or boundaries that contradict each other; and, on the CPU and inside
    `wyfold.checked()`, for padding on the right while a cache is filled.
    """
    check.flag("patch", packing=packing, norm=norm)
    check.choice("patch", "on_unsupported", on_unsupported, ("raise", "stock"))
    families = chosen(target)
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "patch: needs transformers, which is not installed: pip install transformers", name=error.name
        ) from error
    version = transformers.__version__
    refuse_old(version)
    options = Options(packing, norm, on_unsupported)
    patched = Patch(Report(version))
    try:
        for family in families:
            patched._join(installed(family, options, version), target)
    except BaseException:
        patched.undo()
        raise
    return patched
