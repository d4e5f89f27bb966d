"""The agent of a node: its membership of the cluster, its lease and the generations that it runs."""
