"""Room recipes: starting a rendered spec, one file a way of running."""
