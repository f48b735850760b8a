"""Room bench: telemetry: what the GPUs and the host did while a load ran, on the load's clock."""
