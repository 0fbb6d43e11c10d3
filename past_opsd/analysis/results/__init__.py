"""Runs as evidence that can be kept, and every table, interval and figure from it again."""
