"""The producer/consumer skeleton of Gluon kernels on Hopper that run through the chunks of a sequence.

The warps of a program are partitions, which pass a ring of shared-memory stages to each other. A stage holds the tiles
of one chunk. Mbarriers synchronise it:

    producer, one warp             consumer, a warpgroup or more; PARTS of them share the tiles
    wait for `free` of the stage   wait for `full` of the stage
    expect the tiles' bytes        compute the chunk
    load them by TMA               arrive at `free`

`full` completes when TMA has written the stage. `free` completes when every part has read it. A part arrives there
after it has issued the first product of the next chunk (`release`), so that no product waits for the arrival. The
producer starts with phase 1, which a new barrier has already completed: all stages are free.

A partial last chunk is loaded like the others: TMA reads whole tiles, with rows of the next sequence. The consumer
masks or clears what lies past the last token.

A kernel says which tiles it reads (`ChunkInputs`, None for the others), what a consumer computes for a chunk, and what
it stores.
"""

from wyfold.kernels.pipeline.gluon.descriptors import chunk_descriptors
from wyfold.kernels.pipeline.gluon.producer import load_rows, load_squares, load_values, produce, tile_bytes
from wyfold.kernels.pipeline.gluon.records import ChunkInputs, Ends, Ring, Sizes, Span
from wyfold.kernels.pipeline.gluon.ring import (
    after,
    barriers,
    computed,
    next_stage,
    release,
    ring_of,
    span_at,
    span_of,
    specialize,
    stage_before,
)
from wyfold.kernels.pipeline.gluon.states import IN_REGISTERS, Layouts, layouts, load_state, store_state

__all__ = [
    "IN_REGISTERS",
    "ChunkInputs",
    "Ends",
    "Layouts",
    "Ring",
    "Sizes",
    "Span",
    "after",
    "barriers",
    "chunk_descriptors",
    "computed",
    "layouts",
    "load_rows",
    "load_squares",
    "load_state",
    "load_values",
    "next_stage",
    "produce",
    "release",
    "ring_of",
    "span_at",
    "span_of",
    "specialize",
    "stage_before",
    "store_state",
    "tile_bytes",
]
