"""Values that an argument may be one of, where the command line offers them too: it lists them without torch."""

BACKENDS = ("eager", "triton", "gluon")
"""Of every operator's `backend`."""

CHUNK_SIZES = (16, 32, 64)
"""Tokens of a chunk that a call may ask for."""

RECOMPUTED = ("selective", "blocks")
"""What `Decoder.recompute` may be asked for, beside None."""
