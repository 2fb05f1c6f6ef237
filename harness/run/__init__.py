"""A sweep under way: its folder, its workers, its cells, and where their weights come from."""
