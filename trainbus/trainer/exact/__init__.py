"""Training that is the same to the bit for any number of processes."""
