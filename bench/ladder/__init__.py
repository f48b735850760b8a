"""Room bench: the ladder: every rung served, proved, measured and judged, in one journal that can be resumed."""
