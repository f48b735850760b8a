"""Room bench: the parts of the reference server: a model of an engine, its faults, its counters and its truth."""
