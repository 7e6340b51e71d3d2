"""Compiles, runs in sandboxes, judges and measures candidates. Decides nothing about what is built."""
