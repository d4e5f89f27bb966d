"""The data plane against raw reads and its peers: `python -m loadtest.data`."""
