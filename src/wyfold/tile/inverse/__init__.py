"""(I + L)^-1 of strictly lower triangular tiles."""
