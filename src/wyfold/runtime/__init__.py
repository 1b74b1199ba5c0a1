"""Infrastructure without mathematics: checks, layouts, options, plans, kernel launches and their replay."""
