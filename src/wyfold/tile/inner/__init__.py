"""TTT-Linear's inner model: its prediction, the gradient it steps along, its read, and the adjoint of each."""
