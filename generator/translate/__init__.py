"""Translators from core TL to source text, one folder a target family."""
