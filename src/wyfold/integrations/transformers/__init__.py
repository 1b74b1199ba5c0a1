"""Models of transformers on Wyfold's operators, without a fork.

    with patch(model):
        model(input_ids, position_ids=...)

Rebound are names: the functions that a modelling file calls (transformers 5.15 and later) or keeps on its layers (4.57
to 5.14). Calls of `forward` of the class that hands positions to the layers are intercepted, also where an instance has
a `forward` of a hook or wrapper. Parameters, configurations, and with them loading and saving stay as they are.
"""

from __future__ import annotations

from torch import nn

from wyfold.integrations.transformers.families import FAMILIES, Family, chosen
from wyfold.integrations.transformers.installation import Installation, Options, installed
from wyfold.integrations.transformers.report import Replaced, Report
from wyfold.runtime import check

__all__ = ["FAMILIES", "Family", "Patch", "Replaced", "Report", "patch"]


class Patch:
    """A patch that holds; also a context that undoes it at its end.

    Attributes:
        report: What was replaced, and what became of every call.
    """

    def __init__(self, report: Report):
        self.report = report
        self._installations: list[Installation] = []

    def undo(self) -> Report:
        """Put back what no other patch holds; a second time does nothing. Returns the report."""
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
    """Let models of transformers run on Wyfold.

    Replaced are the chunked and the token-by-token delta rule, the short convolution over a sequence and over one more
    token, and on demand the gated norm. The decision is made call by call, by what the operators support on that
    device, with that dtype and head size.

    Since transformers 5.15 the functions belong to a model type, and every model of the type follows; before, they
    belong to the layers of one model, which has to be given. A second patch of a type joins the first, if it asks for
    the same, and everything comes back with the last `undo`.

    Hooks and wrappers of the model may be made before or after the patch, and removed before or after `undo`:
    `accelerate.dispatch_model`, `cpu_offload`, `Accelerator.prepare`, peft, `torch.compile`, FSDP. A method that was
    taken from the model before (`f = model.model.forward`) and is called by itself is not intercepted.

    Args:
        target: A model; names of model types ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen4_exp", "olmo_hybrid",
            "kimi_linear", "bailing_hybrid", "glm5_next"); None for every one of these that is imported.
        packing: Keep documents apart that are packed into a row by `position_ids` that begin again, by `cu_seq_lens_q`
            or by `seq_idx`: attention, convolution and recurrence get the same boundaries, and no cache is kept.
            Reading positions waits for the device once per forward. Refused are packed documents of "qwen4_exp" and
            "glm5_next", whose attention picks its tokens from the whole row.
        norm: Replace the gated norm too. Of a norm whose `forward` was wrapped before the patch, as by a hook that
            loads its weight, the stock function stays; `report.kept` lists those of target.
        on_unsupported: "raise", or "stock": such a call runs the model's own code, and the report says why and
            how often. Calls with packed documents always raise.

    Returns:
        The patch: `.report`, `.undo()`, and a context manager that undoes at its end.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        TypeError: target is neither a model nor names.
        ValueError: an unknown type, nothing to patch, or a patch of the same type holds and asks for something else.
        UnsupportedError: this version of transformers keeps its functions elsewhere, or gives them other parameters.

    While it holds, a patched model raises ValueError on packed documents together with a cache or with padding, or
    with a mask of four dimensions by which they attend to each other; on positions that contradict given boundaries, or
    boundaries that contradict each other; and on padding on the right where a cache is filled, which the CPU and
    `wyfold.checked()` see.
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
    options = Options(packing, norm, on_unsupported)
    patched = Patch(Report(version))
    try:
        for family in families:
            patched._join(installed(family, options, target, version), target)
    except BaseException:
        patched.undo()
        raise
    return patched
