"""One script a question; `python -m benchmarks` runs those the machine can."""
