"""Who holds which tokens, and how state crosses a border."""
