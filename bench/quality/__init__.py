"""Room bench: quality: suites of items with one right answer, asked over the API, every item kept."""
