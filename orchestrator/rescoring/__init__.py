"""A run on record, scored again: without a sandbox and, unless the scorer is a judge, without a model."""
