"""The past in the log: decisions made again, asked about, compared with a shadow, or played on other nodes."""
