"""Inner model of TTT-Linear: prediction, inner gradient, update step and read, and the adjoint of each."""
