"""What the evaluation service decides: what is measured, what is promoted, what a report shows."""
