"""States over the edges of ranks: from the borders of segments to what a rank sends, and from what ranks told back.

    send     of the state at a rank's last border before its edge, [S | M], what leaves the piece:
             H' + M' [S | M] with the map M' and the state H' of the tokens behind the last full chunk
    carry    the state that enters from other ranks, along its route (context_parallel/routes.py), to the border where
             it enters; back, the gradient of the state that leaves, through those tokens, onto the rank's last border

Nothing here is rounded to the inputs' dtype.
"""
