"""One decoder: a small language model whose layers are named by a pattern.

Notable:
- delta-rule, TTT and softmax attention layers in any order, `pattern="kda*3 attention"` repeated to depth
- pre-norm blocks: RMSNorm, mixer, residual; RMSNorm, SwiGLU, residual; no biases but those of the papers' gates
- rotary positions in the attention layers alone: recurrences and convolutions know the order of what they read
- embedding and output matrix are one, unless the configuration says otherwise
- packed documents by a `SequenceLayout` that every layer reads
- generation from a cache whose size does not grow, but for attention without a window
- the loss is float32 whatever the parameters are
"""

from wyfold.models.block import SwiGLU
from wyfold.models.config import MIXERS, DecoderConfig
from wyfold.models.decoder import IGNORED, Decoder
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
