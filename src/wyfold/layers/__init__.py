"""Sequence-mixing layers as the papers define them, and the caches they decode with."""

from wyfold.layers.attention import SoftmaxAttention
from wyfold.layers.cache import DecodingCache, LayerCache
from wyfold.layers.conv import ShortConvolution
from wyfold.layers.delta_net import DeltaNet
from wyfold.layers.gated_delta_net import DecayParameters, GatedDeltaNet
from wyfold.layers.gated_delta_net2 import GatedDeltaNet2
from wyfold.layers.gated_delta_product import GatedDeltaProduct
from wyfold.layers.gla import GatedLinearAttention
from wyfold.layers.kda import KimiDeltaAttention
from wyfold.layers.norm import GatedRMSNorm
from wyfold.layers.path_attention import PaTHAttention
from wyfold.layers.pools import DecodingPools, LayerPool, PooledCache
from wyfold.layers.rwkv7 import RWKV7TimeMix
from wyfold.layers.ttt_linear import TTTLinear

__all__ = [
    "DecayParameters",
    "DecodingCache",
    "DecodingPools",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "GatedRMSNorm",
    "KimiDeltaAttention",
    "LayerCache",
    "LayerPool",
    "PaTHAttention",
    "PooledCache",
    "RWKV7TimeMix",
    "ShortConvolution",
    "SoftmaxAttention",
    "TTTLinear",
]
