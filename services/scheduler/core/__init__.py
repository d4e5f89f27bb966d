"""What the scheduler decides; pure: a fold over facts, and decisions out of it."""
