"""Steps of the state: residual, read and advance, and their adjoints."""
