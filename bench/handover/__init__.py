"""Room bench: handing recipes on: bundles with their proof, comparing two teams' runs, what may be published."""
