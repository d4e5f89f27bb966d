"""What facts add up to: the life of a run, a node and a model, reduced once for every reader. Pure."""
