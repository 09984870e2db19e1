"""Jobs: recipes of the configuration that run under a lease, one process each, whatever happens to swapper."""
