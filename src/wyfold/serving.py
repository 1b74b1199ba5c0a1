"""Operators for serving: states in a pool of slots, updated in place, without a gradient."""

from wyfold.ops.conv_serving import conv1d_prefill, conv1d_update
from wyfold.ops.serving import decode, decode_packed, prefill, verify
from wyfold.ops.ttt_serving import ttt_decode

__all__ = ["conv1d_prefill", "conv1d_update", "decode", "decode_packed", "prefill", "ttt_decode", "verify"]
