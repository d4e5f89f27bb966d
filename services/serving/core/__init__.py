"""What serving decides: pure."""
