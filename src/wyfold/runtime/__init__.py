"""Services without mathematics: checks, layouts, options, plans."""
