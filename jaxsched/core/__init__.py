"""The values that every other part speaks in: tables, budgets, plans, configuration.

Nothing here imports from another room of the package.
"""
