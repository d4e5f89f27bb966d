"""What the checkpoint service decides: what makes a checkpoint, what is kept, what is garbage."""
