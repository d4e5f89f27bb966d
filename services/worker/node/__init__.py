"""The hardware of a node: inventory, checks and shares of its devices, system metrics."""
