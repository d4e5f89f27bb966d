"""What a rank's process and its node's agent say to each other: channels, requests, the ring, how it ended."""
