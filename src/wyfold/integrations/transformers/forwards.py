"""Interception of a class's `forward`, for every instance, hooked or not.

An instance may have a `forward` in its own `__dict__`: accelerate's hooks, `Accelerator.prepare` and
`module.forward = torch.compile(module.forward)` put one there. Python prefers it to a function of the class, so a
function assigned to the class is never called for such an instance. A data descriptor on the class takes precedence
over the instance's `__dict__`, whichever of the two was put there first.
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
"""Called as handler(forward, module, args, kwargs), where `forward` is bound and is what would have run."""


def intercept(owner: type[nn.Module], handler: Handler) -> Callable[[], None]:
    """Pass every call of `forward` of a class's instances through a handler.

    Args:
        owner: Class that has `forward`, its own or an inherited one.
        handler: Runs outside of the handlers that are there.

    Returns:
        A function that removes the handler. With the last one the class becomes what it was.
    """
    found = vars(owner).get("forward")
    interceptor = found if isinstance(found, ForwardInterceptor) else ForwardInterceptor(owner.forward)
    if interceptor is not found:
        interceptor.inherited = found is None
        owner.forward = interceptor  # type: ignore[assignment]
    interceptor.handlers.append(handler)

    def remove() -> None:
        interceptor.handlers.remove(handler)
        # A function that other code has assigned since then stays.
        if interceptor.handlers or vars(owner).get("forward") is not interceptor:
            return
        if interceptor.inherited:
            del owner.forward
        else:
            owner.forward = interceptor.stock

    return remove


class _Running(threading.local):
    """Modules whose handlers run on this thread, by id."""

    def __init__(self) -> None:
        self.modules: set[int] = set()


class ForwardInterceptor:
    """The data descriptor that `intercept` puts in place of a class's `forward`.

    Wrappers that were made from `module.forward` while it was installed, like a hook's, go on working afterwards. A
    call passes through the handlers once, however many such wrappers it goes through.

    Attributes:
        stock: The function it stands for.
        handlers: The last one is the outermost.
        inherited: Whether `stock` belongs to a base class.
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
            # Dynamo of PyTorch 2.11 reads `module.__dict__["forward"]` as `module.forward`, and calls this again.
            own = object.__getattribute__(module, "__dict__")["forward"]
            return types.MethodType(self._over(own), module)
        if torch.compiler.is_compiling():
            return functools.partial(self._of_class, module)  # Dynamo does not trace the making of a bound method
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
        """An instance's own `forward`, behind the handlers."""

        @functools.wraps(own)
        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self._call(own, module, args, kwargs)

        return forward

    def _call(self, forward: Forward, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        running = self._running.modules
        if id(module) in running:  # inside of a hook that was made from an intercepted `forward`
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
