"""One generation of one run on this node: requests, preparation, life and report."""
