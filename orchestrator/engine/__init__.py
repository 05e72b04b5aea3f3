"""Keeps the sandboxes busy: tasks in, groups out."""
