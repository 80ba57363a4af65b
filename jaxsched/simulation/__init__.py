"""Workloads, costs and metrics: running the scheduler against a trace."""
