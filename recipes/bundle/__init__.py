"""Room recipes: a recipe as a bundle: written, signed, read without trust, adopted, and kept in registries or git."""
