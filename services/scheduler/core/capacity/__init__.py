"""How many nodes are wanted of each pool."""
