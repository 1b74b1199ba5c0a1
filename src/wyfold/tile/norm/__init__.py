"""Row norms and their adjoints."""
