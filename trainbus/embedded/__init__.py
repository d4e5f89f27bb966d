"""The embedded stack: every server and service as a child process on one machine."""
