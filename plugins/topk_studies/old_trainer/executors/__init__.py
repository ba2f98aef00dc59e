"""Executors in the sense of ``concurrent.futures``: worker processes of this machine, a Ray cluster, Slurm."""
