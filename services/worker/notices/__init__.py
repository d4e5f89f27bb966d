"""Notices that the machine will be taken away: from clouds, Slurm and Kubernetes."""
