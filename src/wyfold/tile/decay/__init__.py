"""The gate: all code that depends on its kind (none, scalar or channel)."""
