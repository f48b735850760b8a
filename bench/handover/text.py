"""Room bench: marks of findings, as every list of checks prints them."""

MARKS = {True: "✔", False: "✘", None: "–"}
