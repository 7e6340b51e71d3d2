"""Opt-in hooks for libraries that serve models. Importing this does nothing to them; each module's `register()` does."""
