"""Features as of the time of each row of an entity table."""
