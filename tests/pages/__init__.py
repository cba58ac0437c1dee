"""The pages as a built site: `python -m tests.pages build/site` looks through its files."""
