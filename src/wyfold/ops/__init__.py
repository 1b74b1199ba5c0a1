"""Public operators: checks, defaults, flags into records, a plan, one call."""
