"""Slow, obvious plain-Python versions of every rule: the tests compare with them."""
