"""What the parameters of a translated program stand for in an attention call. Holds no tensors: only names and numbers."""
