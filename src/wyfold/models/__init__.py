"""`Decoder`: a small language model whose layers are chosen by a pattern.

- Delta-rule, TTT and softmax attention layers in any order; `pattern="kda*3 attention"` is repeated to the depth.
- Pre-norm blocks: RMSNorm, mixer, residual; RMSNorm, SwiGLU, residual. No biases except in the papers' gates.
- Rotary positions in attention layers only; recurrences and convolutions depend on order by themselves.
- Embedding and output matrix are tied by default.
- Packed documents by a `SequenceLayout`, passed to every layer.
- Generation from a cache of constant size, except for attention without a window.
- The loss is float32 for parameters of any dtype.
"""

from wyfold.models.block import SwiGLU
from wyfold.models.config import MIXERS, DecoderConfig
from wyfold.models.decoder import Decoder
from wyfold.models.decoder_call import IGNORED
from wyfold.models.disk import CONFIG_FILE, WEIGHTS_FILE
from wyfold.runtime.choices import RECOMPUTED

__all__ = [
    "CONFIG_FILE",
    "IGNORED",
    "MIXERS",
    "RECOMPUTED",
    "WEIGHTS_FILE",
    "Decoder",
    "DecoderConfig",
    "SwiGLU",
]
