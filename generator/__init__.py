"""Specs, targets, the Thinking Language, authors and translators. Runs no native code."""
