"""The kernel catalog and the loader: `import catalog` is what serving code needs."""
