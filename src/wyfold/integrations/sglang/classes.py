"""Replacement of SGLang's kernel classes through its own hook registry.

SGLang's dispatchers choose a class by a flag and by defaults, and have no name for an outside class. So the class that
they take for "triton", which is the default, is replaced. Other values of the flags choose the kernels they name.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from wyfold.integrations.engine_hooks import REPLACED, with_fallback
from wyfold.integrations.sglang import kernels

GDN = "sglang.srt.layers.attention.linear.kernels.gdn_triton"
KDA = "sglang.srt.layers.attention.linear.kernels.kda_triton"
GDN_DEFAULT = "sglang.srt.layers.attention.linear.gdn_backend"

log = logging.getLogger("wyfold.sglang")


def install_gdn(module: ModuleType) -> str | None:
    """Replace `TritonGDNKernel`."""
    return _install(module, "TritonGDNKernel", "GDN", kernels.extend_gdn)


def install_kda(module: ModuleType) -> str | None:
    """Replace `TritonKDAKernel`."""
    return _install(module, "TritonKDAKernel", "KDA", kernels.extend_kda)


def install_gdn_default(module: ModuleType) -> str | None:
    """Choose Triton, which is now Wyfold, where SGLang would choose FlashInfer for GDN's prompts without a flag."""
    if not _is_cuda() or not getattr(sys.modules[GDN], REPLACED, False):
        return None
    _replace(f"{GDN_DEFAULT}.flashinfer_gdn_prefill_default", _no_default)
    return "Wyfold serves SGLang's GDN prompts by default, instead of FlashInfer."


def _no_default(model_runner: Any) -> None:
    """Replacement of `flashinfer_gdn_prefill_default`: no backend other than the flag's."""


def _install(module: ModuleType, name: str, rule: str, extend: Callable[..., Any]) -> str:
    if not _is_cuda():
        return f"Wyfold's {rule} kernels in SGLang need an NVIDIA GPU. SGLang keeps its own."
    _replace(f"{module.__name__}.{name}", kernel_class(getattr(module, name), extend))
    return f"Wyfold serves SGLang's {rule} layers in place of Triton: prompts, single tokens and drafted tokens."


def _is_cuda() -> bool:
    return bool(importlib.import_module("sglang.srt.utils").is_cuda())


def _replace(target: str, replacement: Any) -> None:
    registry = importlib.import_module("sglang.srt.plugins.hook_registry")
    source = registry.HookSource(plugin_name="wyfold", dist_name="wyfold")
    registry.HookRegistry.register(target, replacement, registry.HookType.REPLACE, source=source)
    # While SGLang loads plug-ins, others may not have registered all of their hooks. It applies all of them afterwards.
    if registry._current_plugin_source.get() is None:
        registry.HookRegistry.apply_hooks()


def kernel_class(base: Any, extend: Callable[..., Any]) -> Any:
    """Return a subclass of one of SGLang's kernel classes whose methods call Wyfold, and those of `base` if it refuses.

    Args:
        base: `TritonGDNKernel` or `TritonKDAKernel`.
        extend: `extend_gdn` or `extend_kda`.
    """

    def method(ours: Callable[..., Any], engines: Callable[..., Any]) -> Callable[..., Any]:
        return with_fallback(lambda self, *args, **kwargs: ours(*args, **kwargs), engines, log)

    members = {
        "supports_track_state_snapshot": True,
        "packed_decode": method(kernels.packed_decode, base.packed_decode),
        "decode": method(kernels.decode, base.decode),
        "target_verify": method(kernels.target_verify, base.target_verify),
        "extend": method(extend, _with_snapshot(base)),
    }
    return type(f"Wyfold{base.__name__.removeprefix('Triton')}", (base,), members)


def _with_snapshot(base: Any) -> Callable[..., Any]:
    """SGLang's `extend`, which also writes `track_state` where its class does not support it."""
    if base.supports_track_state_snapshot:
        return base.extend

    def extend(self: Any, *args: Any, track_state: Tensor | None = None, **kwargs: Any) -> Any:
        result = base.extend(self, *args, **kwargs)
        if track_state is not None:
            kernels.copy_chunk_states(result[2], kwargs["query_start_loc"], track_state, kwargs["track_chunk_idx"])
        return result

    extend.__qualname__ = f"{base.__name__}.extend"
    return extend
