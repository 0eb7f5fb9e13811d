"""Weights in a store: what is written and read, and how a new version becomes visible at once."""
