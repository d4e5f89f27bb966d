"""What teams are owed, what they borrow, and what no one may exceed."""
