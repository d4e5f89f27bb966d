"""What other systems may rely on: events, subjects, streams. A leaf package without I/O."""
