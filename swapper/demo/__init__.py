"""The demonstration: the real product on tiny generated models, on any machine."""
