"""Room recipes: the configuration, what is served. Imports only from images."""
