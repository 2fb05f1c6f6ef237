"""Under which versions, and by whose code, a cell is computed."""
