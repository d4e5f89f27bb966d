"""What the log says: the cluster that the facts add up to, and what is learned from it."""
