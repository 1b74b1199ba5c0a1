"""Reference implementations in float64, test inputs, and tolerances.

The package's operators as loops over tokens, written to be read and to be differentiated by autograd; the inputs they
are tested on; and the rule by which all other implementations are judged.
"""

from wyfold.reference import error as error
from wyfold.reference import inputs as inputs
from wyfold.reference import targets as targets
from wyfold.reference.conv import causal_conv1d as causal_conv1d
from wyfold.reference.delta import delta_rule as delta_rule
from wyfold.reference.delta import gated_delta_rule as gated_delta_rule
from wyfold.reference.delta import kda as kda
from wyfold.reference.delta_product import gated_delta_product as gated_delta_product
from wyfold.reference.gates import beta_sigmoid as beta_sigmoid
from wyfold.reference.gates import gdn_gate as gdn_gate
from wyfold.reference.gates import kda_gate as kda_gate
from wyfold.reference.gla import gla as gla
from wyfold.reference.low_rank import comba as comba
from wyfold.reference.low_rank import dplr_delta_rule as dplr_delta_rule
from wyfold.reference.low_rank import gdn2 as gdn2
from wyfold.reference.low_rank import iplr_delta_rule as iplr_delta_rule
from wyfold.reference.low_rank import mul_rwkv7 as mul_rwkv7
from wyfold.reference.low_rank import rwkv7 as rwkv7
from wyfold.reference.norm import l2norm as l2norm
from wyfold.reference.norm import rms_norm_gated as rms_norm_gated
from wyfold.reference.path import path_attention as path_attention
from wyfold.reference.solve import chunk_scaled_dot_kkt as chunk_scaled_dot_kkt
from wyfold.reference.solve import solve_tril as solve_tril
from wyfold.reference.ttt import ttt_linear as ttt_linear
