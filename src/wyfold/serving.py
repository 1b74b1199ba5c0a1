"""Operators for serving: states in a pool of slots, updated in place, without a gradient."""

from wyfold.ops.serving_conv import conv1d_prefill, conv1d_update
from wyfold.ops.serving_delta import decode, prefill, verify
from wyfold.ops.serving_packed import decode_packed
from wyfold.ops.serving_ttt import ttt_decode

__all__ = ["conv1d_prefill", "conv1d_update", "decode", "decode_packed", "prefill", "ttt_decode", "verify"]
