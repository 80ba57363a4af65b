"""The hybrid cache: paged blocks, recurrent-state slots, prefix index, eviction."""
