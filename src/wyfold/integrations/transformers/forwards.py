"""Interception of a class's `forward` for all instances, with or without hooks.

An instance may have a `forward` in its `__dict__`, set by accelerate's hooks, by `Accelerator.prepare` or by
`module.forward = torch.compile(module.forward)`. Python prefers it to the class's function, so a function assigned to
the class would never be called. A data descriptor on the class takes precedence over the instance's `__dict__`,
regardless of which was set first.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Forward = Callable[..., Any]
Handler = Callable[[Forward, nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Called as handler(forward, module, args, kwargs), where `forward` is the intercepted bound method."""


def intercept(owner: type[nn.Module], handler: Handler) -> Callable[[], None]:
    """Pass every call of `forward` of a class's instances through a handler.

    Args:
        owner: Class that has `forward`, its own or an inherited one.
        handler: Runs around the existing handlers.

    Returns:
        A function that removes the handler. Removing the last one restores the class.
    """
    found = vars(owner).get("forward")
    interceptor = found if isinstance(found, ForwardInterceptor) else ForwardInterceptor(owner.forward)
    if interceptor is not found:
        interceptor.inherited = found is None
        owner.forward = interceptor  # type: ignore[assignment]
    interceptor.handlers.append(handler)

    def remove() -> None:
        interceptor.handlers.remove(handler)
        # Keep a function that other code has assigned since then.
        if interceptor.handlers or vars(owner).get("forward") is not interceptor:
            return
        if interceptor.inherited:
            del owner.forward
        else:
            owner.forward = interceptor.stock

    return remove


class _Running(threading.local):
    """Ids of the modules whose handlers are running on this thread."""

    def __init__(self) -> None:
        self.modules: set[int] = set()


class ForwardInterceptor:
    """Data descriptor that `intercept` puts in place of a class's `forward`.

    Wrappers made from `module.forward` while it was installed, such as a hook's, keep working afterwards. A call passes
    through the handlers once, regardless of the number of such wrappers.

    Attributes:
        stock: The replaced function.
        handlers: Active handlers; the last one is the outermost.
        inherited: `stock` belongs to a base class.
    """

    def __init__(self, stock: Forward):
        self.stock = stock
        self.handlers: list[Handler] = []
        self.inherited = False
        self._of_class = self._unbound(stock)
        self._running = _Running()

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Forward:
        if module is None:
            return self._of_class
        if "forward" in module.__dict__:
            # Dynamo of PyTorch 2.11 reads `module.__dict__["forward"]` as `module.forward`, which would recurse.
            own = object.__getattribute__(module, "__dict__")["forward"]
            return types.MethodType(self._over(own), module)
        if torch.compiler.is_compiling():
            return functools.partial(self._of_class, module)  # Dynamo cannot trace the creation of a bound method
        return types.MethodType(self._of_class, module)

    def __set__(self, module: nn.Module, forward: Forward) -> None:
        module.__dict__["forward"] = forward

    def __delete__(self, module: nn.Module) -> None:
        if "forward" not in module.__dict__:
            raise AttributeError("forward")
        del module.__dict__["forward"]

    def _unbound(self, stock: Forward) -> Forward:
        @functools.wraps(stock)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(functools.partial(stock, module), module, args, kwargs)

        return forward

    def _over(self, own: Forward) -> Forward:
        """Wrap an instance's own `forward` with the handlers."""

        @functools.wraps(own)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(own, module, args, kwargs)

        return forward

    def _call(self, forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        running = self._running.modules
        if id(module) in running:  # called from a hook made from an intercepted `forward`
            return forward(*args, **kwargs)
        for handler in self.handlers:
            forward = functools.partial(_handled, handler, forward, module)
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        running.add(id(module))
        try:
            return forward(*args, **kwargs)
        finally:
            running.discard(id(module))


def _handled(handler: Handler, forward: Forward, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return handler(forward, module, args, kwargs)
