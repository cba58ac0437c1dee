"""The words that every room uses: batch plans, micro-batches, configurations of an update, outputs.

Values and their checks, without data pipelines, programs or training. A new word here needs a row
in docs/glossary.md.
"""
