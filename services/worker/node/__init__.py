"""The hardware of a node: inventory, checks of GPUs, system metrics."""
