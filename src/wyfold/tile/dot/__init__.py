"""Matrix products of tiles: which dtype the operands take, and with how many partial products."""
