"""Room images: the engine, what a recipe runs in. The lowest room: it imports nothing of the others."""
