"""Room bench: how a verdict is shown."""
