"""Values of arguments that the command line offers as well. Imports no torch, so that the help can list them."""

BACKENDS = ("eager", "triton", "gluon")
"""Values of every operator's `backend`."""

CHUNK_SIZES = (16, 32, 64)
"""Chunk sizes, in tokens, that a call may select."""

RECOMPUTED = ("selective", "blocks")
"""Values of `Decoder.recompute` other than None."""
