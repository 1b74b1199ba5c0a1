"""States across ranks: from the borders of segments to a rank's send buffer, and from the gathered buffers back.

rank_send     packs the state that leaves a piece, from [S | M] at the rank's last border before its edge:
              H' + M' [S | M], with the map M' and the state H' of the tokens after the last full chunk
rank_carry    forward, follows the route of an incoming state (context_parallel/routes.py) to the border where it
              enters; backward, applies M'^T to the gradient of the leaving state and adds it at the last border

Results stay float32.
"""
