"""The state's three steps: residual, read, advance, and their adjoints."""
