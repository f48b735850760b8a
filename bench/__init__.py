"""Room bench: the proof, what a recipe achieves. Imports from recipes and images."""
