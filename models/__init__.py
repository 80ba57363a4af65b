"""Hybrid models in Flax that consume a plan."""
