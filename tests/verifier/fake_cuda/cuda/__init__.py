"""A stand-in, found before the real package."""
