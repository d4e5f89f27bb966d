"""What the agent decides, without I/O: facts to decisions, journals to events, exits to reports."""
