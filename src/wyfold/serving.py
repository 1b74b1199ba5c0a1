"""Operators for serving: states in a pool of slots, updated in place, without a gradient."""

from wyfold.ops.serving import decode, decode_packed, prefill, verify

__all__ = ["decode", "decode_packed", "prefill", "verify"]
