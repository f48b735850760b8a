"""Room bench: runs in other tools' words, read and written."""
