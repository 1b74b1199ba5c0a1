"""`UnsupportedError`, in a separate module so that it can be caught without importing torch."""

from collections.abc import Mapping


class UnsupportedError(ValueError):
    """A legal request that no backend, or not the demanded one, can serve.

    Attributes:
        message: The refused request.
        reasons: backend name -> why it refused.
    """

    def __init__(self, message: str, reasons: Mapping[str, str]):
        self.message = message
        # A reason that the message has already is not repeated.
        left = {backend: reason for backend, reason in reasons.items() if reason not in message}
        super().__init__(message + "".join(f"\n  {backend}: {reason}" for backend, reason in left.items()))
        self.reasons = dict(reasons)

    def __reduce__(self) -> tuple[type, tuple[str, dict[str, str]]]:
        """Rebuild from both arguments: a worker process hands its errors to its parent as pickles."""
        return type(self), (self.message, self.reasons)
