"""The node's agent: it runs its part of each placement, and decides nothing about runs."""
