"""Who may have what, and what is kept for, taken from or added to those that have it."""
