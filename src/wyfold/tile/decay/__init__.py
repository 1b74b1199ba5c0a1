"""The gate: everything that depends on its kind."""
