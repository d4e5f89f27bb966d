"""What the autoscaler does about wanted nodes; pure: a fold over facts, and decisions out of it."""
