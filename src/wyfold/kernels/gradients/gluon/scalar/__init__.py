"""`gradients` in Gluon for Hopper: no gate or a scalar one, bfloat16, chunks of 64, K = V = 128.

One program computes a chunk of one value head. It issues all loads to shared memory before it computes, in the order of
use: four groups of tiles, each with its own mbarrier. States come in halves of K; the second half is loaded after the
first has been read. Shared memory is reused, so that two programs fit a multiprocessor (a test of
`tests/compile/test_gradients_gluon.py`):

    X       then dv, then the pair sums of a scalar gate, then dP and dJ, which products read both ways round
    q, k    then dq and dk, which are stored from there

With the l2 norm, q and k stay raw. The gradients of both grams then carry both norms, so their contribution to a row is
that row's gradient times its 1/|x|, as is the contribution through the states. The norm's adjoint uses exactly that,
with z = dy/|x| and y = x/|x|:

    dx = dy/|x| - y <y, dy>/|x| = z - x <x, z>/|x|^2

Here x is a raw row of q or k. The dot product sums over both halves of K. So the first half of z waits, rounded, in
the memory of x, and the first half of x is loaded again, into the memory of S (`_reload`).

With several value heads to a key head, a program stores its dq and dk in bfloat16 over its own tiles of e and X, which
it has read. A second kernel (`heads`, beside this package) sums them in float32, in the order of the heads. Sums inside
of one program would have to pass through global memory in float32, since registers and shared memory are full with the
tiles of one head.

In a partial chunk, the rows past the sequence's end are zeroed, and results are stored without TMA. Results do not
depend on strides: inputs that TMA cannot read are copied, and gradients that are not requested go to temporaries.
"""

from wyfold.kernels.gradients.gluon.scalar.kernel import wyfold_gradients_gluon
from wyfold.kernels.gradients.gluon.scalar.launch import gradients

__all__ = ["gradients", "wyfold_gradients_gluon"]
