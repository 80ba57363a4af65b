"""From a request table to a plan, and from a plan to the next table."""
