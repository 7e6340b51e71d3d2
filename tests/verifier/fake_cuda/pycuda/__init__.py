"""A stand-in, found before the real package."""

VERSION = (0, 0)
